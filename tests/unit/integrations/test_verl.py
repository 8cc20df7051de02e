"""Parts of the adapter of verl that need no verl."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from onepolicy.config import UsageError
from onepolicy.integrations.core.advantages import turns_of
from onepolicy.integrations.verl.metrics import finish_update_metrics, replay_sums
from onepolicy.integrations.verl.settings import read_settings
from onepolicy.types import RoutingTrace


def trace(ids, valid=None):
    ids = torch.tensor(ids, dtype=torch.uint8)
    if valid is None:
        valid = [True] * len(ids)
    return RoutingTrace(ids, torch.tensor(valid), (0, 2), 8)


def as_verl_reports(parts):
    """Return the average over ranks, micro-batches and minibatches under verl's prefix."""
    return {f"actor/{name}": np.mean([part[name] for part in parts]) for name in parts[0]}


def test_shares_by_hand():
    """Three rows of two routers: one is not valid, and of the other four routers one differs by one
    of its two experts."""
    replayed = trace([[[1, 2], [3, 4]], [[1, 2], [3, 4]], [[0, 0], [0, 0]]], [True, True, False])
    native = trace([[[2, 1], [3, 4]], [[1, 5], [3, 4]], [[6, 7], [6, 7]]])
    sums = replay_sums(replayed, native, samples=2, missing=1, rows=3)
    metrics = as_verl_reports([sums])
    finish_update_metrics(metrics)
    assert metrics == {
        "routing/routers": 0.25,
        "routing/tokens": 0.5,
        "routing/agreement": 7 / 8,
        "replay/missing_samples": 0.5,
        "replay/native_rows": pytest.approx(1 / 3),
    }


def test_averaged_sums_are_the_shares_of_the_whole(subtests):
    """verl averages micro-batches of different sizes without weights."""
    for seed, lengths in enumerate(([1], [3], [1, 6], [5, 2, 4], [6, 1, 1, 3], [2, 2, 2, 2])):
        with subtests.test(seed=seed, lengths=lengths):
            random = torch.Generator().manual_seed(seed)
            ids = [torch.randint(0, 3, (2, n, 2, 2), generator=random).tolist() for n in lengths]
            pairs, parts = [(trace(a), trace(b)) for a, b in ids], []
            for replayed, native in pairs:
                counts = {"samples": 1, "missing": 0, "rows": len(native)}
                parts.append(replay_sums(replayed, native, **counts))
            replayed, native = (RoutingTrace.concat(side) for side in zip(*pairs, strict=True))
            counts = {"samples": len(pairs), "missing": 0, "rows": sum(lengths)}
            found = as_verl_reports(parts)
            expected = as_verl_reports([replay_sums(replayed, native, **counts)])
            finish_update_metrics(found)
            finish_update_metrics(expected)
            assert found == pytest.approx(expected)


def test_a_step_without_replay_has_no_shares():
    metrics = {"actor/pg_loss": 1.0}
    finish_update_metrics(metrics)
    assert metrics == {"actor/pg_loss": 1.0}


def test_turns_are_runs_of_sampled_tokens():
    mask = torch.tensor([[1, 1, 0, 0, 1, 0, 1], [0, 1, 1, 1, 0, 0, 0]]).bool()
    assert turns_of(mask).tolist() == [[0, 0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 0, 0, 0]]


def test_settings():
    changed = read_settings({"correction": {"preset": "tis", "weight": {"high": 3.0}}, "dump": "d"})
    assert (changed.fixed.weight.high, changed.live) == (3.0, None)
    live = read_settings({"correction": "opsm"})
    assert live.fixed is None
    assert live.live is not None
    assert read_settings(None).correction is None


def test_settings_that_are_none():
    for name in ("vespo", "gmpo", "tsi"):
        with pytest.raises(UsageError, match=f"none is called '{name}'"):
            read_settings({"correction": name})
    with pytest.raises(UsageError, match="did you mean correction"):
        read_settings({"corection": "tis"})


@pytest.mark.process
def test_the_plugin_loads_nothing():
    """verl imports it in every process, whether the run wants onepolicy or not."""
    code = (
        "import sys, onepolicy.integrations.verl; "
        "assert not {'torch', 'transformers', 'verl', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
