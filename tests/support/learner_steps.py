"""A batch of random samples, a learner of a tiny model, and one step of it."""

import copy

import torch

from onepolicy.build.learner import build_update_parts
from onepolicy.config import resolve
from onepolicy.models.prepare import prepare_for_training
from onepolicy.objective.advantages import compute_advantages
from onepolicy.replay.routers import bind_routers
from onepolicy.train.critic import Critic
from onepolicy.train.learner import LocalLearner
from onepolicy.train.pack import pack
from onepolicy.train.scorer import PolicyScorer
from onepolicy.types import Group, RoutingTrace, Sample
from support.models import VOCAB, make

BASE = {"out": "x", "steps": 1, "model": {"path": "m"}, "task": {"kind": "chain"}}
BASE |= {"optim": {"lr": 1e-2, "clip_norm": 1e9}}
EXPERTS, LAYERS = 8, (0, 1, 2)


def random_sample(
    length: int, outcome: float, generator: torch.Generator, temperature: float = 1.0
) -> Sample:
    slots = length - 1
    trainable, zeros = torch.arange(slots) >= 2, torch.zeros(slots, dtype=torch.int32)
    drawn = torch.rand(slots, len(LAYERS), EXPERTS, generator=generator)
    ids = drawn.topk(2).indices.to(torch.uint8)
    return Sample(
        tokens=torch.randint(0, VOCAB, (length,), generator=generator, dtype=torch.int32),
        trainable=trainable,
        logp_rollout=torch.where(trainable, -3.0, torch.nan),
        version=zeros,
        turn=zeros.clone(),
        temperature=temperature,
        reward=0.0,
        finish="stop",
        routing=RoutingTrace(ids, torch.ones(slots, dtype=torch.bool), LAYERS, EXPERTS),
        outcome=outcome,
    )


def batch_of(temperature: float = 1.0):
    generator = torch.Generator().manual_seed(3)
    sizes = [(9, 1.0), (14, -0.5), (6, 0.7), (23, -1.2), (11, 0.0), (8, 2.0), (17, -0.3), (5, 0.4)]
    samples = [random_sample(n, outcome, generator, temperature) for n, outcome in sizes]
    return pack([Group(g, tuple(samples[2 * g : 2 * g + 2])) for g in range(4)])


def learner_of(
    *overrides: str, routed: bool = True, name: str = "qwen3_moe", reference=None
) -> LocalLearner:
    """Return a learner, with a critic if the objective has one."""
    replayed = ["replay.min_agreement=0"]  # random routes agree with nothing
    if {"replay.mode=off", "replay.mode=r2"} & set(overrides):
        replayed = []
    config = resolve(BASE, [*replayed, *overrides, "rollout.prompts_per_step=4"])
    model = make(name)
    prepare_for_training(model, torch.device("cpu"))
    critic = None
    if config.objective.critic is not None:
        copied = copy.deepcopy(model)
        protect = "value" in config.correction.protect
        critic = Critic(copied, config.objective.critic, config.optim, protect=protect)
    scorer = PolicyScorer(model, config, routers=bind_routers(model) if routed else None)
    parts = build_update_parts(config, reference=reference, critic=critic)
    return LocalLearner(scorer, parts=parts, critic=critic)


def one_step(learner: LocalLearner, batch, weight=None):
    batch = compute_advantages(learner.score(batch), learner.config.objective)
    batch = batch.replace(
        weight=torch.ones(batch.num_slots) if weight is None else weight, keep=batch.trainable
    )
    metrics, learner.scored = learner.step(batch)
    return batch, metrics, {n: p.detach().clone() for n, p in learner.model.named_parameters()}
