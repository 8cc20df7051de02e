"""The same batch has the same statistics to the bit, whoever asks and however its rows come."""

import itertools
import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onepolicy.audit.accumulator import DumpAccumulator, accumulate_dump
from onepolicy.divergence.breakdown import metrics_per_turn
from onepolicy.record.formats import READERS
from onepolicy.record.validate import checked_block
from onepolicy.report.jsonl import read_metrics
from onepolicy.run.probe_file import save_counterfactual
from onepolicy.run.step_metrics import mismatch_metrics
from onepolicy.train.rescore import mismatch_of
from onepolicy.types import TokenBatch
from support.audit_dumps import SUFFIXES, write_dump
from support.examples import examples
from support.objective_batches import batch

STEP = 3
LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=7)
SPREAD = st.sampled_from([0.0, 1e-6, 0.05, 2.0])


def scored(seed: int, lengths: list[int], spread: float) -> TokenBatch:
    """Return a scored batch of float32 log-probabilities, some of whose slots are given."""
    g = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    rollout = -4 * torch.rand(n, generator=g) - 3 * spread
    trainable = torch.rand(n, generator=g) < 0.8
    trainable[0] = True
    made = batch(lengths, trainable, [0.0] * len(lengths))
    return made.replace(
        target_ids=torch.arange(n),
        logp_rollout=rollout,
        logp_old=(rollout + spread * torch.randn(n, generator=g)).clamp(max=0.0),
        entropy=torch.rand(n, generator=g),
        turn=torch.randint(0, 4, (n,), generator=g).int(),
    )


def rows_of(scored: TokenBatch) -> list[dict]:
    """Return the rows that a trainer would dump of a batch."""
    bounds = scored.cu_seqlens.tolist()
    columns = {
        "tokens": scored.target_ids,
        "mask": scored.trainable,
        "logp_rollout": scored.logp_rollout,
        "logp_trainer": scored.logp_old,
        "entropy": scored.entropy,
    }
    return [
        {name: value[start:stop].tolist() for name, value in columns.items()} | {"step": STEP}
        for start, stop in itertools.pairwise(bounds)
    ]


def read_here(path: Path) -> Iterator:
    """Yield the blocks of a file as `read_dump` does, without its child."""
    for raw in READERS[path.suffix](path, {}):
        yield checked_block(str(path), raw.first_row, raw.columns, raw.done)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    for module in ("formats", "arrays"):
        monkeypatch.setattr(f"onepolicy.record.{module}.BLOCK_TOKENS", 20)
    monkeypatch.setattr("onepolicy.record.formats.BLOCK_ENTRIES", 150)


@given(seed=st.integers(0, 10**6), lengths=LENGTHS, spread=SPREAD, data=st.data())
@examples(30)
def test_every_format_split_and_order(seed, lengths, spread, data) -> None:
    whole = scored(seed, lengths, spread)
    wanted = mismatch_of(whole).statistics()
    order = data.draw(st.permutations(range(len(lengths))))
    cut = data.draw(st.integers(0, len(lengths)))
    rows = rows_of(whole)
    for suffix in SUFFIXES:
        with tempfile.TemporaryDirectory() as folder:
            accumulated = None
            for name, part in (("a", order[:cut]), ("b", order[cut:])):
                if not part:
                    continue
                path = write_dump(Path(folder) / f"{name}{suffix}", [rows[i] for i in part])
                for block in read_here(path):
                    accumulated = accumulated or DumpAccumulator(path, tuple(block.columns))
                    accumulated.add(block)
        assert accumulated is not None
        assert accumulated.overall is not None
        assert repr(accumulated.overall.statistics()) == repr(wanted), suffix
        assert repr(accumulated.steps[STEP].statistics()) == repr(wanted), suffix


@given(seed=st.integers(0, 10**6), lengths=LENGTHS, spread=SPREAD)
@examples(30)
def test_a_run_says_what_an_audit_of_its_probe_says(seed, lengths, spread) -> None:
    """Its log, which its report and a comparison of runs read, and the probe that it wrote."""
    whole = scored(seed, lengths, spread)
    logged = mismatch_metrics(whole)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_counterfactual(folder / "probes" / f"step_{STEP}.safetensors", whole, whole, "{}")
        (folder / "config.json").write_text("{}")
        kept = {name: value for name, value in logged.items() if math.isfinite(value)}
        (folder / "metrics.jsonl").write_text(json.dumps({"step": STEP} | kept) + "\n")
        found = accumulate_dump(folder, {})
        (row,) = read_metrics(folder)
    assert found.overall is not None
    assert found.native is not None
    numbers = found.overall.statistics()
    for metric, value in kept.items():
        room, _, statistic = metric.partition("/")
        if room == "mismatch" and statistic in numbers:
            assert row[metric] == value == numbers[statistic], metric
    assert repr(numbers) == repr(mismatch_of(whole).statistics())
    assert repr(found.native.statistics()) == repr(numbers)
    assert repr(found.steps[STEP].statistics()) == repr(numbers)


def test_k3_by_turn_does_not_depend_on_the_order_of_samples() -> None:
    whole = scored(0, [20, 30, 10], 0.5)
    assert metrics_per_turn(whole.select([2, 0, 1])) == metrics_per_turn(whole)
