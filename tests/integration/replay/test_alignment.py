"""The detector on real routes (bf16 engine, fp32 trainer), lost routes, and forwards that replay
must not change."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from onepolicy.build.components import Components, build_components
from onepolicy.config import RunConfig, UsageError, resolve
from onepolicy.divergence.routing import routing_agreement
from onepolicy.objective.advantages import compute_outcomes
from onepolicy.replay import RoutingError
from onepolicy.replay.alignment import check_alignment
from onepolicy.replay.checks import constant_layers
from onepolicy.replay.windows import window_starts
from onepolicy.rollout.collect import collect_rollouts
from onepolicy.run.hooks import build_hooks, compare_scorings, repeat_metrics
from onepolicy.run.log import is_known
from onepolicy.run.step import StepRunner
from onepolicy.run.step_metrics import metrics_per_layer, mismatch_metrics
from onepolicy.sync.push import push_weights
from onepolicy.train.checks import check_routes
from onepolicy.train.pack import pack
from onepolicy.train.route_words import warn_of_collapse
from onepolicy.types import Completion, RoutingTrace, Sampling, TokenBatch
from support.learner_steps import batch_of, learner_of, one_step


def config_of(policy, *overrides: str) -> RunConfig:
    tree = {"out": "x", "steps": 1, "model": {"path": str(policy)}, "train": {"threads": 1}}
    tree |= {"task": {"kind": "chain", "ops": 6}, "optim": {"lr": 1e-3}}
    rollout = {"prompts_per_step": 5, "group_size": 2, "sampling": {"max_tokens": 40}}
    rollout["engine"] = {"max_num_seqs": 16, "dtype": "bfloat16"}
    tree |= {"rollout": rollout, "log": {"tensorboard": False, "report": False}}
    return resolve(tree, list(overrides))


def parts_of(policy, *overrides: str) -> Components:
    return build_components(config_of(policy, *overrides))[0]


def rollout(parts: Components, step: int = 0) -> TokenBatch:
    async def play():
        await push_weights(parts.learner, parts.engine)
        given = parts.engine, parts.environment, parts.config.rollout, parts.sampling
        how = {"step": step, "seed": 0, "route_spec": parts.route_spec}
        return await collect_rollouts(*given, **how)

    groups, _ = asyncio.run(play())
    return pack(compute_outcomes(groups, parts.config.objective))


@pytest.fixture(scope="module")
def parts(policy) -> Components:
    return parts_of(policy)


@pytest.fixture(scope="module")
def batch(parts) -> TokenBatch:
    return rollout(parts)


def with_ids(batch: TokenBatch, ids: Tensor, valid: Tensor | None = None) -> TokenBatch:
    assert batch.routing is not None
    valid = batch.routing.valid if valid is None else valid
    return batch.replace(routing=dataclasses.replace(batch.routing, ids=ids, valid=valid))


def swapped(ids: Tensor, bounds: list[int], a: int, b: int) -> Tensor:
    out, n = ids.clone(), min(bounds[a + 1] - bounds[a], bounds[b + 1] - bounds[b])
    mine, theirs = slice(bounds[a], bounds[a] + n), slice(bounds[b], bounds[b] + n)
    out[mine], out[theirs] = ids[theirs], ids[mine]
    return out


def least_alike(ids: Tensor, bounds: list[int]) -> tuple[int, int]:
    """Return the two samples whose exchange changes the largest share of their choices."""

    def share(pair: tuple[int, int]) -> float:
        lengths = [bounds[sample + 1] - bounds[sample] for sample in pair]
        return int((swapped(ids, bounds, *pair) != ids).sum()) / sum(lengths)

    return max(itertools.combinations(range(len(bounds) - 1), 2), key=share)


def late_in(ids: Tensor, start: int, stop: int) -> Tensor:
    return torch.cat([ids[:start], ids[start:stop].roll(1, 0), ids[stop:]])


def column(ids: Tensor, index: int, other: Tensor) -> Tensor:
    out = ids.clone()
    out[:, index] = other
    return out


def foreign(ids: Tensor) -> Tensor:
    return torch.rand(*ids.shape[:2], 16).argsort(-1)[..., :4].to(ids.dtype)


def one_exchanged(ids: Tensor) -> Tensor:  # [T, 4] of 16
    """Return a layer's routes with another expert in the place of one of the four."""
    absent = torch.ones(len(ids), 16).scatter(1, ids.long(), 0.0).argmax(-1, keepdim=True)
    return torch.cat([absent.to(ids.dtype), ids[:, 1:]], 1)


