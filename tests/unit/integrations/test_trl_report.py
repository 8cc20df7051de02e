"""What the report of `attach` says of a TRL trainer. The trainer is a stand-in with its
attributes."""

from types import SimpleNamespace

import pytest

import onepolicy as op
from onepolicy.config import UsageError
from onepolicy.integrations.trl.preflight import METHODS, check_trainer
from onepolicy.integrations.trl.settings import TrlSettings

OFF = TrlSettings(replay="off")


class GRPOTrainer(SimpleNamespace):
    """A stand-in: the checks go by this name."""

    accelerator = SimpleNamespace(num_processes=1)


class AsyncTrainer(SimpleNamespace):
    pass


class SFTTrainer(SimpleNamespace):
    pass


def trainer(kind=GRPOTrainer, **changes):
    """Return a trainer whose generation and update are aligned, so that TRL does not score."""
    args = SimpleNamespace(steps_per_generation=1, gradient_accumulation_steps=1)
    more = dict.fromkeys(METHODS) | {"top_p": 1.0, "top_k": 0, "min_p": None}
    more |= {"use_vllm": False, "num_iterations": 1, "loss_type": "grpo"}
    return kind(args=args, **more | changes)


def test_another_trainer_is_told_which_one_to_use():
    for kind, fix in ((SFTTrainer, "use GRPOTrainer or RLOO"), (AsyncTrainer, "its batches pack")):
        with pytest.raises(UsageError, match=f"{kind.__name__}; {fix}"):
            check_trainer(trainer(kind), OFF)


def test_the_forward_that_scores_is_told():
    (note,) = check_trainer(trainer(), OFF).notes
    assert "one forward without gradient is added" in note
    assert check_trainer(trainer(), TrlSettings("off", scoring="training-forward")).notes == []
    (note,) = check_trainer(trainer(num_iterations=2), OFF).notes
    assert "nothing is added" in note


def test_two_masks_of_old_sequences_are_refused():
    twice = trainer(off_policy_mask_threshold=0.5)
    with pytest.raises(UsageError, match="TRL's mask is opsm"):
        check_trainer(twice, TrlSettings("off", op.preset("opsm")))
    check_trainer(twice, TrlSettings("off", op.preset("tis")))
    check_trainer(trainer(), TrlSettings("off", op.preset("opsm")))
