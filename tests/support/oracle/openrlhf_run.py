"""A script of the oracle venv: `openrlhf_run.py OUT.json` runs OpenRLHF's own classes under our
setup, with a tiny MoE. flash-attn, DeepSpeed and vLLM, which need a GPU, are empty modules here."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import json
import os
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import accelerate  # noqa: F401
import peft  # noqa: F401
import torch
import transformers.integrations.deepspeed
import transformers.modeling_flash_attention_utils  # noqa: F401
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import onepolicy as op
from onepolicy.audit.run import audit
from onepolicy.config import UsageError
from onepolicy.integrations import openrlhf as op_openrlhf
from onepolicy.integrations.core.armed import ArmedReplay
from onepolicy.integrations.openrlhf.experience import SETTINGS
from onepolicy.replay.checks import RoutingError

EMPTY = ("flash_attn", "deepspeed", "vllm")
CLIPPED = {"is_correction_level": "token", "is_correction_mode": "clip"}
CLIPPED |= {"is_correction_threshold": [0, 2.0]}


class Empty(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class EmptyModules:
    def find_spec(self, name, path=None, target=None):
        kernels = name.startswith("flash_attn.ops")  # without it OpenRLHF takes torch's
        if name.split(".")[0] in EMPTY and not kernels:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Empty(spec.name)

    def exec_module(self, module):
        pass


def arguments(level="token", loss="ppo"):
    advantage = SimpleNamespace(
        estimator="group_norm", gamma=1.0, lambd=1.0, is_correction_level=level, no_std_norm=False
    )
    reward = {"overlong_buffer_len": None, "stop_properly_penalty_coef": None}
    return SimpleNamespace(
        algo=SimpleNamespace(advantage=advantage),
        actor=SimpleNamespace(policy_loss_type=loss),
        rollout=SimpleNamespace(n_samples_per_prompt=2),
        reward=SimpleNamespace(clip_range=(-10, 10), **reward),
    )


def experiences(made):
    """Return two experiences of two samples each, of other lengths, as OpenRLHF's class."""
    random = torch.Generator().manual_seed(0)
    found = []
    for number, length in enumerate((9, 6)):
        mask = torch.ones(2, length)
        mask[:, :2] = 0
        mask[1, -1] = 0
        old = (-3 - torch.rand(2, length, generator=random)) * mask
        rollout = (old - 0.4 * torch.randn(2, length, generator=random)) * mask
        found.append(
            made(
                sequences=torch.randint(1, 60, (2, length + 1), generator=random),
                attention_mask=torch.ones(2, length + 1, dtype=torch.long),
                action_mask=mask,
                action_log_probs=old,
                rollout_log_probs=rollout,
                rewards=torch.tensor([1.0, 0.0]) + number,
                kl=torch.zeros(2, length),
                index=[2 * number, 2 * number + 1],
                info={},
            )
        )
    return found


def maker_of(module, args):
    maker = object.__new__(module.RemoteExperienceMaker)
    maker.args, maker.strategy = args, SimpleNamespace(args=args)
    maker.advantage_estimator = args.algo.advantage.estimator
    maker.kl_ctl = SimpleNamespace(value=0.0)
    return maker


def settings(**values):
    os.environ[SETTINGS] = json.dumps(values)


def stepped(modules, **values):
    """Return the experiences of a step with these settings."""
    settings(**values)
    maker = maker_of(modules.maker, arguments())
    return maker.compute_advantages_and_returns(experiences(modules.experience.Experience))


def correction_step(modules, folder):
    plain, tis = stepped(modules), stepped(modules, correction="tis", dump=str(folder))
    weights = []
    for a, b in zip(plain, tis, strict=True):
        rho = (a.action_log_probs - a.rollout_log_probs).exp()
        expected = a.advantages * rho.clamp(max=2.0) * a.action_mask
        weights.append(float((b.advantages * a.action_mask - expected).abs().max()))
    names = ("action_log_probs", "rollout_log_probs", "action_mask")
    old, rollout, mask = (torch.cat([getattr(e, n).flatten() for e in plain]) for n in names)
    found = audit(folder, {}).accumulated.steps
    parts = modules.experience.split_experience_batch(tis[0])
    batch = modules.experience.make_experience_batch(parts)
    return {
        "tis error": max(weights),
        "k3": float(plain[1].info["mismatch/k3"][0]),
        "k3 expected": op.mismatch(old, rollout, mask.bool()).k3,
        "k3 of the dump": [float(step.statistics()["k3"]) for step in found.values()],
        "reported": sorted(batch.info),
    }


