"""A correction holds little memory beside its inputs and outputs, for any batch."""

from unittest import mock

import pytest
import torch

import onepolicy.correct.slots as slots_module
from onepolicy.correct.current_policy import live_weights
from onepolicy.correct.presets import preset
from onepolicy.correct.reweight import reweight


@pytest.mark.parametrize("name", ["mis", "trm", "m2po", "pg-tis"])
def test_less_than_ten_fields_of_the_batch(name):
    """In [T] float32 fields, T many times a chunk. The returned weight and keep are 1.25."""
    from onepolicy.train.dry_run import PeakMemory

    count, config = 40_000, preset(name)
    rollout = -torch.rand(count) * 3 - 1
    old = rollout + 0.05 * torch.randn(count)
    given = [old, rollout, torch.rand(count) < 0.9]
    segment = torch.arange(count) // 1000
    more = {"segment": segment, "turn": torch.zeros_like(segment), "advantage": torch.randn(count)}
    with (
        mock.patch.object(slots_module, "CHUNK", 2048),
        PeakMemory([*given, *more.values()]) as peak,
    ):
        if (live := config.live_part) is not None:
            live_weights(*given, live, **more)
        else:
            reweight(*given, config, **more, average="sequences")
    assert 1.25 < peak.peak / (4 * count) < 10
