"""Properties of every preset on every batch: permutation, splits, chunks, layouts, garbage,
monotone gates."""

from __future__ import annotations

import dataclasses
import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import onepolicy.correct.slots as slots_module
from onepolicy.config import CorrectionConfig, UsageError
from onepolicy.config.correction import correction_presets
from onepolicy.correct.histogram import histogram, quantiles
from onepolicy.correct.presets import preset
from onepolicy.correct.report import combine
from onepolicy.correct.slots import slots
from onepolicy.correct.statistics import combine_units, unit_sums
from onepolicy.correct.weights import Applied, finish, partials, reweight

# bounds as they are published would reject almost all or nothing of a small random batch; these cut
# through it
TURNS = CorrectionConfig.model_validate(
    {
        "weight": {"level": "turn", "high": 1.5},
        "gates": [
            {"statistic": "k3", "aggregate": "mean", "scope": "turn", "high": 0.05},
            {"statistic": "prob_diff", "when": "toward", "low": -0.1, "high": 0.1},
            {
                "statistic": "ratio",
                "aggregate": "sum",
                "scope": "sequence",
                "high": 2,
                "when": "negative",
            },
        ],
        "denominator": "kept",
    }
)
WIDE = {
    "gates": [
        {"statistic": "ratio", "aggregate": "mean", "scope": "sequence", "low": 0.9, "high": 1.1}
    ]
}
CONFIGS = {name: preset(name) for name in correction_presets() if not preset(name).live} | {
    "turns": TURNS,
    "narrow veto": preset(
        "veto",
        gates=[
            {"statistic": "ratio", "aggregate": how, "scope": "sequence", "low": 0.8}
            for how in ("min", "max")
        ],
    ),
    "wide geo": preset("geo-rs", **WIDE),
    "wide geo snis": preset("seq-tis", **WIDE, normalise="self"),
    "geometric zero": CorrectionConfig.model_validate(
        {
            "weight": {"level": "geometric", "low": 0.9, "high": 1.1, "outside": "zero"},
            "denominator": "kept",
        }
    ),
}
DIVISIBLE = {name: config for name, config in CONFIGS.items() if name != "m2po"}
EVERY = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
EVERY_DIVISIBLE = pytest.mark.parametrize("config", DIVISIBLE.values(), ids=DIVISIBLE)
SEEDS = st.integers(0, 10**6)
FEW = settings(max_examples=5, deadline=None)


@dataclasses.dataclass
class Batch:
    old: Tensor
    rollout: Tensor
    mask: Tensor
    segment: Tensor
    turn: Tensor
    advantage: Tensor

    def take(self, index: Tensor) -> Batch:
        return Batch(*(getattr(self, field.name)[index] for field in dataclasses.fields(self)))

    def more(self) -> dict[str, Tensor]:
        return {"segment": self.segment, "turn": self.turn, "advantage": self.advantage}

    def reweight(self, config: CorrectionConfig, **more: object) -> Applied[Tensor]:
        return reweight(self.old, self.rollout, self.mask, config, **(self.more() | more))

    def slots(self, sequences: int):
        return slots(self.old, self.rollout, self.mask, sequences=sequences, turns=3, **self.more())


def random_batch(seed: int) -> Batch:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (int(torch.randint(1, 7, (), generator=g)),), generator=g)
    n = int(lengths.sum())
    noise = torch.randn(n, generator=g) * torch.rand((), generator=g) * torch.rand(n, generator=g)
    rollout = -torch.rand(n, generator=g) * 5
    mask = torch.rand(n, generator=g) < 0.8
    mask[int(torch.randint(0, n, (), generator=g))] = True
    segment = torch.arange(len(lengths)).repeat_interleave(lengths)
    position = torch.cat([torch.arange(length) for length in lengths.tolist()])
    return Batch(
        rollout + noise, rollout, mask, segment, position // 3, torch.randn(n, generator=g)
    )


