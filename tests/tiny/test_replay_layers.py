"""Which models are MoE, and which decoder layer each router belongs to."""

from __future__ import annotations

import pytest
from replay_models import FAMILIES, build
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from onepolicy import bind_routers
from onepolicy.config import UsageError
from onepolicy.replay import RoutingError, is_moe, preflight
from onepolicy.replay.layers import decoder_index

TINY_LLAMA = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 0,
}


@pytest.fixture
def model() -> PreTrainedModel:
    return build("qwen3_moe")


def test_a_dense_model_is_refused_with_a_mend() -> None:
    model = LlamaForCausalLM(LlamaConfig(**TINY_LLAMA))
    with pytest.raises(UsageError, match=r"LlamaForCausalLM.*replay\.mode=off"):
        bind_routers(model)
    with pytest.raises(UsageError, match=r"'llama'.*replay\.mode=off"):
        preflight(model.config)


@pytest.mark.parametrize("family", FAMILIES)
def test_moe_is_told_from_the_config(family: str) -> None:
    config = FAMILIES[family]()
    assert is_moe(config)
    preflight(config)
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if name in config.to_dict():
            setattr(config, name, 0)
    assert not is_moe(config)


def test_prediction_heads_are_not_bound(model: PreTrainedModel) -> None:
    spare = build("qwen3_moe", seed=3)
    model.model.layers.append(spare.model.layers[0])  # index 3 of a model with 3 layers, where checkpoints keep heads
    model.mtp = nn.ModuleList([spare.model.layers[1]])
    assert bind_routers(model).layers == (0, 1, 2)


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("model.layers.3.mlp.gate", 3),
        ("model.language_model.layers.12.block_sparse_moe.gate", 12),
        ("base_model.model.model.layers.0.mlp.router", 0),
        ("gate", None),
    ],
)
def test_decoder_index(path: str, layer: int | None) -> None:
    assert decoder_index(path) == layer


def test_two_routers_of_one_layer_are_refused(model: PreTrainedModel) -> None:
    model.model.layers[0].second = build("qwen3_moe", seed=3).model.layers[0].mlp
    with pytest.raises(RoutingError, match="layer 0 has two routers"):
        bind_routers(model)


def test_layers_of_different_width_are_refused(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp = build("qwen3_moe", num_experts=12).model.layers[1].mlp
    with pytest.raises(RoutingError, match="layer 1 chooses 3 of 12"):
        bind_routers(model)
