"""What `attach` says of a TRL trainer's sampling. The trainer is a stand-in with its attributes."""

from types import SimpleNamespace

import pytest

import onepolicy as op
from onepolicy.integrations.trl.preflight import METHODS, check_trainer
from onepolicy.integrations.trl.settings import TrlSettings

WHOLE = {"top_p": 1.0, "top_k": 0, "min_p": None}


class GRPOTrainer(SimpleNamespace):
    """A stand-in: the checks go by this name."""


def trainer(**changes):
    args = SimpleNamespace(
        torch_compile=False, steps_per_generation=1, gradient_accumulation_steps=1
    )
    more = dict.fromkeys(METHODS) | WHOLE | {"loss_type": "grpo", "use_vllm": False}
    more |= {"router_aux_loss_coef": 0.0, "aux_loss_enabled": False, "num_iterations": 1}
    more |= {"use_transformers_continuous_batching": False}
    return GRPOTrainer(args=args, **(more | changes))


def narrowed_notes(correction=None, **changes):
    report = check_trainer(trainer(**changes), TrlSettings(correction=correction))
    return [note for note in report.notes if "narrowed" in note]


@pytest.mark.parametrize("change", [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}])
def test_narrowed_sampling_without_a_correction_of_ours_is_one_line(change):
    """TRL's own correction is named only where it is on: with vLLM."""
    (note,) = narrowed_notes(**change)
    name, value = next(iter(change.items()))
    assert f"{name} {value:g}" in note
    assert "set top_p=1, top_k=0, min_p=None" in note
    assert "TRL's own correction" not in note
    vllm = {"use_vllm": True, "vllm_mode": "server", "vllm_importance_sampling_correction": True}
    (note,) = narrowed_notes(**change, **vllm)
    assert "TRL's own correction" in note
    assert not narrowed_notes(**vllm)
    with pytest.raises(op.UsageError, match=f"whole distribution sampled: .*{name} {value:g}"):
        narrowed_notes(op.preset("tis"), **change)


def test_sampling_that_is_whole_has_no_line():
    assert not narrowed_notes()
