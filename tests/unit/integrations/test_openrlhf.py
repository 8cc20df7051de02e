"""The parts of the OpenRLHF adapter that need no OpenRLHF: stand-ins have the attributes it reads.

OpenRLHF's own classes run in tests/e2e/integrations/test_openrlhf.py.
"""

import json
import sys
from importlib import import_module
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch

import onepolicy as op
from onepolicy.config import UsageError
from onepolicy.integrations import openrlhf
from onepolicy.integrations.openrlhf.experience import extend

OLD = -torch.arange(1.0, 11.0).view(2, 5)
MODULES = {  # module -> its class and method that `setup` extends
    "trainer.ppo_utils.experience_maker": "RemoteExperienceMaker.compute_advantages_and_returns",
    "trainer.ppo_trainer": "BasePPOTrainer.train_step",
    "models.loss": "PolicyLoss.forward",
    "trainer.ray.ppo_actor": "ActorPPOTrainer.training_step",
}


def experience(**changes):
    """Return two samples of 6 tokens: the first has a tool's reply, the second nothing sampled."""
    mask = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 0, 0, 0]])
    more = {"action_log_probs": OLD, "rollout_log_probs": OLD - 0.25, "action_mask": mask}
    more |= {"sequences": torch.arange(12).view(2, 6), "rewards": torch.tensor([0.5, 1.0])}
    return SimpleNamespace(**more | {"advantages": torch.ones(2, 5), "info": {}} | changes)


def maker(sampling=None, **arguments):
    """Return an extended experience maker."""

    class RemoteExperienceMaker:
        args = SimpleNamespace(
            algo=SimpleNamespace(advantage=SimpleNamespace(is_correction_level="token")),
            actor=SimpleNamespace(**{"policy_loss_type": "ppo"} | arguments),
            rollout=SimpleNamespace(**{"top_p": 1.0, "temperature": 0.7} | (sampling or {})),
        )

        def compute_advantages_and_returns(self, experiences):
            return experiences

    extend(SimpleNamespace(RemoteExperienceMaker=RemoteExperienceMaker))
    return RemoteExperienceMaker()


def test_a_dump_has_what_was_sampled_from_its_first_to_its_last_token(tmp_path, monkeypatch):
    monkeypatch.setenv("ONEPOLICY", json.dumps({"dump": str(tmp_path)}))
    (made,) = maker().compute_advantages_and_returns([experience()])
    (file,) = tmp_path.iterdir()
    (row,) = pq.read_table(file).to_pylist()
    assert (row["tokens"], row["mask"]) == ([2, 3, 4, 5], [True, False, True, True])
    assert row["logp_trainer"] == [-2, -3, -4, -5]
    assert row["logp_rollout"] == [-2.25, -3.25, -4.25, -5.25]
    assert (row["step"], row["reward"]) == (1, 0.5)
    assert made.info["mismatch/k1"].tolist() == pytest.approx([-0.25, -0.25])


def test_a_step_that_cannot_be_measured_is_refused(monkeypatch):
    monkeypatch.setenv("ONEPOLICY", "{}")
    with pytest.raises(UsageError, match="is_correction_level token"):
        maker().compute_advantages_and_returns([experience(rollout_log_probs=None)])
    monkeypatch.setenv("ONEPOLICY", json.dumps({"correction": "pg-tis"}))
    with pytest.raises(UsageError, match="use ppo"):
        maker(policy_loss_type="gspo").compute_advantages_and_returns([experience()])


def test_self_normalised_weights_average_1_as_the_loss_does(monkeypatch):
    """OpenRLHF's loss is a mean over tokens, with gspo one over samples."""
    monkeypatch.setenv("ONEPOLICY", json.dumps({"correction": "mis"}))
    mask = torch.tensor([[1, 1, 1, 1, 0], [0, 0, 1, 0, 0]])
    rollout = OLD - torch.tensor([[0.3, 0.1, -0.2, 0.2, 0], [0, 0, 0.6, 0, 0]])
    for loss, average in (("ppo", "slots"), ("gspo", "sequences")):
        given = experience(action_mask=mask, rollout_log_probs=rollout)
        (made,) = maker(policy_loss_type=loss).compute_advantages_and_returns([given])
        applied = op.reweight(OLD, rollout, mask.bool(), op.preset("mis"), average=average)
        torch.testing.assert_close(made.advantages[applied.keep], applied.weight[applied.keep])


def test_openrlhfs_own_correction_is_named_beside_a_measurement(monkeypatch, caplog):
    monkeypatch.setenv("ONEPOLICY", "{}")
    maker().compute_advantages_and_returns([experience()])
    assert '{"correction": "off"}' in caplog.text
    caplog.clear()
    monkeypatch.setenv("ONEPOLICY", '{"correction": "off"}')
    given = experience()
    maker().compute_advantages_and_returns([given])
    assert "own correction is on" not in caplog.text


def test_cut_sampling(monkeypatch, caplog):
    """It is refused beside a correction, else logged once. OpenRLHF scores at its temperature."""
    monkeypatch.setenv("ONEPOLICY", json.dumps({"correction": "tis"}))
    with pytest.raises(UsageError, match=r"--rollout.top_p 0.5; .* set --rollout.top_p 1, or"):
        maker({"top_p": 0.5}).compute_advantages_and_returns([experience()])
    maker().compute_advantages_and_returns([experience()])
    monkeypatch.setenv("ONEPOLICY", "{}")
    made = maker({"top_p": 0.5})
    for _ in range(2):
        made.compute_advantages_and_returns([experience()])
    assert caplog.text.count("sampling is cut or changed (--rollout.top_p 0.5)") == 1


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Put a package named openrlhf on the path, with the classes that `setup` extends."""
    for name, method in MODULES.items():
        path = tmp_path.joinpath("openrlhf", *name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        owner, function = method.split(".")
        path.write_text(f"class {owner}:\n    def {function}(self): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "openrlhf"]:
        del sys.modules[name]


def test_setup_extends_the_classes_as_they_are_imported(package):
    openrlhf.setup()
    for name, method in MODULES.items():
        module = import_module(f"openrlhf.{name}")
        owner, function = method.split(".")
        code = getattr(getattr(module, owner), function).__code__
        assert code.co_filename != module.__file__, method
