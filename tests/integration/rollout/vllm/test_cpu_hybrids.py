"""Settings with which vLLM's CPU build runs no recurrent layers are errors that name them, and a
reload reaches the convolutions that Mamba-2 layers hold beside their weights."""

import re

import pytest
import torch
from torch import nn

from onepolicy.cli import main
from onepolicy.config import UsageError, VLLMEngineConfig
from onepolicy.rollout.vllm.start import check_cpu_hybrid
from onepolicy.rollout.vllm.weights import renew_convolutions
from support.models import CONFIGS
from support.recurrent_models import hybrid

FITS = {"dtype": "bfloat16", "enable_prefix_caching": False}


def test_settings_that_run_no_recurrent_layers():
    text = hybrid("qwen3_next").config
    check_cpu_hybrid(VLLMEngineConfig(**FITS), text)
    has = "qwen3_next has linear_attention layers"
    for changed, words in (
        ({"dtype": "float32"}, rf"rollout.engine.dtype: float32, but {has}.*use bfloat16"),
        ({"enable_prefix_caching": True}, rf"engine.enable_prefix_caching: {has}.*to false"),
    ):
        with pytest.raises(UsageError, match=words):
            check_cpu_hybrid(VLLMEngineConfig(**FITS | changed), text)
    check_cpu_hybrid(VLLMEngineConfig(dtype="float32"), CONFIGS["qwen3_moe"])


def test_a_server_names_settings_as_it_takes_them(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("onepolicy.launch.engine_server.run_server", lambda *_, **__: 0)
    hybrid("qwen3_next").config.save_pretrained(tmp_path)
    serve = ["engine", "serve", str(tmp_path)]
    assert main([*serve, "dtype=float32"]) == 2
    assert re.search(r"(?<!\.)dtype: float32, but qwen3_next has", capsys.readouterr().err)
    assert main([*serve, "dtype=bfloat16"]) == 2
    assert re.search(r"(?<!\.)enable_prefix_caching: .*to false", capsys.readouterr().err)
    assert main([*serve, "dtype=bfloat16", "enable_prefix_caching=false"]) == 0


@pytest.mark.parametrize("packed", [False, True])
def test_a_reload_reaches_convolutions(packed):
    layer = nn.Module()
    layer.conv1d = nn.Module()
    layer.conv1d.weight = nn.Parameter(torch.ones(6, 1, 4), requires_grad=False)
    layer.register_buffer("conv_weights", torch.zeros(6, 4))
    if packed:  # for a kernel of the CPU
        layer.conv1d._cpu_unpacked_conv_weight = torch.full((6, 4), 2.0)
    renew_convolutions(nn.Sequential(nn.Linear(2, 2), layer))
    assert (layer.conv_weights == 1 + packed).all()