def same(one: dict[str, float], other: dict[str, float]) -> None:
    assert one == pytest.approx(other, rel=1e-9, abs=1e-12, nan_ok=True)


@EVERY
@given(seed=SEEDS)
@FEW
def test_order_of_slots_and_names_of_sequences_do_not_matter(
    config: CorrectionConfig, seed: int
) -> None:
    batch = random_batch(seed)
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(batch.old), generator=g)
    names = torch.randperm(int(batch.segment.max()) + 1, generator=g)
    whole = batch.reweight(config)
    shuffled = dataclasses.replace(batch.take(order), segment=names[batch.segment[order]]).reweight(
        config
    )
    assert torch.equal(shuffled.keep, whole.keep[order])
    torch.testing.assert_close(shuffled.weight, whole.weight[order], rtol=2e-7, atol=0)
    same(shuffled.report, whole.report)


@EVERY
@given(seed=SEEDS)
@FEW
def test_packed_padded_and_lists_agree_to_the_bit(config: CorrectionConfig, seed: int) -> None:
    batch = random_batch(seed)
    whole = batch.reweight(config)
    rows = [batch.take(batch.segment == s) for s in range(int(batch.segment.max()) + 1)]
    listed = reweight(
        [r.old for r in rows],
        [r.rollout for r in rows],
        [r.mask for r in rows],
        config,
        turn=[r.turn for r in rows],
        advantage=[r.advantage for r in rows],
    )
    assert torch.equal(torch.cat(listed.weight), whole.weight)
    assert listed.report == pytest.approx(whole.report, nan_ok=True, rel=0, abs=0)
    width = max(len(r.old) for r in rows)
    for left in (True, False):

        def pad(name: str, fill: float, left: bool = left) -> Tensor:
            values = [getattr(r, name) for r in rows]
            side = [(width - len(v), 0) if left else (0, width - len(v)) for v in values]
            return torch.stack(
                [
                    torch.nn.functional.pad(v, s, value=fill)
                    for v, s in zip(values, side, strict=True)
                ]
            )

        mask = pad("mask", False)
        padded = reweight(
            pad("old", math.nan),
            pad("rollout", 7.0),
            mask,
            config,
            turn=pad("turn", 0),
            advantage=pad("advantage", math.inf),
        )
        assert padded.weight.shape == mask.shape
        assert torch.equal(padded.weight[mask], whole.weight[batch.mask])
        assert torch.equal(padded.keep[mask], whole.keep[batch.mask])
        assert padded.report == pytest.approx(whole.report, nan_ok=True, rel=0, abs=0)


@EVERY_DIVISIBLE
@pytest.mark.parametrize("average", ["slots", "sequences"])
@given(seed=SEEDS)
@FEW
def test_a_split_into_whole_sequences_equals_the_whole(
    config: CorrectionConfig, average: str, seed: int
) -> None:
    """The parts are micro-batches or data-parallel ranks. The sums add up, so weights, denominators
    and the statistics are the same."""
    batch = random_batch(seed)
    sequences = int(batch.segment.max()) + 1
    whole = batch.reweight(config, average=average)
    home = torch.randint(0, 3, (sequences,), generator=torch.Generator().manual_seed(seed))[
        batch.segment
    ]
    parts = [
        partials(config, batch.take(home == p).slots(sequences), average=average) for p in range(3)
    ]
    total = combine(part.sums for part in parts)
    for p, part in enumerate(parts):
        weight, keep, report = finish(config, part, total)
        torch.testing.assert_close(weight, whole.weight[home == p], rtol=2e-7, atol=0)
        assert torch.equal(keep, whole.keep[home == p])
        same(report, whole.report)


