"""Checkpoints whose weights are stored in a quantised format: dequantised, or refused by name."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from onepolicy.config import ModelConfig, UsageError
from onepolicy.models import load
from onepolicy.models.empty import empty_model
from support.families import TABLE
from support.models import make
from support.mxfp4 import write_mxfp4


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_in_mxfp4_is_plain_once_it_is_loaded(dtype, tmp_path):
    expected = write_mxfp4(tmp_path)
    model = load.load_model(ModelConfig(path=str(tmp_path)), dtype, torch.device("cpu"))
    state = model.state_dict()
    assert {tensor.dtype for tensor in state.values()} == {dtype}
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name].to(dtype)) for name in expected)
    model.save_pretrained(tmp_path / "saved")
    saved = ModelConfig(path=str(tmp_path / "saved"))
    again = load.load_model(saved, dtype, torch.device("cpu"))
    assert all(torch.equal(state[name], again.state_dict()[name]) for name in expected)
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()


def test_other_formats_are_refused_by_name(stored):
    with pytest.raises(UsageError, match=r"stored in fp8, which cannot be trained"):
        load.load_model(stored("fp8"), torch.bfloat16, torch.device("cpu"))


def test_the_model_without_weights_is_that_of_the_dequantised_ones(stored):
    """A sharded learner exports its weights with this config."""
    empty = empty_model(stored("mxfp4"))
    assert not hasattr(empty.config, "quantization_config")
    assert "quantization_config" not in empty.config.to_dict()
    with pytest.raises(UsageError, match=r"stored in fp8, which cannot be trained"):
        empty_model(stored("fp8"))


@pytest.mark.parametrize("family", ["deepseek_v3", "ernie4_5_moe", "lfm2_moe"])
def test_the_model_without_weights_has_the_dtypes_of_the_loaded_one(family, tmp_path):
    """The ranks copy what rank 0 loads into it: families keep selection biases in float32."""
    TABLE[family].model().save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path), dtype="bfloat16")
    loaded = load.load_model(model, torch.bfloat16, torch.device("cpu"))
    expected = {name: tensor.dtype for name, tensor in loaded.state_dict().items()}
    assert {name: t.dtype for name, t in empty_model(model).state_dict().items()} == expected
    assert torch.float32 in expected.values()


@pytest.mark.parametrize(
    "family", ["deepseek_v3", "ernie4_5_moe", "hunyuan_v1_moe", "lfm2_moe", "zaya"]
)
def test_a_cast_model_has_the_tensors_of_one_opened_in_that_dtype(family, tmp_path):
    TABLE[family].model().save_pretrained(tmp_path)
    model, cpu = ModelConfig(path=str(tmp_path)), torch.device("cpu")
    opened = load.load_model(model, torch.bfloat16, cpu).state_dict()
    cast = load.cast_model(load.load_model(model, torch.float32, cpu), torch.bfloat16)
    for name, tensor in cast.state_dict().items():
        assert tensor.dtype == opened[name].dtype, name
        assert torch.equal(tensor, opened[name]), name