AXIS = "layer axis is moved by one"
MISALIGNED = [
    (lambda ids, _: ids.roll(1, 0), "layer 0 agree in", "one row late", "routes of the one before"),
    (lambda ids, _: ids.roll(-1, 0), "layer 0 agree in", "one row early"),
    (lambda ids, _: ids.roll(1, 1), AXIS, "layer 1 holds those of layer 0"),
    (lambda ids, _: ids.roll(-1, 1), AXIS, "layer 1 holds those of layer 2"),
    (lambda ids, b: swapped(ids, b, *least_alike(ids, b)), "samples were swapped", "of sample"),
    (lambda ids, b: late_in(ids, b[2], b[3]), "sample 2 of the batch", "one row late"),
    (lambda ids, _: column(ids, 1, ids[:, 0]), "layer 1 agree", "1 holds the routes of layer 0"),
    (lambda ids, _: column(ids, 1, foreign(ids)[:, 1]), "layer 1 agree in", "layer 1 alone was"),
    (
        lambda ids, _: column(ids, 1, one_exchanged(ids[:, 1])),
        *("layer 1 agree in 7", "its router has changed since"),
    ),
    (lambda ids, _: foreign(ids), "every layer is wrong", "replay.min_agreement"),
]


def test_clean_routes_pass_with_room(parts, batch) -> None:
    scored = parts.learner.score(batch)
    agreement = routing_agreement(scored.routing, scored.routing_native)
    assert agreement.mean(0).min() > 0.95
    assert 0 < mismatch_metrics(scored)["routing/routers"] < 0.1  # bf16 does differ from fp32
    assert mismatch_metrics(scored)["replay/gate_mass"] > 0.99


def test_misaligned_routes_stop_the_first_batch_and_are_named(parts, batch, subtests) -> None:
    for wrong, *words in MISALIGNED:
        with subtests.test(words=words):
            torch.manual_seed(0)
            ids = wrong(batch.routing.ids, batch.cu_seqlens.tolist())
            with pytest.raises(RoutingError) as caught:
                parts.learner.score(with_ids(batch, ids))
            assert [word for word in words if word not in str(caught.value)] == []


def test_rows_not_valid_are_not_compared(parts, batch) -> None:
    bounds = batch.cu_seqlens.tolist()
    ids = late_in(batch.routing.ids, bounds[2], bounds[3])
    valid = batch.routing.valid.clone()
    valid[bounds[2] : bounds[3]] = False
    parts.learner.score(with_ids(batch, ids, valid))
    lacking = with_ids(batch, ids, torch.zeros_like(valid))
    nothing = parts.learner.score(lacking)
    # of the same batch: prefixes are shared by what is replayed, and other shapes sum otherwise
    native = parts.learner.scorer.score(lacking, replay=False).logp_old
    assert torch.equal(nothing.logp_old, native)
    metrics = mismatch_metrics(nothing) | metrics_per_layer(nothing)
    assert metrics["replay/missing_samples"] == 1
    assert metrics["replay/native_rows"] == 1
    assert not [name for name in metrics if name.startswith("routing/")]


@hypothesis_settings(max_examples=30)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=9))
def test_windows_split_samples_evenly(lengths: list[int]) -> None:
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    starts = window_starts(bounds)
    assert set(bounds[:-1].tolist()) <= set(starts.tolist())
    sizes = torch.cat([starts, bounds[-1:]]).diff()
    assert sizes.sum() == sum(lengths)
    assert sizes.max() <= 24
    assert sizes.min() >= min(8, *lengths)


