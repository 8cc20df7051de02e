"""A script of the oracle venv: results of verl, TRL and OpenRLHF for given arrays. `peers.py IN.npz
OUT.npz`."""

from __future__ import annotations

import importlib.util
import sys
import types

import numpy as np
import torch

METRICS = ("k3_kl", "chi2_token", "kl", "ppl_ratio")
NORMALISED = {"rollout_is": "token", "rollout_is_threshold": 2.0}
NORMALISED |= {"rollout_is_batch_normalize": True}
VERL = {
    "token 2": {"rollout_is": "token", "rollout_is_threshold": 2.0},
    "token 0.5_5": {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
    "sequence 2": {"rollout_is": "sequence", "rollout_is_threshold": 2.0},
    "sequence 0.5_2": {"rollout_is": "sequence", "rollout_is_threshold": "0.5_2.0"},
    "token 2 normalised, seq_mean_k3": NORMALISED
    | {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.02},
    "token 2 normalised": NORMALISED,
    "sequence 2 normalised": NORMALISED | {"rollout_is": "sequence"},
    **{
        f"{rs} {bound}": {"rollout_rs": rs, "rollout_rs_threshold": bound}
        for rs, bound in [
            *(("token_k1", "0.5_2.0"), ("token_k1", "0.6_1.4"), ("token_k2", 0.02)),
            *(("token_k3", 0.02), ("seq_sum_k1", "0.5_2.0"), ("seq_mean_k1", "0.9_1.1111111111")),
            *(("seq_mean_k3", 0.02), ("seq_max_k2", 0.1), ("seq_max_k3", 0.1)),
        ]
    },
}
OPENRLHF = {
    "token clip": ("token", "clip", "ratio", (0.0, 2.0)),
    "token mask": ("token", "mask", "ratio", (0.5, 5.0)),
    "seq mask": ("seq", "mask", "ratio", (0.9, 1.1)),
    "seq binary_kl": ("seq", "mask", "binary_kl", (0.0, 0.01)),
    "token tv": ("token", "mask", "tv", (0.0, 0.1)),
}


def verl(
    old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, b3: torch.Tensor
) -> dict[str, np.ndarray]:
    from verl.trainer.ppo.rollout_corr_helper import (
        compute_rollout_correction_and_rejection_mask as correct,
    )

    out: dict[str, np.ndarray] = {}
    for name, settings in VERL.items():
        weights, kept, metrics = correct(old, rollout, mask, **settings)
        if weights is not None:
            out[f"verl/{name}/weight"] = weights.batch["rollout_is_weights"].numpy()
        out[f"verl/{name}/keep"] = kept.numpy()
    found = {key.removeprefix("rollout_corr/"): float(value) for key, value in metrics.items()}
    out["verl/metrics"] = np.array([found[key] for key in METRICS])
    inverted = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.4"}
    out["verl/b3/keep"] = correct(b3.log(), torch.zeros_like(b3), torch.ones_like(b3), **inverted)[
        1
    ].numpy()
    return out


def trl(
    old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, advantage: torch.Tensor
) -> dict[str, np.ndarray]:
    from trl import GRPOTrainer

    def keep(new: torch.Tensor) -> np.ndarray:
        return GRPOTrainer.get_off_policy_mask(advantage[:, None], new, rollout, mask, 0.01).numpy()

    broken = old.clone()
    broken[0, 0] = float("nan")
    return {"trl/opsm/keep": keep(old), "trl/opsm nan/keep": keep(broken)}


def openrlhf(old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> dict[str, np.ndarray]:
    """Return the weights from the gradient at new = old and A = 1: -weight / N. Its loss file is
    loaded without deepspeed."""
    where = importlib.util.find_spec("openrlhf")
    assert where is not None
    assert where.submodule_search_locations
    folder = f"{where.submodule_search_locations[0]}/models"
    package = types.ModuleType("models")
    package.__path__ = [folder]
    sys.modules |= {"models": package, "deepspeed": types.ModuleType("deepspeed")}
    loss = importlib.import_module("models.loss")
    out = {}
    for name, (level, mode, gating, threshold) in OPENRLHF.items():
        settings = {"level": level, "mode": mode, "gating": gating, "threshold": threshold}
        made = loss.PolicyLoss(**{f"is_correction_{name}": v for name, v in settings.items()})
        new = old.clone().requires_grad_()
        given = {"action_mask": mask, "rollout_log_probs": rollout}
        made(new, old, torch.ones_like(old), **given)[0].backward()
        assert new.grad is not None
        out[f"openrlhf/{name}/weight"] = (-new.grad * mask.sum()).numpy()
    return out


def main() -> None:
    given = {name: torch.from_numpy(array) for name, array in np.load(sys.argv[1]).items()}
    old, rollout, mask = given["old"], given["rollout"], given["mask"].float()
    out = verl(old, rollout, mask, given["b3"][None])
    out |= trl(old, rollout, mask, given["advantage"]) | openrlhf(old, rollout, mask)
    np.savez(sys.argv[2], **out)


if __name__ == "__main__":
    main()
