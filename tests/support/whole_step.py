"""Whole RL steps of tiny models, on any device.

Each step is that of `run/step.py`: the engine samples, the learner scores with replay, corrects
and updates, and the engine gets the new weights.
"""

import asyncio
import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from onepolicy.build.components import Components, route_spec_of, sampling_of
from onepolicy.build.learner import build_update_parts
from onepolicy.config import RunConfig, WeightsReplay, resolve
from onepolicy.envs.multiturn.trajectory import Trajectory
from onepolicy.interfaces import Problem
from onepolicy.models import fp32_head
from onepolicy.models.load import DTYPES
from onepolicy.models.logits_chunks import install_logits_chunks
from onepolicy.models.prepare import prepare_for_training
from onepolicy.replay.layers import is_moe
from onepolicy.replay.routers import Routers, bind_routers
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.run.hooks import build_hooks
from onepolicy.run.step import StepResult, StepTimer, sample_rollouts, train_on_rollouts
from onepolicy.sync.push import push_weights
from onepolicy.train.critic import Critic
from onepolicy.train.learner import LocalLearner
from onepolicy.train.scorer import PolicyScorer
from onepolicy.types import Sampling
from support.models import VOCAB, make
from support.step_cases import overrides_of

MAX_TOKENS = 12
TREE: dict[str, Any] = {
    **{"out": "x", "steps": 4, "model": {"path": "m"}, "task": {"kind": "chain"}},
    **{"optim": {"lr": 1e-2}, "train": {"tokens_per_micro_batch": 64}},
    "rollout": {
        **{"prompts_per_step": 3, "group_size": 2, "sampling": {"max_tokens": MAX_TOKENS}},
        "engine": {"dtype": "float32", "max_num_seqs": 4},
    },
    "log": {"counterfactual_every": 1},
}


def config_of(variants: list[str], *overrides: str) -> RunConfig:
    """Return the settings of these variants of step_cases.py."""
    return resolve(copy.deepcopy(TREE), [*overrides_of(variants), *overrides])


class Letters:
    """An environment of random prompts, graded by the sampled ids."""

    def train_problem(self, index: int) -> Problem:
        return Problem(index, "", "")

    async def episode(self, problem: Problem, sample, temperature):
        rng = random.Random(problem.id)
        path = Trajectory([rng.randrange(2, VOCAB) for _ in range(10 + rng.randrange(9))])
        completion = await sample(path.tokens)
        path.append_completion(completion)
        reward = float(completion.token_ids.double().mean()) / VOCAB
        return (path.to_sample(reward=reward, temperature=temperature),)


@dataclass
class Models:
    """Tiny models of one family on one device.

    place: moves a model to the device. changes: of the family's config.
    """

    family: str
    place: Callable[[PreTrainedModel], PreTrainedModel]
    changes: dict[str, Any] = field(default_factory=dict)

    def make(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        return self.place(make(self.family, seed, dtype, **self.changes))

    def for_training(self, config: RunConfig, seed: int = 0) -> PreTrainedModel:
        """Make a model as `build/learner.py` loads it."""
        model = self.make(seed, DTYPES[config.model.dtype])
        device = next(model.parameters()).device
        if config.model.lm_head == "float32":
            fp32_head.install_fp32_head(model, model.dtype, field="model.lm_head")
        prepare_for_training(model, device)
        if config.train.logits_chunk:
            install_logits_chunks(model, config.train.logits_chunk)
        return model


def build_learner(models: Models, config: RunConfig) -> LocalLearner:
    """Build a learner with its reference and critic, if the settings have them."""
    model = models.for_training(config)
    reference = critic = None
    if config.objective.kl.coef:
        reference = models.for_training(config, seed=1).requires_grad_(False)
    if config.objective.critic is not None:
        copied = models.for_training(config, seed=1)
        critic = Critic(copied, config.objective.critic, config.optim)
    scorer = PolicyScorer(model, config, routers=routers_of(model))
    parts = build_update_parts(config, reference=reference, critic=critic)
    return LocalLearner(scorer, parts=parts, critic=critic)


def routers_of(model: PreTrainedModel) -> Routers | None:
    if not is_moe(model.config):
        return None
    return bind_routers(model)


def build_engine(models: Models, config: RunConfig) -> HFEngine:
    """Build the embedded engine, with calibrated scales if they are static."""
    model = models.make()
    engine = HFEngine(
        model,
        config.rollout.engine,
        return_routes=is_moe(model.config),
        combine_weights=isinstance(config.replay, WeightsReplay),
        max_len=64,
        quant=config.rollout.quant,
        pressure=config.rollout.pressure,
    )
    scales = engine.static_scales
    if scales is not None:

        async def calibrate():
            await engine.generate(list(range(2, 30)), Sampling(1.0, MAX_TOKENS), seed=0)
            scales.calibrate()
            await engine.reset_cache()

        asyncio.run(calibrate())
    return engine


def build(models: Models, config: RunConfig, stop: tuple[int, ...] = (1,)) -> Components:
    """Build the objects of a run."""
    learner = build_learner(models, config)
    route_spec = None
    if learner.routers is not None:
        route_spec = route_spec_of(config, learner.routers)
    engine = build_engine(models, config)
    return Components(
        config=config,
        engine=engine,
        samplers=(engine,),
        environment=Letters(),
        sampling=sampling_of(config, stop, config.correction.top_logprobs(VOCAB)),
        route_spec=route_spec,
        learner=learner,
        correction=config.correction.fixed_part,
    )


def play(parts: Components, step: int, between=lambda: None) -> StepResult:
    """Run one step. between: called after the rollouts."""
    rollouts = asyncio.run(sample_rollouts(parts, step))
    between()
    result = train_on_rollouts(parts, build_hooks(parts), step, rollouts, StepTimer())
    asyncio.run(push_weights(parts.learner, *parts.samplers))
    return result


def measure(
    case: str,
    place: Callable[[PreTrainedModel], PreTrainedModel],
    changes: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Run a case of step_cases.py: one step, and the rollouts of the next one.

    place, changes: see Models.
    """
    family, *variants = case.split()
    parts = build(Models(family, place, changes or {}), config_of(variants))
    weights = list(parts.learner.model.parameters())
    before = [p.detach().cpu().clone() for p in weights]
    result = play(parts, 0)
    batch = result.batch
    again = asyncio.run(sample_rollouts(parts, 1))
    moved = sum(not torch.equal(a, b.detach().cpu()) for a, b in zip(before, weights, strict=True))
    return {
        "case": case,
        "gap": float((batch.logp_old - batch.logp_rollout)[batch.trainable].abs().max()),
        "grad_norm": result.metrics["train/grad_norm"],
        "version": parts.engine.version,
        "moved": moved / len(weights),
        "groups": len(again.groups),
    }


def check(found: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Raise AssertionError unless a step was whole: sampled, scored, trained on and pushed.

    tolerance: largest difference of log-probabilities [nats] where engine and learner compute in
    float32.
    """
    words = set(found["case"].split())
    if "bfloat16" in words:
        tolerance = 0.05
    if words & {"int8", "int8-static", "fp8", "fp8-weight", "simulated"}:
        assert tolerance < found["gap"] < 5, "weights of the engine were not quantised"
    elif "pressure" in words:
        assert found["gap"] < 5, found
    else:
        assert found["gap"] < tolerance, found
    assert found["grad_norm"] > 0, found
    assert (found["version"], found["groups"]) == (1, 3), found
    assert found["moved"] > 0.5, found