def test_thresholds_by_hand() -> None:
    """16 experts in pairs make agreement 1 or 0 per row. 13 of 16 rows (81%) pass, 12 (75%) do
    not."""
    ids = torch.arange(2, dtype=torch.uint8).expand(16, 1, 2)
    valid = torch.ones(16, dtype=torch.bool)
    native = RoutingTrace(ids, valid, (3,), 16)
    for wrong, raises in ((3, False), (4, True)):
        other = ids.clone()
        other[:wrong] += 5
        replayed = RoutingTrace(other, valid, (3,), 16)
        if raises:
            with pytest.raises(RoutingError, match="layer 3 agree in 75%, expected at least 80%"):
                check_alignment(replayed, native)
            check_alignment(replayed, native, least=0.75)
        else:
            check_alignment(replayed, native)
    both = torch.cat([ids, other], 1)  # the second layer is wrong in 4 rows
    replayed, native = (RoutingTrace(x, valid, (3, 5), 16) for x in (both, ids.expand(16, 2, 2)))
    words = r"layer 5 agree in 75% \(1 of 2 layers are below 80%\)"
    with pytest.raises(RoutingError, match=words):
        check_alignment(replayed, native)


def test_few_routers_may_differ_by_chance() -> None:
    """2 layers, top 1 of 128, 7% of the routes differ: the lowest of 400 windows is below 80%."""
    generator = torch.Generator().manual_seed(0)
    native = torch.randint(128, (6400, 2, 1), generator=generator).byte()
    others = (native + torch.randint(1, 128, native.shape, generator=generator)).byte() % 128
    ids = torch.where(torch.rand(native.shape, generator=generator) < 0.07, others, native)
    valid = torch.ones(6400, dtype=torch.bool)
    right, own = (RoutingTrace(trace, valid, (0, 1), 128) for trace in (ids, native))
    agreement = routing_agreement(right, own).mean(1)
    assert agreement.view(400, 16).mean(1).min() < 0.8 < agreement.mean()
    wrong = ids.clone()
    wrong[640:672] = ids[6080:6112]  # another sample's
    for bounds, words in ((torch.arange(0, 6401, 32), "sample 20"), (None, "rows 6[45]")):
        check_alignment(right, own, bounds)
        with pytest.raises(RoutingError, match=words):
            check_alignment(RoutingTrace(wrong, valid, (0, 1), 128), own, bounds)


# --- in the loop ----------------------------------------------------------------------------------


@dataclasses.dataclass
class Broken:
    """An engine whose completions `spoil` changes."""

    engine: object
    spoil: Callable[[Completion], Completion]

    def __getattr__(self, name: str) -> object:
        return getattr(self.engine, name)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Completion:
        return self.spoil(await self.engine.generate(prompt_ids, sampling, seed=seed))


def with_routes(completion: Completion, ids: Tensor) -> Completion:
    routing = dataclasses.replace(completion.routing, ids=ids)
    return dataclasses.replace(completion, routing=routing)


def step_with(parts: Components, spoil: Callable[[Completion], Completion]):
    async def go():
        await push_weights(parts.learner, parts.engine)
        broken = dataclasses.replace(parts, engine=Broken(parts.engine, spoil))
        return await StepRunner(broken, build_hooks(broken)).rl_step(0)

    return asyncio.run(go())


def test_a_shifted_engine_stops_the_run_before_its_first_update(parts) -> None:
    def late(completion: Completion) -> Completion:
        return with_routes(completion, completion.routing.ids.roll(1, 0))

    before = {name: weight.clone() for name, weight in parts.learner.named_weights()}
    with pytest.raises(RoutingError, match="one row late"):
        step_with(parts, late)
    assert parts.learner.version == 0
    assert all(torch.equal(before[name], weight) for name, weight in parts.learner.named_weights())