@EVERY_DIVISIBLE
@given(seed=SEEDS)
@FEW
def test_chunks_of_sequences_on_several_ranks_equal_the_whole(
    config: CorrectionConfig, seed: int
) -> None:
    """Under context parallelism every rank holds some slots of every sequence."""
    batch = random_batch(seed)
    sequences = int(batch.segment.max()) + 1
    whole = batch.reweight(config, average="sequences")
    home = torch.arange(len(batch.old)) % 2
    chunks = [batch.take(home == p).slots(sequences) for p in range(2)]
    units = combine_units([unit_sums(config, chunk) for chunk in chunks])
    parts = [partials(config, chunk, units, average="sequences") for chunk in chunks]
    total = combine(part.sums for part in parts)
    for p, part in enumerate(parts):
        weight, keep, report = finish(config, part, total)
        torch.testing.assert_close(weight, whole.weight[home == p], rtol=2e-7, atol=0)
        assert torch.equal(keep, whole.keep[home == p])
        same(report, whole.report)


@EVERY
@given(seed=SEEDS, average=st.sampled_from(["slots", "sequences"]), size=st.integers(2, 12))
@settings(max_examples=3, deadline=None)
def test_slots_worked_on_at_once_change_nothing(
    config: CorrectionConfig, seed: int, average: str, size: int
) -> None:
    batch = random_batch(seed)
    whole = batch.reweight(config, average=average)
    with mock.patch.object(slots_module, "CHUNK", size):
        chunked = batch.reweight(config, average=average)
    torch.testing.assert_close(chunked.weight, whole.weight, rtol=2e-7, atol=0)
    assert torch.equal(chunked.keep, whole.keep)
    assert chunked.denominator == whole.denominator
    same(chunked.report, whole.report)


@EVERY
@given(seed=SEEDS, garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e9]))
@FEW
def test_masked_slots_are_ignored(config: CorrectionConfig, seed: int, garbage: float) -> None:
    batch = random_batch(seed)
    clean = batch.reweight(config)
    off = ~batch.mask
    dirty = dataclasses.replace(
        batch,
        old=batch.old.masked_fill(off, garbage),
        rollout=batch.rollout.masked_fill(off, -garbage),
        advantage=batch.advantage.masked_fill(off, garbage),
    ).reweight(config)
    assert torch.equal(dirty.weight, clean.weight)
    assert torch.equal(dirty.keep, clean.keep)
    assert dirty.report == pytest.approx(clean.report, nan_ok=True, rel=0, abs=0)


@EVERY
@given(seed=SEEDS)
@FEW
def test_an_infinite_slot_is_rejected_and_the_rest_stays_finite(
    config: CorrectionConfig, seed: int
) -> None:
    batch = random_batch(seed)
    bad = int(batch.mask.nonzero()[-1])
    batch.old[bad] = math.nan
    applied = batch.reweight(config.model_copy(update={"max_nonfinite": 1.0}))
    assert not applied.keep[bad]
    assert applied.weight.isfinite().all()
    assert applied.report["correction/nonfinite"] == pytest.approx(1 / int(batch.mask.sum()))


@EVERY
@given(seed=SEEDS)
@FEW
def test_with_one_slot_per_sequence_all_levels_are_the_token_level(
    config: CorrectionConfig, seed: int
) -> None:
    batch = random_batch(seed)
    batch.segment = torch.arange(len(batch.old))
    batch.turn = torch.zeros_like(batch.turn)
    level = config.weight.level
    if level in ("none", "token"):
        return
    token = config.model_copy(
        update={"weight": config.weight.model_copy(update={"level": "token"})}
    )
    assert torch.equal(batch.reweight(config).weight, batch.reweight(token).weight)


