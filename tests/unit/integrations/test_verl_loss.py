"""verl's policy loss of ours, around stand-ins for the surrogates of verl."""

import sys
from importlib import import_module
from types import ModuleType

import pytest
import torch

import onepolicy as op
from onepolicy.config import UsageError

OWN = "onepolicy.integrations.verl.policy_loss"
OLD = torch.log(torch.tensor([[0.5, 0.4]]))
NEW = torch.log(torch.tensor([[0.25, 0.6]]))


@pytest.fixture
def loss(monkeypatch):
    """Provide the module; a surrogate returns its name and the weights that it was given."""

    def surrogate(name):
        return lambda rollout_is_weights, **_: ((name, rollout_is_weights), {})

    core = ModuleType("verl.trainer.ppo.core_algos")
    core.register_policy_loss = lambda name: lambda function: function
    core.compute_policy_loss_reinforce = surrogate("reinforce")
    core.compute_policy_loss_vanilla = surrogate("clipped")
    ppo = ModuleType("verl.trainer.ppo")
    ppo.core_algos = core
    for module in (ModuleType("verl"), ModuleType("verl.trainer"), ppo, core):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    sys.modules.pop(OWN, None)
    yield import_module(OWN)
    del sys.modules[OWN]


def of_tokens(loss, **more):
    mask = torch.tensor([[True, True]])
    return loss.policy_loss(OLD, NEW, torch.tensor([[1.0, -1.0]]), mask, **more)


def test_each_correction_goes_with_its_surrogate(loss):
    for preset, name in (("pg-tis", "reinforce"), ("ppo-is", "clipped")):
        loss.configure(op.preset(preset))
        (used, weights), metrics = of_tokens(loss)
        assert used == name
        assert metrics["onepolicy/live_tokens"] == 2
        if name == "reinforce":  # new / rollout
            torch.testing.assert_close(weights, torch.tensor([[0.5, 1.5]]))


def test_the_gap_is_that_of_the_new_probabilities(loss):
    """The ratios are 0.5 and 1.5: k1 is -ln 0.75, and so is k3, as their differences from 1 add up
    to 0."""
    loss.configure(op.preset("pg-tis"))
    metrics = of_tokens(loss)[1]
    for name in ("k1", "k3"):
        assert metrics[f"onepolicy/live_{name}"] == pytest.approx(0.287682, abs=1e-5)


def test_no_correction_and_two_are_refused(loss):
    loss.configure(None)
    with pytest.raises(UsageError, match="was given no correction"):
        of_tokens(loss)
    loss.configure(op.preset("pg-tis"))
    with pytest.raises(UsageError, match="would correct it twice"):
        of_tokens(loss, rollout_is_weights=torch.ones(1, 2))


@pytest.mark.parametrize("preset", ["pg-tis", "ppo-is"])
def test_a_surrogate_sees_no_value_that_is_not_finite(loss, preset, monkeypatch):
    """In verl's loss 0 times NaN is NaN. The token is rejected and counted."""
    seen = []

    def surrogate(rollout_is_weights, **how):
        seen.append(how.get("old_log_prob", how.get("rollout_log_prob")))
        return rollout_is_weights, {}

    for name in ("reinforce", "vanilla"):
        monkeypatch.setattr(loss.core_algos, f"compute_policy_loss_{name}", surrogate)
    loss.configure(op.preset(preset))
    old, mask = torch.tensor([[float("nan"), OLD[0, 1]]]), torch.tensor([[True, True]])
    weights, metrics = loss.policy_loss(old, NEW, torch.tensor([[1.0, -1.0]]), mask)
    torch.testing.assert_close(seen[0], torch.stack([NEW[0, 0], OLD[0, 1]])[None])
    assert weights[0, 0] == 0
    assert metrics["onepolicy/live_kept"] == 1