def test_an_engine_that_drops_its_routes(policy) -> None:
    drop = lambda completion: dataclasses.replace(completion, routing=None)  # noqa: E731
    with pytest.raises(UsageError, match=r"problem \d, sample \d: has no routes"):
        step_with(parts_of(policy), drop)
    calls = iter(range(100))
    first_two = lambda completion: drop(completion) if next(calls) < 2 else completion  # noqa: E731
    result = step_with(parts_of(policy, "replay.missing=native"), first_two)
    metrics = result.metrics | metrics_per_layer(result.batch)
    count = result.batch.num_samples
    assert metrics["replay/missing_samples"] == pytest.approx(2 / count)
    assert 0 < metrics["replay/native_rows"] < 0.5
    assert all(is_known(name) for name in metrics)
    for layer in (0, 1, 2):
        assert 0 <= metrics[f"routing/layer@{layer}"] <= metrics["routing/tokens"]
        assert metrics[f"replay/gate_mass@{layer}"] > 0.98
    assert metrics["repeat/k3"] < 1e-6
    assert metrics["counterfactual/repeat/max_dlogp"] < 1e-2


def test_filler_routes_are_refused_with_their_sample(parts) -> None:
    def zero(completion: Completion) -> Completion:
        return with_routes(completion, torch.zeros_like(completion.routing.ids))

    words = r"problem \d+, sample \d, turn 0: an expert twice at layer 0, row 0"
    with pytest.raises(UsageError, match=words):
        step_with(parts, zero)


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["r3", "off"])
def test_a_layer_with_constant_routes_is_not_captured(policy, mode: str) -> None:
    """The trainer's own router chooses otherwise, so the routes are refused, also where they are
    only measured."""

    def once(completion: Completion) -> Completion:
        ids = completion.routing.ids.clone()
        ids[:, 1] = ids[0, 1]
        return with_routes(completion, ids)

    parts = parts_of(policy, f"replay.mode={mode}")
    words = (
        r"layer 1 has the same experts .* trainer's own router chooses them in \d+% only: "
        r"the engine did not capture"
    )
    with pytest.raises(RoutingError, match=words):
        step_with(parts, once)
    assert parts.learner.version == 0


@pytest.mark.full
@pytest.mark.parametrize("mode", ["r3", "off"])
def test_a_collapsed_router_is_distinguished_from_an_uncaptured_layer(policy, mode, caplog) -> None:
    parts = parts_of(policy, f"replay.mode={mode}")
    collapse(parts, layer=2)
    warn_of_collapse.cache_clear()
    assert parts.learner.version == 0
    result = step_with(parts, lambda completion: completion)
    assert parts.learner.version == 1
    assert constant_layers(result.batch.routing, result.batch.cu_seqlens)[:, 2].any()
    assert "layer 2: the router has collapsed" in caplog.text
    assert "layer 1" not in caplog.text


def test_a_constant_layer_of_older_weights(policy, batch, subtests) -> None:
    """The engine's router had collapsed in layer 1. The trainer's has not quite: it agrees in 3
    rows of 4."""
    ids = batch.routing.ids.clone()
    ids[:, 1] = ids[0, 1]
    native = ids.clone()
    native[::4, 1] = torch.tensor([e for e in range(16) if e not in ids[0, 1]][:4])
    native = dataclasses.replace(batch.routing, ids=native)
    scored, oldest = with_ids(batch, ids).replace(routing_native=native), batch.version
    for settings, age, stops in (
        (["replay.mode=off"], 0, "the engine did not capture"),
        (["replay.mode=off"], 4, None),  # only measured, and older weights may have chosen so
        (["replay.min_agreement=0.5"], 4, None),
        (["replay.min_agreement=0"], 4, None),
        ([], 4, "Or they are too old: the oldest tokens were sampled 4 updates ago"),
    ):
        config, version = config_of(policy, *settings), int(oldest[batch.trainable].min()) + age
        refused = nullcontext() if stops is None else pytest.raises(RoutingError, match=stops)
        with subtests.test(settings=settings, age=age), refused:
            check_routes(scored, config.replay, version)