def gradients(modules):
    """Return the largest difference of gradients: ours in the advantages against OpenRLHF's."""
    settings()
    (experience,) = stepped(modules)[:1]
    theirs = gradient(modules.loss.PolicyLoss(**CLIPPED), experience)
    return float((theirs - ours(modules, "tis")).abs().max())


def gradient(policy_loss, experience):
    new = (experience.action_log_probs * 0.97).requires_grad_()
    given = (new, experience.action_log_probs, experience.advantages)
    loss = policy_loss(*given, experience.action_mask, experience.rollout_log_probs)[0]
    loss.backward()
    return new.grad


def ours(modules, correction):
    """Return the gradient of the first experience in OpenRLHF's loss, our correction set."""
    (experience,) = stepped(modules, correction=correction)[:1]
    return gradient(modules.loss.PolicyLoss(**CLIPPED), experience)


def live_gradients(modules):
    """Return the largest differences of live corrections' gradients from those by hand."""
    (plain,) = stepped(modules)[:1]
    mask, advantages = plain.action_mask, plain.advantages
    new = (plain.action_log_probs * 0.97).requires_grad_()
    ratio = (new - plain.rollout_log_probs).exp()
    weight = ratio.detach().clamp(max=2.0)
    by_hand = {
        "pg-tis": -weight * advantages * new,
        "ppo-is": -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages),
    }
    found = {}
    for name, loss in by_hand.items():
        (expected,) = torch.autograd.grad((loss * mask).sum() / mask.sum(), new, retain_graph=True)
        found[name] = float((ours(modules, name) - expected).abs().max())
    return found


class Made(Exception):
    """The experiences of a step are made; the rest of the step needs Ray."""


def dumps_of_a_resumed_run(modules, folder):
    """Return the files of a run that ended after 42 steps and was resumed after 41."""
    settings(dump=str(folder))
    for steps in ((40, 41), (41, 42)):
        trainer = object.__new__(modules.trainer.BasePPOTrainer)
        trainer.experience_maker = maker = maker_of(modules.maker, arguments())

        def make(_, maker=maker):
            maker.compute_advantages_and_returns(experiences(modules.experience.Experience))
            raise Made

        maker.make_experience_batch = make
        for done in steps:
            with contextlib.suppress(Made):
                trainer.train_step([], done)
    return sorted(path.name for path in folder.iterdir())


class ActorOfNumbers:
    """The log-probabilities that OpenRLHF's trainer is handed by its actor."""

    def __init__(self, logp):
        self.logp = logp

    def train(self):
        pass

    def __call__(self, *_, **__):
        return self.logp, SimpleNamespace()


def live_log(modules):
    """Return what OpenRLHF's trainer logs of a live correction, and the weights' mean by hand."""
    (experience,) = stepped(modules, correction="pg-tis")[:1]
    new = (experience.action_log_probs * 0.97).requires_grad_()
    trainer = object.__new__(modules.ppo_actor.ActorPPOTrainer)
    trainer.actor, trainer.actor_loss_fn = ActorOfNumbers(new), modules.loss.PolicyLoss()
    trainer.args = SimpleNamespace(
        actor=SimpleNamespace(entropy_coef=None),
        algo=SimpleNamespace(kl=SimpleNamespace(use_loss=False)),
        train=SimpleNamespace(dynamic_batch_enable=False),
    )
    trainer.strategy = SimpleNamespace(
        ring_attn_group=None,
        backward=lambda loss, *_: loss.backward(),
        optimizer_step=lambda *_, **__: None,
        get_grad_norm=lambda _: 0.0,
    )
    trainer.actor_optim = trainer.ema_model = None
    trainer.aux_loss = False
    trainer.actor_scheduler = SimpleNamespace(get_last_lr=lambda: [0.0])
    status = trainer.training_step(experience, 0.0, 0, {})
    mask = experience.action_mask.bool()
    weight = (new.detach() - experience.rollout_log_probs).exp().clamp(max=2.0)
    names = [name for name in status["metrics"] if name.startswith("correction/")]
    return {
        "names": sorted(names),
        "weighed by": sorted({status["weights"][name] for name in names}),
        "weight_mean": float(status["metrics"].get("correction/weight_mean", -1)),
        "by hand": float(weight[mask].mean()),
    }