@pytest.mark.parametrize(
    "statistic", ["ratio", "k1", "k2", "k3", "exp_abs", "tv", "binary_kl", "binary_kl_sym"]
)
@pytest.mark.parametrize("scope", ["token", "sequence"])
@given(seed=SEEDS, tight=st.floats(0.001, 1), loose=st.floats(0, 2))
@FEW
def test_a_tighter_bound_never_keeps_more(
    statistic: str, scope: str, seed: int, tight: float, loose: float
) -> None:
    batch = random_batch(seed)
    agree = 1 if statistic in ("ratio", "exp_abs") else 0
    if statistic == "tv":
        tight, loose = tight / 4, loose / 4

    def kept(distance: float) -> Tensor:
        gate = {"statistic": statistic, "scope": scope, "high": agree + distance}
        gate |= {"aggregate": "mean"} if scope == "sequence" else {}
        return batch.reweight(CorrectionConfig.model_validate({"gates": [gate]})).keep

    assert (kept(tight) <= kept(tight + loose)).all()


@given(seed=SEEDS)
@FEW
def test_gates_commute_with_weights(seed: int) -> None:
    """With the original denominator, rejecting is the same as a weight of 0."""
    batch = random_batch(seed)
    both = batch.reweight(preset("tis", **WIDE))
    gate = batch.reweight(preset("geo-rs", **WIDE))
    assert torch.equal(both.weight, batch.reweight(preset("tis")).weight * gate.keep)


@given(seed=SEEDS)
@FEW
def test_all_rejected_is_loss_zero_with_a_live_graph(seed: int) -> None:
    batch = random_batch(seed)
    batch.old = batch.rollout + 3
    applied = batch.reweight(preset("geo-rs"))
    new = batch.old.clone().requires_grad_()
    loss = -(applied.weight * new).sum() / applied.denominator
    loss.backward()
    assert loss == 0
    assert (new.grad == 0).all()


def test_a_budget_cannot_be_split() -> None:
    batch = random_batch(0)
    with pytest.raises(UsageError, match="ranks all slots of the step"):
        partials(preset("m2po"), batch.slots(9))


@given(values=st.lists(st.floats(-60, 60), min_size=1, max_size=50), cut=st.integers(0, 50))
@settings(max_examples=40, deadline=None)
def test_histograms_add_up_and_quantiles_are_within_one_percent(
    values: list[float], cut: int
) -> None:
    logs = torch.tensor(values, dtype=torch.float64)
    counts = histogram(logs)
    assert torch.equal(counts, histogram(logs[:cut]) + histogram(logs[cut:]))
    for share in (0.01, 0.5, 0.99):
        exact = sorted(values)[max(math.ceil(share * len(values)), 1) - 1]
        found = math.log(float(quantiles(counts, (share,))[0]))
        assert found == pytest.approx(exact, rel=0.011, abs=1.1e-6)
    assert quantiles(histogram(logs[:0]), (0.5,)).isnan().all()


@given(seed=SEEDS, low=st.floats(0.5, 0.95), high=st.floats(1.05, 2))
@settings(max_examples=15, deadline=None)
def test_mis_as_its_readme_defines_it(seed: int, low: float, high: float) -> None:
    """mis of miles and slime, one sequence after the other in plain Python: truncated token
    weights, a token band, a veto on the whole sequence. Its normaliser differs on purpose
    (tests/unit/correct/test_weights.py)."""
    batch = random_batch(seed)
    gates = [{"statistic": "ratio", "low": low, "high": high}]
    gates.append({"statistic": "ratio", "aggregate": "min", "scope": "sequence", "low": 0.8})
    applied = batch.reweight(preset("mis", weight={"high": high}, gates=gates, normalise="none"))
    expected = []
    for s in range(int(batch.segment.max()) + 1):
        row = batch.take(batch.segment == s)
        ratios = [
            math.exp(a - b) for a, b in zip(row.old.tolist(), row.rollout.tolist(), strict=True)
        ]
        vetoed = any(r < 0.8 for r, valid in zip(ratios, row.mask.tolist(), strict=True) if valid)
        for ratio, valid in zip(ratios, row.mask.tolist(), strict=True):
            expected.append(
                min(ratio, high) if valid and low <= ratio <= high and not vetoed else 0.0
            )
    assert applied.weight.tolist() == pytest.approx(expected, rel=1e-5)