def collapse(parts: Components, layer: int) -> None:
    """Give this layer a router that ranks its experts alike for all tokens that the policy
    writes."""
    router = parts.learner.model.model.layers[layer].mlp.gate
    seen: list[Tensor] = []
    hook = router.register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0].detach().flatten(0, -2))
    )
    ranks = torch.linspace(-1, 1, router.weight.shape[0]).roll(5)[:, None]
    for _ in range(4):  # other routes, other tokens, other inputs
        parts.learner.scorer.score(rollout(parts), replay=False)
        inputs = torch.cat(seen)
        direction = inputs.mean(0)
        while (behind := inputs @ direction <= 0.5).any():  # the perceptron's rule
            direction = direction + 0.1 * inputs[behind].mean(0)
        with torch.no_grad():
            router.weight.copy_(ranks * direction)
    hook.remove()


def test_routes_dropped_after_collecting_are_errors(policy, batch) -> None:
    parts = parts_of(policy, "train.reuse_scoring_forward=false")  # its graph has replayed them
    for call in (parts.learner.score, parts.learner.step):
        lost = parts.learner.score(batch).replace(routing=None, advantage=batch.logp_rollout)
        lost = lost.replace(keep=batch.trainable)
        with pytest.raises(RoutingError, match="the batch has no routes"):
            call(lost.replace(weight=torch.ones(batch.num_slots)))
    assert batch.select([0, 2]).routing is not None


# --- variation of the trainer with itself ---------------------------------------------------------


def test_variation_by_hand_and_of_a_real_batch(parts, batch) -> None:
    scored = parts.learner.score(batch)
    names = {"repeat/k3", "repeat/max_dlogp", "repeat/routers"}
    assert compare_scorings(scored, scored) == dict.fromkeys(names, 0.0)
    slot = int(batch.trainable.nonzero()[0, 0])
    native = copy.deepcopy(scored.routing_native)
    moved = scored.replace(logp_old=scored.logp_old.clone(), routing_native=native)
    moved.logp_old[slot] += 0.1
    moved.routing_native.ids[slot, 1] = (moved.routing_native.ids[slot, 1] + 5) % 16
    found = compare_scorings(scored, moved)
    slots, trained = batch.num_slots, int(batch.trainable.sum())
    assert found["repeat/max_dlogp"] == pytest.approx(0.1, rel=1e-5)
    assert found["repeat/k3"] == pytest.approx((0.1051709 - 0.1) / trained, rel=1e-4)
    assert found["repeat/routers"] == pytest.approx(1 / (3 * slots))
    scorer = parts.learner.scorer
    again = repeat_metrics(scorer, scored, scorer.score(batch, replay=False))
    assert again["repeat/max_dlogp"] < 1e-4  # fp32: rounding only
    assert again["repeat/routers"] < 0.01


def test_expert_bias_is_not_moved_by_a_training_step() -> None:
    learner = learner_of(name="deepseek_v3")
    batch = batch_of()
    routing = RoutingTrace(batch.routing.ids[:, 1:], batch.routing.valid, learner.routers.layers, 8)
    before = {n: b.clone() for n, b in learner.model.named_buffers() if "correction_bias" in n}
    one_step(learner, batch.replace(routing=routing))
    after = dict(learner.model.named_buffers())
    assert before
    assert all(torch.equal(after[name], bias) for name, bias in before.items())


# --- slow -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_false_alarm_in_200_clean_steps(parts) -> None:
    """Every step has other problems, a bf16 engine and an fp32 trainer. Prints the lowest agreement
    for docs/replay.md."""
    layer, window, count = 1.0, 1.0, 0
    for step in range(200):
        scored = parts.learner.score(rollout(parts, step))
        agreement = routing_agreement(scored.routing, scored.routing_native)
        starts = [*window_starts(scored.cu_seqlens).tolist(), len(agreement)]
        cells = [agreement[a:b].mean() for a, b in itertools.pairwise(starts) if b - a >= 8]
        layer = min(layer, float(agreement.mean(0).min()))
        window, count = min(window, *map(float, cells)), count + len(cells)
    print(f"200 steps, {count} windows: lowest layer {layer:.3f}, lowest window {window:.3f}")
    assert window > 0.9
