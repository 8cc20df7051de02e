"""Routes recorded by a second forward: right, labelled, and never mixed with an engine's."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch

from onepolicy.config import UsageError, resolve
from onepolicy.envs.multiturn.trajectory import Trajectory
from onepolicy.models.prepare import prepare_for_training
from onepolicy.replay.routers import bind_routers
from onepolicy.train.pack import pack
from onepolicy.train.reprefill import Reprefill
from onepolicy.train.scorer import PolicyScorer
from onepolicy.types import Group, RouteSpan
from support.engine_runs import build, prompts, ragged, run
from support.learner_steps import BASE, batch_of, learner_of
from support.metrics import rows
from support.models import make


def _reprefill(
    name: str = "qwen3_moe", *, tokens: int = 4096, weights: bool = False, seed: int = 0
) -> Reprefill:
    model = make(name, seed)
    prepare_for_training(model, torch.device("cpu"))
    scorer = PolicyScorer(model.eval(), resolve(BASE), routers=bind_routers(model))
    return Reprefill(scorer, tokens=tokens, weights=weights)


def _groups(name: str = "qwen3_moe") -> list[Group]:
    """Return two groups of two samples, with the routes of the embedded engine in float32."""
    requests = ragged(prompts(4))
    done = run(build(name), requests)
    samples = []
    for (prompt, _, _), completion in zip(requests, done, strict=True):
        path = Trajectory(prompt)
        path.append_completion(completion)
        samples.append(
            dataclasses.replace(path.to_sample(reward=0.0, temperature=1.0), outcome=0.0)
        )
    return [Group(0, tuple(samples[:2])), Group(1, tuple(samples[2:]))]


def _without_routes(groups: list[Group]) -> list[Group]:
    return [
        dataclasses.replace(
            g, samples=tuple(dataclasses.replace(s, routing=None) for s in g.samples)
        )
        for g in groups
    ]


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("tokens", [1, 40, 4096])
def test_a_reprefill_finds_the_routes_of_the_engine(name: str, tokens: int) -> None:
    groups = _groups(name)
    filled = _reprefill(name, tokens=tokens, weights=True).fill(_without_routes(groups))
    for group, own in zip(filled, groups, strict=True):
        for sample, recorded in zip(group.samples, own.samples, strict=True):
            assert torch.equal(sample.routing.ids.sort(-1)[0], recorded.routing.ids.sort(-1)[0])
            assert sample.routing.spans == (RouteSpan(0, len(sample.tokens) - 1, "reprefill", 0),)
            assert sample.routing.valid.all()
            assert sample.routing.weights.shape == sample.routing.ids.shape
    assert pack(filled).routing.reprefilled
    assert not pack(groups).routing.reprefilled


def test_recorded_routes_are_never_mixed_and_have_the_right_version() -> None:
    groups, reprefill = _groups(), _reprefill()
    with pytest.raises(UsageError, match="sample 0 has its engine's routes"):
        reprefill.fill(groups)
    filled = reprefill.fill(_without_routes(groups))
    with pytest.raises(
        UsageError, match="some routes were recorded by the engine and others by a re-prefill"
    ):
        pack([groups[0], filled[1]])
    asyncio.run(reprefill.load_weights(make("qwen3_moe", seed=5).state_dict().items(), 3))
    with pytest.raises(
        UsageError, match=r"sampled by weights \[0\], but the re-prefill holds version 3"
    ):
        reprefill.fill(_without_routes(groups))


def test_new_weights_record_other_routes() -> None:
    groups, reprefill = _without_routes(_groups()), _reprefill()
    before = reprefill.fill(groups)[0].samples[0].routing
    asyncio.run(reprefill.load_weights(make("qwen3_moe", seed=5).state_dict().items(), 0))
    after = reprefill.fill(groups)[0].samples[0].routing
    assert not torch.equal(before.ids, after.ids)


def test_the_learner_takes_only_the_configured_source() -> None:
    batch = batch_of()
    spans = (RouteSpan(0, batch.num_slots, "reprefill", 0),)
    labelled = batch.replace(routing=dataclasses.replace(batch.routing, spans=spans))
    with pytest.raises(
        UsageError, match=r"replay\.source: engine, but .* recorded by a re-prefill"
    ):
        learner_of().score(labelled)
    with pytest.raises(
        UsageError, match=r"replay\.source: reprefill, but .* recorded by the engine"
    ):
        learner_of("replay.source=reprefill").score(batch)
    learner_of("replay.source=reprefill").score(labelled)


def test_a_run_on_reprefilled_routes(train) -> None:
    found = rows(train(None, "steps=2", "eval.every=0", "replay.source=reprefill"))
    assert len(found) == 2
    for row in found:
        assert row["time/reprefill"] > 0
        assert (
            row["routing/routers"] < 0.2
        )  # bfloat16 copy against float32 trainer, like the engine's own