def refusals(modules):
    found = {}
    for name, values, args in (
        ("no log-probabilities", {}, arguments("off")),
        ("score-centering", {"correction": "score-centering"}, arguments()),
        ("pg-tis in gspo", {"correction": "pg-tis"}, arguments(loss="gspo")),
    ):
        settings(**values)
        made = experiences(modules.experience.Experience)
        if args.algo.advantage.is_correction_level == "off":
            for experience in made:
                experience.rollout_log_probs = None
        try:
            maker_of(modules.maker, args).compute_advantages_and_returns(made)
        except UsageError as error:
            found[name] = str(error)
    return found


def replay(modules):
    """Return what OpenRLHF's actor scores with routes, and the error of routes one row late."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32},
        **{"moe_intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 8, "num_experts": 16, "num_experts_per_tok": 2},
        **{"attn_implementation": "eager"},
    )
    model = Qwen3MoeForCausalLM(config).eval()
    actor = modules.actor.Actor(model)
    actor.packing_samples = False
    sequences = torch.randint(1, 64, (3, 20))
    attention = torch.ones(3, 20, dtype=torch.long)
    attention[1, 13:] = 0
    routers = op.bind_routers(model)
    with routers.record() as tape, torch.no_grad():
        model(sequences, attention_mask=attention)
    traces = op.unpad_routes(tape.trace(), attention)
    changed = [one_row_changed(trace) for trace in traces]
    armed = ArmedReplay(actor.model)

    def score(routes, **more):
        with torch.no_grad(), armed.batch(routes, **more):
            return actor(sequences, torch.ones(3, 19), attention)

    with torch.no_grad():
        native = actor(sequences, torch.ones(3, 19), attention)
    late = [trace.at((torch.arange(len(trace)) - 1).clamp(min=0)) for trace in traces]
    said = ""
    try:
        score(late)
    except RoutingError as error:
        said = str(error)
    kept = attention[:, 1:].bool()
    return {
        "own routes": bool(score(traces)[kept].equal(native[kept])),
        "changed": float((score(changed, check=False) - native)[kept].abs().max()),
        "late": said,
    }


def one_row_changed(trace):
    ids = trace.ids.clone()
    ids[4] = (ids[4].int() + 1).remainder(trace.num_experts).to(ids.dtype)
    return op.RoutingTrace(ids, trace.valid, trace.layers, trace.num_experts)


def main():
    sys.meta_path.insert(0, EmptyModules())
    op_openrlhf.setup()
    names = {
        "experience": "openrlhf.trainer.ppo_utils.experience",
        "maker": "openrlhf.trainer.ppo_utils.experience_maker",
        "loss": "openrlhf.models.loss",
        "actor": "openrlhf.models.actor",
        "trainer": "openrlhf.trainer.ppo_trainer",
        "ppo_actor": "openrlhf.trainer.ray.ppo_actor",
    }
    modules = SimpleNamespace(**{k: importlib.import_module(v) for k, v in names.items()})
    out = Path(sys.argv[1])
    found = {
        "step": correction_step(modules, out.with_name("dump")),
        "tis against OpenRLHF's": gradients(modules),
        "live": live_gradients(modules),
        "live log": live_log(modules),
        "resumed": dumps_of_a_resumed_run(modules, out.with_name("resumed")),
        "refused": refusals(modules),
        "replay": replay(modules),
    }
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
