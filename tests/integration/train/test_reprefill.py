"""Routes recorded by a second forward: right, labelled, and never mixed with an engine's."""

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
from support.learner_steps import BASE
from support.metrics import rows
from support.models import make


def reprefill_of(name="qwen3_moe", *, tokens=4096, weights=False):
    model = make(name)
    prepare_for_training(model, torch.device("cpu"))
    scorer = PolicyScorer(model.eval(), resolve(BASE), routers=bind_routers(model))
    return Reprefill(scorer, tokens=tokens, weights=weights)


def groups_of(name="qwen3_moe"):
    """Return two groups of two samples, with the routes of the embedded engine in float32."""
    requests = ragged(prompts(4))
    done = run(build(name), requests)
    samples = []
    for (prompt, _, _), completion in zip(requests, done, strict=True):
        path = Trajectory(prompt)
        path.append_completion(completion)
        sample = path.to_sample(reward=0.0, temperature=1.0)
        samples.append(dataclasses.replace(sample, outcome=0.0))
    return [Group(0, tuple(samples[:2])), Group(1, tuple(samples[2:]))]


def without_routes(groups):
    found = []
    for group in groups:
        samples = (dataclasses.replace(sample, routing=None) for sample in group.samples)
        found.append(dataclasses.replace(group, samples=tuple(samples)))
    return found


def first_slots(sample, count):
    """Return the fields of a sample that ends after so many slots."""
    names = ("trainable", "logp_rollout", "version", "turn")
    return {name: getattr(sample, name)[:count] for name in names} | {
        "tokens": sample.tokens[: count + 1]
    }


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_a_reprefill_finds_the_routes_of_the_engine(name, subtests):
    groups = groups_of(name)
    for tokens in (1, 40, 4096):
        with subtests.test(tokens=tokens):
            reprefill = reprefill_of(name, tokens=tokens, weights=True)
            filled = reprefill.fill(without_routes(groups))
            for group, own in zip(filled, groups, strict=True):
                for sample, recorded in zip(group.samples, own.samples, strict=True):
                    found, expected = sample.routing, recorded.routing
                    assert torch.equal(found.ids.sort(-1)[0], expected.ids.sort(-1)[0])
                    assert found.spans == (RouteSpan(0, len(sample.tokens) - 1, "reprefill", 0),)
                    assert found.valid.all()
                    assert found.weights.shape == found.ids.shape
            assert {span.source for span in pack(filled).routing.spans} == {"reprefill"}


@pytest.mark.parametrize(("kind", "dtype"), [("hf", None), ("vllm", "bfloat16")])
def test_it_takes_weights_rounded_as_its_engine_does(kind, dtype):
    """Under rollout.quant other codes would come of unrounded ones."""
    config = resolve(BASE, [f"rollout.engine.kind={kind}", "replay.source=reprefill"])
    model = make("qwen3_moe")
    scorer = PolicyScorer(model.eval(), config, routers=bind_routers(model))
    assert Reprefill(scorer, tokens=8).caps.weights_dtype == dtype


def forward_sizes(reprefill, group):
    """Return the slots of each forward that records a group's routes."""
    seen = []
    reprefill._scorer.model.register_forward_pre_hook(
        lambda module, args, how: seen.append(how["input_ids"].numel()), with_kwargs=True
    )
    reprefill.fill([group])
    return seen


def test_a_forward_has_as_many_whole_samples_as_fit():
    """A sample of n tokens has n - 1 slots. One that is too long has a forward of its own."""
    (sample, *_), _ = (group.samples for group in without_routes(groups_of()))
    short = [dataclasses.replace(sample, **first_slots(sample, n)) for n in (4, 5, 9, 3, 3)]
    group = Group(0, tuple(short))
    for tokens, forwards in ((9, [9, 9, 6]), (8, [4, 5, 9, 6]), (3, [4, 5, 9, 3, 3])):
        assert forward_sizes(reprefill_of(tokens=tokens), group) == forwards


def test_recorded_routes_are_never_mixed_and_are_of_the_held_weights():
    groups, reprefill = groups_of(), reprefill_of()
    other = make("qwen3_moe", seed=5).state_dict()
    with pytest.raises(UsageError, match="sample 0 has its engine's routes"):
        reprefill.fill(groups)
    filled = reprefill.fill(without_routes(groups))
    with pytest.raises(UsageError, match="recorded by the engine and others by a re-prefill"):
        pack([groups[0], filled[1]])
    asyncio.run(reprefill.load_weights(other.items(), 3))
    with pytest.raises(UsageError, match=r"weights \[0\], but the re-prefill holds version 3"):
        reprefill.fill(without_routes(groups))
    asyncio.run(reprefill.load_weights(other.items(), 0))
    after = reprefill.fill(without_routes(groups))
    before, after = (each[0].samples[0].routing.ids for each in (filled, after))
    assert not torch.equal(before, after)


@pytest.mark.full
def test_a_run_on_reprefilled_routes(train):
    found = rows(train(None, "steps=2", "eval.every=0", "replay.source=reprefill"))
    assert len(found) == 2
    for row in found:
        assert row["time/reprefill"] > 0
        assert row["routing/routers"] < 0.2  # bfloat16 copy against float32 trainer
