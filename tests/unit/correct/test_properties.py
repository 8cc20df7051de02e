"""Every preset on every batch: order, splits, chunks, layouts, garbage, monotone gates."""

from __future__ import annotations

import dataclasses
import math
from itertools import product
from unittest import mock

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import onepolicy.correct.slots as slots_module
from onepolicy.config import CorrectionConfig, UsageError
from onepolicy.config.presets import correction_presets
from onepolicy.correct.presets import preset
from onepolicy.correct.report import combine, histogram, quantiles
from onepolicy.correct.reweight import Applied, finish, partials, reweight, slots
from onepolicy.correct.statistics import combine_units, unit_sums
from support.examples import examples


def sequence_gate(statistic="ratio", aggregate="mean", **more):
    return {"statistic": statistic, "aggregate": aggregate, "scope": "sequence", **more}


# bounds as they are published would reject almost all or nothing of a small random batch; these cut
# through it
TURNS = CorrectionConfig.model_validate(
    {
        "weight": {"level": "turn", "high": 1.5},
        "gates": [
            {"statistic": "k3", "aggregate": "mean", "scope": "turn", "high": 0.05},
            {"statistic": "prob_diff", "when": "toward", "low": -0.1, "high": 0.1},
            sequence_gate(aggregate="sum", high=2, when="negative"),
        ],
        "denominator": "kept",
    }
)
GEOMETRIC = {"level": "geometric", "low": 0.9, "high": 1.1, "outside": "zero"}
WIDE = {"gates": [sequence_gate(low=0.9, high=1.1)]}
NARROW = {"gates": [sequence_gate(aggregate=how, low=0.8) for how in ("min", "max")]}
CONFIGS = {name: preset(name) for name in correction_presets() if not preset(name).live} | {
    "turns": TURNS,
    "narrow veto": preset("veto", **NARROW),
    "wide geo": preset("geo-rs", **WIDE),
    "wide geo snis": preset("seq-tis", **WIDE, normalise="self"),
    "wide geo batch": preset("trl-default", **WIDE, normalise="batch"),
    "geometric zero": CorrectionConfig.model_validate({"weight": GEOMETRIC, "denominator": "kept"}),
}
DIVISIBLE = {name: config for name, config in CONFIGS.items() if name != "m2po"}
SEEDS = st.integers(0, 10**6)
FEW = examples(5)


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
    rollout = -torch.rand(n, generator=g) * 5 - 5
    mask = torch.rand(n, generator=g) < 0.8
    mask[int(torch.randint(0, n, (), generator=g))] = True
    segment = torch.arange(len(lengths)).repeat_interleave(lengths)
    position = torch.cat([torch.arange(length) for length in lengths.tolist()])
    return Batch(
        rollout + noise, rollout, mask, segment, position // 3, torch.randn(n, generator=g)
    )


def every(seed: int, configs: dict[str, CorrectionConfig] = CONFIGS):
    """Yield each config with a batch of its own. A failing example names the last one."""
    for i, (name, config) in enumerate(configs.items()):
        note(name)
        yield config, random_batch(seed + i)


def same(weight, keep, report, whole: Applied[Tensor], place=slice(None)) -> None:
    """Check that these are slots of the whole, but for the rounding of sums in another order."""
    torch.testing.assert_close(weight, whole.weight[place], rtol=2e-7, atol=0)
    assert torch.equal(keep, whole.keep[place])
    assert report == pytest.approx(whole.report, rel=1e-9, abs=1e-12, nan_ok=True)


