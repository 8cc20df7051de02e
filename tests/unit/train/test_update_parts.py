"""What stands beside the policy's loss, without a model."""

from types import SimpleNamespace

import pytest
import torch

from onepolicy.config import TrainingError
from onepolicy.train.update_parts import CurrentPolicyCorrection


def test_centering_without_values_names_what_is_missing():
    part = SimpleNamespace(config=SimpleNamespace(centering="support"))
    scored = SimpleNamespace(kept_logp=None, top=None)
    micro = SimpleNamespace(scored=scored, batch=SimpleNamespace(top_logp_rollout=None))
    with pytest.raises(TrainingError, match="= support needs"):
        CurrentPolicyCorrection._score_baseline(part, micro, torch.tensor([True]))
