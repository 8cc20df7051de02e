"""Defaults of a run on a GPU: bfloat16 that is said, unless the recipe says otherwise."""

import pytest
import torch

from onepolicy.build import gpu_defaults
from onepolicy.build.gpu_defaults import apply_gpu_defaults
from onepolicy.config import resolve

TREE = {"out": "unused", "steps": 1, "model": {"path": "unused"}, "task": {"kind": "chain"}}


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr(gpu_defaults, "parse_device", lambda _: torch.device("cuda"))


def applied(*settings):
    notes = []
    return apply_gpu_defaults(resolve(TREE, list(settings)), notes.append), notes


def test_a_gpu_computes_in_bfloat16_and_says_so(cuda):
    config, notes = applied()
    assert config.model.dtype == "bfloat16"
    assert len(notes) == 1
    assert "model.dtype=float32" in notes[0]
    resolve(config.model_dump())  # the settings agree


def test_ranks_keep_float32_shards(cuda):
    config, notes = applied("train.ranks=2")
    assert (config.model.dtype, config.train.fsdp_param_dtype) == ("float32", "bfloat16")
    assert len(notes) == 1
    resolve(config.model_dump())


def test_a_precision_that_was_given_stays(cuda):
    settings = ["model.dtype=float32", "train.autocast=bfloat16", "train.autocast=off"]
    for setting in [*settings, "numerics=on-policy", "rollout.engine.dtype=float32"]:
        config, notes = applied(setting)
        assert config == resolve(TREE, [setting])
        assert notes == []


def test_nothing_changes_on_a_cpu():
    config, notes = applied("train.device=cpu")
    assert config == resolve(TREE, ["train.device=cpu"])
    assert notes == []
