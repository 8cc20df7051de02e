"""Metrics of a step by hand: mismatch by turn and by staleness, and the part of the gradient that
tokens hold which the trainer finds less than half as likely."""

import math
from types import SimpleNamespace

import pytest
import torch

from onepolicy.config import TrainingError
from onepolicy.divergence.breakdown import metrics_per_staleness, metrics_per_turn
from onepolicy.run.log import is_known
from onepolicy.run.step_metrics import gradient_metrics, metrics_per_layer, mismatch_metrics
from onepolicy.types import RoutingTrace
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
    counts = {"train/tokens_turn@0": 2, "train/tokens_turn@1": 1}
    assert found == pytest.approx(means | counts, rel=1e-6)


def test_late_turns_share_bins_that_double():
    found = metrics_per_turn(scored([0, 7, 8, 15, 16, 40], [0.1, 0.2, 0.3, 0.5, 0.7, 0.9]))
    expected = {0: k3(0.1), 7: k3(0.2), 8: (k3(0.3) + k3(0.5)) / 2, 16: k3(0.7), 32: k3(0.9)}
    means = {f"mismatch/k3_turn@{k}": value for k, value in expected.items()}
    counts = {f"train/tokens_turn@{k}": 1 + (k == 8) for k in expected}
    assert found == pytest.approx(means | counts, rel=1e-6)
    assert all(map(is_known, found))
    assert all(is_known(f"counterfactual/{name}") for name in means)


def test_the_worse_of_two_routers_speaks_for_their_layer():
    """Layer 0 has two, of which the first differs at one token of two; layer 2 differs nowhere."""
    ids = torch.zeros(2, 3, 1, dtype=torch.uint8)
    other = ids.clone()
    other[0, 0] = 1
    found = metrics_per_layer(
        scored([0, 0], [0.0, 0.0]).replace(
            routing=RoutingTrace(ids, torch.ones(2, dtype=torch.bool), (0, 0, 2), 4),
            routing_native=RoutingTrace(other, torch.ones(2, dtype=torch.bool), (0, 0, 2), 4),
            gate_mass=torch.tensor([[0.5, 1.0, 1.0], [1.0, 1.0, 1.0]]),
        )
    )
    assert found == {
        "routing/layer@0": 0.5,
        "routing/layer@2": 0.0,
        "replay/gate_mass@0": 0.75,
        "replay/gate_mass@2": 1.0,
    }


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_trainer_without_a_log_probability_ends_the_run(value):
    """Outside the mask it is no matter."""
    made = scored([-1, 0, 0], [value, 0.1, 0.2]).replace(entropy=torch.zeros(3))
    assert mismatch_metrics(made)["mismatch/max_dlogp"] == pytest.approx(0.2)
    made.logp_old[2] = value
    with pytest.raises(TrainingError, match=f"a token of sample 0 is {value}; its weights"):
        mismatch_metrics(made)


@pytest.mark.parametrize(("turns", "several"), [([-1, 0, 0], False), ([0, -1, 1], True)])
def test_a_step_has_them_if_an_episode_has_several_turns(turns, several):
    """Of trained tokens: a reply of the environment belongs to a turn, too."""
    made = scored(turns, [0.0, 0.1, 0.2]).replace(entropy=torch.zeros(3))
    made.turn[~made.trainable] = 5
    found = {name for name in mismatch_metrics(made) if "turn@" in name}
    assert bool(found) == several
    assert found <= metrics_per_turn(made).keys()


def test_k3_by_staleness_by_hand():
    """rho is 1 for the newest tokens, 2 for one of two that are two updates old, 1 for the
    other."""
    batch = SimpleNamespace(
        trainable=torch.tensor([True, True, False, True, True]),
        version=torch.tensor([7, 5, -1, 7, 5], dtype=torch.int32),
        segment=torch.tensor([0, 0, 0, 1, 1]),
        logp_rollout=torch.tensor([-1.0, -2.0, 0.0, -1.0, -1.0]),
        logp_old=torch.tensor([-1.0, -2.0 + math.log(2), 9.0, -1.0, -1.0]),
    )
    k3 = {"mismatch/k3_staleness@0": 0, "mismatch/k3_staleness@2": (1 - math.log(2)) / 2}
    counts = {"staleness/tokens@0": 2, "staleness/tokens@2": 2}
    assert metrics_per_staleness(batch, 7) == pytest.approx(k3 | counts)


NAME = "train/halved_gradient"


def trained(**changes):
    """Return a batch of 5 slots; the first is a prompt's, the last is rejected."""
    made = batch([5], torch.tensor([False, True, True, True, True]), [0.0])
    p_trainer = torch.tensor([0.01, 0.2, 0.5, 0.75, 0.1])
    p_rollout = torch.tensor([0.90, 0.5, 0.9, 0.50, 0.9])
    fields = {"logp_old": p_trainer.log(), "logp_rollout": p_rollout.log()}
    fields["advantage"] = torch.tensor([9.0, -1.0, 2.0, -0.5, 9.0])
    fields["weight"] = torch.tensor([1.0, 0.5, 1.0, 2.0, 1.0])
    fields["keep"] = torch.tensor([False, True, True, True, False])
    return made.replace(**fields | changes)


def test_the_halved_gradient_by_hand():
    """|A| (1 - p) w is 0.4, 1.0 and 0.25. Only the first token is less than half as likely."""
    found = gradient_metrics(trained())
    assert found == {NAME: pytest.approx(0.4 / 1.65)}
    assert is_known(NAME)


def test_without_a_correction_every_trainable_token_counts():
    """|A| (1 - p): 0.8, 1.0, 0.125 and 8.1. The first and the last are halved."""
    found = gradient_metrics(trained(weight=None, keep=None))
    assert found == {NAME: pytest.approx((0.8 + 8.1) / (0.8 + 1.0 + 0.125 + 8.1))}


def test_exactly_half_is_not_below_it():
    half = torch.full((5,), math.log(0.5))
    assert gradient_metrics(trained(logp_old=half, logp_rollout=torch.zeros(5)))[NAME] == 0


def test_no_gradient_has_no_such_measure():
    for advantage in (None, torch.zeros(5), torch.full((5,), math.nan)):
        assert gradient_metrics(trained(advantage=advantage)) == {}
    assert gradient_metrics(trained(logp_old=None)) == {}
    assert gradient_metrics(trained(keep=torch.zeros(5, dtype=torch.bool))) == {}


def test_a_rejected_token_may_be_nan():
    logp = trained().logp_old.clone()
    logp[[0, 4]] = math.nan
    assert gradient_metrics(trained(logp_old=logp)) == {NAME: pytest.approx(0.4 / 1.65)}
