"""A script of the oracle venv: losses and gradients of TRL's and verl's objectives.
`objective_peers.py IN.npz OUT.npz`."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

TRL: dict[str, dict[str, Any]] = {
    "grpo": {},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.5},
    "sapo": {"loss_type": "sapo"},
    "gspo": {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.1},
    "delta": {"loss_type": "dapo", "delta": 1.5},
    "kl": {"loss_type": "dapo", "beta": 0.3},
    "plain kl": {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": False},
    "weights": {"loss_type": "dapo", "use_vllm": True},
}
VERL = {
    "vanilla": "token-mean",
    "vanilla seq-mean-token-mean": "seq-mean-token-mean",
    "vanilla seq-mean-token-sum": "seq-mean-token-sum",
    "vanilla seq-mean-token-sum-norm": "seq-mean-token-sum-norm",
    "gspo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "cispo": "token-mean",
    "geo_mean": "seq-mean-token-mean",
}


def trl(given: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Run GRPOTrainer._compute_loss on a stand-in trainer: only its settings and the model's
    log-probabilities."""
    from trl import GRPOTrainer

    ids = torch.ones_like(given["old"], dtype=torch.long)
    inputs = {
        **{"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids},
        **{"completion_mask": given["mask"], "advantages": given["advantage"]},
        **{"old_per_token_logps": given["old"], "ref_per_token_logps": given["reference"]},
        **{"importance_sampling_ratio": given["weight"], "num_items_in_batch": given["mask"].sum()},
    }

    def loss(settings: dict[str, Any], new: Tensor) -> Tensor:
        s = {"loss_type": "grpo", "importance_sampling_level": "token", "beta": 0.0}
        s |= {"epsilon_low": 0.2, "epsilon_high": 0.2, "use_vllm": False, **settings}
        arguments = SimpleNamespace(
            use_bias_correction_kl=s.pop("use_bias_correction_kl", True),
            delta=s.pop("delta", None),
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
        )
        trainer = SimpleNamespace(
            args=arguments,
            model=SimpleNamespace(training=True),
            accelerator=SimpleNamespace(
                num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x
            ),
            _get_per_token_logps_and_entropies=lambda *a, **k: (new, torch.zeros_like(new), None),
            aux_loss_enabled=False,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            vllm_importance_sampling_correction=True,
            current_gradient_accumulation_steps=1,
            max_completion_length=new.shape[1],
            _entropy_bonus_enabled=False,
            _metrics=defaultdict(lambda: defaultdict(list)),
            **s,
        )
        return GRPOTrainer._compute_loss(trainer, None, inputs)

    out: dict[str, np.ndarray] = {}
    for name, settings in TRL.items():
        out |= differentiate(f"trl/{name}", given["new"], partial(loss, settings))
    return out


def verl(given: dict[str, Tensor]) -> dict[str, np.ndarray]:
    from verl.trainer.ppo import core_algos as core
    from verl.workers.config import ActorConfig

    mask, advantage = given["mask"].float(), given["advantage"][:, None].expand_as(given["old"])
    out: dict[str, np.ndarray] = {}
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, clip_ratio_low=0.1, clip_ratio_high=0.15
    )
    for name, mode in VERL.items():
        policy_loss = core.get_policy_loss_fn(name.split()[0])
        for weight in (None, given["weight"]):
            key = f"verl/{name}" if weight is None else f"verl/{name} weighted"
            rest = (advantage, mask, mode, config, weight)
            loss = partial(verl_loss, policy_loss, given["old"], rest)
            out |= differentiate(key, given["new"], loss)

    def clipped_value(new: Tensor) -> Tensor:
        return core.compute_value_loss(new, given["reference"], given["value"], mask, 0.2)[0]

    out |= differentiate("verl/value", given["old"], clipped_value)
    for estimator in ("k1", "k2", "k3"):
        penalty = core.kl_penalty(given["new"], given["reference"], estimator)
        out[f"verl/{estimator}"] = penalty.numpy()
    return out | verl_advantages(core, given, mask)


def verl_loss(policy_loss: Any, old: Tensor, rest: tuple[Any, ...], new: Tensor) -> Tensor:
    return policy_loss(old, new, *rest)[0]


def verl_advantages(core: Any, given: dict[str, Tensor], mask: Tensor) -> dict[str, np.ndarray]:
    """Return verl's advantages. `score` of a sample is at its last slot; `group` has the groups of
    samples, the last one alone in its own."""
    last = mask.cumsum(1).argmax(1, keepdim=True)
    rewards = torch.zeros_like(mask).scatter(1, last, given["score"][:, None])
    index = given["group"].numpy()
    out: dict[str, Any] = {
        "grpo": core.compute_grpo_outcome_advantage(rewards.clone(), mask, index)[0],
        "dr-grpo": core.compute_grpo_outcome_advantage(
            rewards.clone(), mask, index, norm_adv_by_std_in_grpo=False
        )[0],
        "rloo": core.compute_rloo_outcome_advantage(rewards.clone(), mask, index)[0],
        "reinforce++-baseline": core.compute_reinforce_plus_plus_baseline_outcome_advantage(
            rewards.clone(), mask, index
        )[0],
        "reinforce++": core.compute_reinforce_plus_plus_outcome_advantage(
            rewards.clone(), mask, config=SimpleNamespace(gamma=0.9)
        )[0],
    }
    out["gae"], out["returns"] = core.compute_gae_advantage_return(
        rewards, given["value"], mask, 0.9, 0.8
    )
    return {f"verl/{name}": value.numpy() for name, value in out.items()}


def differentiate(name: str, at: Tensor, loss: Callable[[Tensor], Tensor]) -> dict[str, np.ndarray]:
    leaf = at.clone().requires_grad_()
    value = loss(leaf)
    value.backward()
    assert leaf.grad is not None
    return {f"{name}/loss": value.detach().numpy(), f"{name}/grad": leaf.grad.numpy()}


def main() -> None:
    given = {name: torch.from_numpy(array) for name, array in np.load(sys.argv[1]).items()}
    np.savez(sys.argv[2], **trl(given), **verl(given))


if __name__ == "__main__":
    main()
