"""Mismatch by turn number: hand-computed."""

from __future__ import annotations

import math

import pytest
import torch

from onepolicy.run.metric_names import is_known
from onepolicy.run.step_metrics import metrics_per_turn
from support.objective_batches import batch


def scored(turns: list[int], log_rho: list[float]):
    """Return one sample. Slots with turn -1 are not trainable."""
    turn = torch.tensor(turns)
    zeros = torch.zeros(len(turns))
    made = batch([len(turns)], turn >= 0, [0.0])
    return made.replace(turn=turn.int(), logp_rollout=zeros, logp_old=torch.tensor(log_rho))


def k3(x: float) -> float:
    return math.expm1(x) - x


def test_k3_of_each_turn():
    found = metrics_per_turn(scored([-1, 0, 0, -1, 1], [9.0, 0.1, 0.3, 9.0, -0.2]))
    means = {"mismatch/k3_turn@0": (k3(0.1) + k3(0.3)) / 2, "mismatch/k3_turn@1": k3(-0.2)}
    assert found == pytest.approx(
        means | {"train/tokens_turn@0": 2, "train/tokens_turn@1": 1}, rel=1e-6
    )


def test_late_turns_share_bins_that_double():
    found = metrics_per_turn(scored([0, 7, 8, 15, 16, 40], [0.1, 0.2, 0.3, 0.5, 0.7, 0.9]))
    expected = {0: k3(0.1), 7: k3(0.2), 8: (k3(0.3) + k3(0.5)) / 2, 16: k3(0.7), 32: k3(0.9)}
    means = {f"mismatch/k3_turn@{k}": value for k, value in expected.items()}
    counts = {f"train/tokens_turn@{k}": 1 + (k == 8) for k in expected}
    assert found == pytest.approx(means | counts, rel=1e-6)
    assert all(map(is_known, found))
    assert all(is_known(f"counterfactual/{name}") for name in means)


def test_single_turns_have_no_such_measure():
    assert metrics_per_turn(scored([-1, 0, 0], [0.0, 0.1, 0.2])) == {}
