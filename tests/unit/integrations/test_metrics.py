"""Metrics, dump rows and the settings report of the adapters."""

import math

import pytest
import torch

from onepolicy.config import UsageError
from onepolicy.integrations.core.dump import add_routes, dump_row
from onepolicy.integrations.core.metrics import mismatch_metrics, replay_metrics, routing_metrics
from onepolicy.integrations.core.preflight import Preflight
from onepolicy.record.schema import COLUMNS
from onepolicy.types import RoutingTrace


def trace(rows: list[list[int]], valid: list[bool] | None = None) -> RoutingTrace:
    """Return a trace of one layer with 8 experts, two of them a row."""
    ids = torch.tensor(rows, dtype=torch.uint8)[:, None]
    return RoutingTrace(ids, torch.tensor(valid or [True] * len(rows)), (0,), 8)


def test_mismatch_counts_finite_tokens_only():
    rollout = torch.log(torch.tensor([[0.5, 0.5, 0.5, 0.5]]))
    old = torch.log(torch.tensor([[0.25, 0.5, 0.5, 0.5]]))
    rollout[0, 3] = math.nan
    mask = torch.tensor([[1, 1, 0, 1]])
    found = mismatch_metrics(old, rollout, mask)
    assert found["mismatch/k3"] == pytest.approx((0.5 - 1 + math.log(2)) / 2)
    assert found["mismatch/nonfinite"] == pytest.approx(1 / 3)
    assert math.isfinite(found["mismatch/ppl_ratio"])
    assert mismatch_metrics(old, rollout, mask * 0) == {}
    only = mismatch_metrics(old, rollout * math.nan, mask, prefix="mismatch_native")
    assert only == {"mismatch_native/nonfinite": 1.0}


def test_routing_compares_sets_of_experts():
    replayed = [trace([[0, 1], [2, 3]]), None, trace([[4, 5]])]
    native = [trace([[1, 0], [2, 4], [6, 7]]), trace([[0, 1]]), trace([[4, 5], [6, 7]])]
    found = routing_metrics(replayed, native)
    assert found == pytest.approx(
        {"routing/routers": 1 / 3, "routing/tokens": 1 / 3, "routing/agreement": 2.5 / 3}
    )
    assert routing_metrics([None], native[:1]) == {}


def test_replay_counts_rows_and_samples():
    some = trace([[0, 1], [2, 3], [0, 0], [0, 0]], [True, True, False, False])
    none = trace([[0, 0]], [False])
    found = replay_metrics([some, None, none], [5, 6, 2])
    assert found == pytest.approx(
        {"replay/rows": 2, "replay/native_rows": 0.8, "replay/missing_samples": 2 / 3}
    )
    assert replay_metrics([], []) == {}
    assert replay_metrics([None], [3]) == {
        "replay/rows": 0,
        "replay/native_rows": 1,
        "replay/missing_samples": 1,
    }


def test_a_dump_row_has_the_routes_of_the_slots_that_predicted():
    response = torch.tensor([7, 8])
    logp = torch.tensor([-1.0, -2.0])
    row = dump_row(response, torch.tensor([True, False]), logp, logp, step=3, reward=1.0)
    # Prompt of 3 tokens: the response's tokens are predicted by slots 2 and 3 of 4.
    replayed = trace([[0, 1], [2, 3], [4, 5], [6, 7]], [True, True, True, False])
    native = trace([[1, 0], [3, 2], [5, 4], [7, 6], [0, 1]])
    add_routes([row], [replayed], [native], [3], (1, 2))
    assert row["routes_rollout"] == [4, 5, -1, -1]
    assert row["routes_trainer"] == [5, 4, 7, 6]
    assert (row["route_layers"], row["route_top_k"]) == (1, 2)
    assert row["mask"] == [True, False]
    assert set(row) <= set(COLUMNS)


def test_a_sample_without_routes_has_none_in_the_dump():
    logp = torch.tensor([-1.0])
    rows = [dump_row(torch.tensor([7]), torch.tensor([True]), logp, logp, step=0) for _ in "ab"]
    add_routes(rows, [None, trace([[0, 1]])], [None, trace([[1, 0]])], [1, 1], (1, 2))
    assert rows[0]["routes_rollout"] == [-1, -1]
    assert rows[1]["routes_rollout"] == [0, 1]
    plain = dump_row(torch.tensor([7]), torch.tensor([True]), logp, logp, step=0)
    add_routes([plain], [None], [None], [1], (1, 2))  # of a step whose routes were dropped
    assert plain["routes_rollout"] == plain["routes_trainer"] == [-1, -1]
    with pytest.raises(UsageError, match=r"logp_trainer has shape \[2\]"):
        dump_row(torch.tensor([7]), torch.tensor([True]), logp, torch.zeros(2), step=0)


def test_the_report_names_every_setting_that_must_change():
    preflight = Preflight("TRL")
    preflight.require("router loss off", False, found="coef 0.001", fix="set it to 0.0")
    preflight.require("routes arrive", True, found="no rollout_func", fix="give one")
    preflight.require("one correction", False, found="TRL's is on too", fix="turn it off")
    preflight.note("one more forward a step")
    assert str(preflight).splitlines() == [
        "onepolicy in TRL",
        "  no  router loss off: coef 0.001",
        "  ok  routes arrive",
        "  no  one correction: TRL's is on too",
        "  note one more forward a step",
    ]
    with pytest.raises(UsageError) as raised:
        preflight.finish()
    assert str(raised.value).splitlines()[1:] == [
        "  router loss off: coef 0.001; set it to 0.0",
        "  one correction: TRL's is on too; turn it off",
    ]
