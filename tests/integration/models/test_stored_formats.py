"""Checkpoints whose weights are stored in a quantised format: dequantised, or refused by name."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from onepolicy.config import ModelConfig, UsageError
from onepolicy.models import load
from support.models import make


@pytest.fixture
def stored(tmp_path):
    make("gpt_oss").save_pretrained(tmp_path)

    def with_format(method):
        path = tmp_path / "config.json"
        config = json.loads(path.read_text())
        config["quantization_config"] = {"quant_method": method}
        path.write_text(json.dumps(config))
        return ModelConfig(path=str(tmp_path))

    return with_format


def test_mxfp4_is_dequantised_whatever_is_installed(stored, monkeypatch):
    """Packed experts would load without an error and never train."""
    given = {}

    def from_pretrained(path, **settings):
        given.update(settings)
        raise OSError("far enough")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    with pytest.raises(UsageError, match="far enough"):
        load.load_model(stored("mxfp4"), torch.bfloat16, torch.device("cpu"))
    assert given["quantization_config"].dequantize is True


def test_other_formats_are_refused_by_name(stored):
    with pytest.raises(UsageError, match=r"stored in fp8, which cannot be trained"):
        load.load_model(stored("fp8"), torch.bfloat16, torch.device("cpu"))