@given(seed=SEEDS)
@FEW
def test_order_of_slots_and_names_of_sequences_do_not_matter(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    for config, batch in every(seed):
        order = torch.randperm(len(batch.old), generator=g)
        names = torch.randperm(int(batch.segment.max()) + 1, generator=g)
        shuffled = dataclasses.replace(batch.take(order), segment=names[batch.segment[order]])
        found = shuffled.reweight(config)
        same(found.weight, found.keep, found.report, batch.reweight(config), order)


def layouts(batch: Batch):
    """Yield old, rollout, mask, turn and advantage as lists of sequences, and padded with garbage
    on either side."""
    sequences = [batch.take(batch.segment == s) for s in range(int(batch.segment.max()) + 1)]
    garbage = {"old": math.nan, "rollout": 7.0, "mask": False, "turn": 0, "advantage": math.inf}
    lists = [[getattr(each, name) for each in sequences] for name in garbage]
    yield lists
    for side in ("left", "right"):
        pairs = zip(lists, garbage.values(), strict=True)
        yield [pad_sequence(values, True, fill, side) for values, fill in pairs]


@given(seed=SEEDS)
@FEW
def test_packed_padded_and_lists_agree_to_the_bit(seed: int) -> None:
    for config, batch in every(seed):
        whole = batch.reweight(config)
        for old, rollout, mask, turn, advantage in layouts(batch):
            found = reweight(old, rollout, mask, config, turn=turn, advantage=advantage)
            assert list(map(len, found.weight)) == list(map(len, mask))
            weight, keep, on = (torch.cat(list(x)) for x in (found.weight, found.keep, mask))
            assert torch.equal(weight[on], whole.weight[batch.mask])
            assert torch.equal(keep[on], whole.keep[batch.mask])
            assert not weight[~on].any()
            assert found.report == pytest.approx(whole.report, nan_ok=True, rel=0, abs=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("average", ["slots", "sequences"])
@given(seed=SEEDS)
@FEW
def test_a_split_into_whole_sequences_equals_the_whole(average: str, seed: int) -> None:
    """The parts are micro-batches or data-parallel ranks, whose sums add up."""
    g = torch.Generator().manual_seed(seed)
    for config, batch in every(seed, DIVISIBLE):
        sequences = int(batch.segment.max()) + 1
        home = torch.randint(0, 3, (sequences,), generator=g)[batch.segment]
        whole = batch.reweight(config, average=average)
        chunks = [batch.take(home == p).slots(sequences) for p in range(3)]
        parts = [partials(config, chunk, average=average) for chunk in chunks]
        total = combine(part.sums for part in parts)
        for p, part in enumerate(parts):
            same(*finish(config, part, total), whole, home == p)


@given(seed=SEEDS)
@FEW
def test_chunks_of_sequences_on_several_ranks_equal_the_whole(seed: int) -> None:
    """Under context parallelism every rank holds some slots of every sequence."""
    for config, batch in every(seed, DIVISIBLE):
        whole = batch.reweight(config, average="sequences")
        home = torch.arange(len(batch.old)) % 2
        chunks = [batch.take(home == p).slots(int(batch.segment.max()) + 1) for p in range(2)]
        units = combine_units([unit_sums(config, chunk) for chunk in chunks])
        parts = [partials(config, chunk, units, average="sequences") for chunk in chunks]
        total = combine(part.sums for part in parts)
        for p, part in enumerate(parts):
            same(*finish(config, part, total), whole, home == p)


@given(seed=SEEDS, average=st.sampled_from(["slots", "sequences"]), size=st.integers(2, 12))
@examples(3)
def test_slots_worked_on_at_once_change_nothing(seed: int, average: str, size: int) -> None:
    for config, batch in every(seed):
        whole = batch.reweight(config, average=average)
        with mock.patch.object(slots_module, "CHUNK", size):
            chunked = batch.reweight(config, average=average)
        same(chunked.weight, chunked.keep, chunked.report, whole)
        assert chunked.denominator == whole.denominator


@given(seed=SEEDS, garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e9]))
@FEW
def test_masked_slots_are_ignored(seed: int, garbage: float) -> None:
    for config, batch in every(seed):
        clean = batch.reweight(config)
        for name, value in (("old", garbage), ("rollout", -garbage), ("advantage", garbage)):
            setattr(batch, name, getattr(batch, name).masked_fill(~batch.mask, value))
        dirty = batch.reweight(config)
        assert torch.equal(dirty.weight, clean.weight)
        assert torch.equal(dirty.keep, clean.keep)
        assert dirty.report == pytest.approx(clean.report, nan_ok=True, rel=0, abs=0)


@given(seed=SEEDS)
@FEW
def test_an_infinite_slot_is_rejected_and_the_rest_stays_finite(seed: int) -> None:
    for config, batch in every(seed):
        bad = int(batch.mask.nonzero()[-1])
        batch.old[bad] = math.nan
        applied = batch.reweight(config.model_copy(update={"max_nonfinite": 1.0}))
        assert not applied.keep[bad]
        assert applied.weight.isfinite().all()
        assert applied.report["correction/nonfinite"] == pytest.approx(1 / int(batch.mask.sum()))


@given(seed=SEEDS)
@FEW
def test_with_one_slot_per_sequence_all_levels_are_the_token_level(seed: int) -> None:
    levels = {k: each for k, each in CONFIGS.items() if each.weight.level not in ("none", "token")}
    assert len(levels) > 3
    for config, batch in every(seed, levels):
        batch.segment = torch.arange(len(batch.old))
        batch.turn = torch.zeros_like(batch.turn)
        by_token = config.weight.model_copy(update={"level": "token"})
        token = config.model_copy(update={"weight": by_token})
        assert torch.equal(batch.reweight(config).weight, batch.reweight(token).weight)


@given(seed=SEEDS, tight=st.floats(0.001, 1), loose=st.floats(0, 2))
@FEW
def test_a_tighter_bound_never_keeps_more(seed: int, tight: float, loose: float) -> None:
    scopes = ({"scope": "token"}, {"scope": "sequence", "aggregate": "mean"})
    agree = dict.fromkeys(("k1", "k2", "k3", "tv", "binary_kl", "binary_kl_sym"), 0)
    every_gate = product({**agree, "ratio": 1, "exp_abs": 1}.items(), scopes)
    for i, ((statistic, at), scope) in enumerate(every_gate):
        batch, unit = random_batch(seed + i), {"tv": 0.25}.get(statistic, 1)

        gate = scope | {"statistic": statistic}
        configs = [
            CorrectionConfig.model_validate({"gates": [gate | {"high": at + unit * distance}]})
            for distance in (tight, tight + loose)
        ]
        narrow, wide = (batch.reweight(config).keep for config in configs)
        assert (narrow <= wide).all(), (statistic, scope)


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
@examples(40)
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
