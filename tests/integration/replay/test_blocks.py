"""Blocks that are fused, replaced, shared or missing: a RoutingError names the layer at the first
forward."""

from __future__ import annotations

import copy
from types import MethodType

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from onepolicy import bind_routers
from onepolicy.replay import Routers, RoutingError
from support.replay_models import build, random_trace, tokens


@pytest.fixture
def model() -> PreTrainedModel:
    return build("qwen3_moe")


def _refused_at_first_forward(routers: Routers, message: str) -> None:
    trace = random_trace(21, routers.layers, routers.num_experts, routers.top_k)
    with pytest.raises(RoutingError, match=message), routers.replay(trace, check=False):
        routers._model(input_ids=tokens())
    with pytest.raises(RoutingError, match=r"layer \d, .*called"), routers.record():
        routers._model(input_ids=tokens())


def _fused(block: nn.Module, hidden: Tensor) -> Tensor:
    """Run a whole block in one kernel, as a kernel hub's replacement of `forward` does."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    weights, ids = (flat @ block.gate.weight.T).softmax(-1).sort(-1, descending=True)
    return block.experts(flat, ids[:, :3], weights[:, :3]).view_as(hidden)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_kernel_in_place_of_a_block(model: PreTrainedModel, layer: int) -> None:
    routers = bind_routers(model)
    block = model.model.layers[layer].mlp
    block.forward = MethodType(_fused, block)
    _refused_at_first_forward(
        routers, rf"layer {layer}: 'model.layers.{layer}.mlp.gate' was not called"
    )


def test_a_kernel_that_selects_without_a_top_k(model: PreTrainedModel) -> None:
    routers = bind_routers(model)
    gate = model.model.layers[1].mlp.gate

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
        weights, ids = logits.softmax(-1).sort(-1, descending=True)
        return logits, weights[:, :3], ids[:, :3]

    gate.forward = forward
    trace = random_trace(21, routers.layers, routers.num_experts, routers.top_k)
    with (
        pytest.raises(RoutingError, match=r"layer 1: .*ran 0 top-3"),
        routers.replay(trace, check=False),
    ):
        model(input_ids=tokens())


def test_a_decoder_built_again_after_binding(model: PreTrainedModel) -> None:
    routers = bind_routers(model)
    model.model = build("qwen3_moe", seed=1).model
    trace = random_trace(21, routers.layers, routers.num_experts, routers.top_k)
    with (
        pytest.raises(RoutingError, match=r"layer 0: .*was not called"),
        routers.replay(trace, check=False),
    ):
        model(input_ids=tokens())
    with routers.record() as tape:
        model(input_ids=tokens())
    with pytest.raises(RoutingError, match="no forward was recorded"):
        tape.trace()


def test_two_decoders_in_one_model(model: PreTrainedModel) -> None:
    model.draft = copy.deepcopy(model.model)
    with pytest.raises(RoutingError, match=r"layer 0 has two routers, '(model|draft)\."):
        bind_routers(model)


def test_one_block_in_two_layers(model: PreTrainedModel) -> None:
    routers = bind_routers(model)
    model.model.layers[2].mlp = model.model.layers[0].mlp
    trace = random_trace(21, routers.layers, routers.num_experts, routers.top_k)
    with (
        pytest.raises(RoutingError, match="layer 0 was called twice"),
        routers.replay(trace, check=False),
    ):
        model(input_ids=tokens())
    with pytest.raises(RoutingError, match=r"layer \d, .*called"), routers.record():
        model(input_ids=tokens())
    with pytest.raises(RoutingError, match=r"layers 0 and 2 share one router"):
        bind_routers(model)


def test_a_block_replaced_whole_is_named_as_missing(model: PreTrainedModel) -> None:
    """No module in it looks like experts, but the config lists experts in layer 1."""

    class Opaque(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return torch.tanh(hidden)

    model.model.layers[1].mlp = Opaque()
    with pytest.raises(
        RoutingError,
        match=r"layers \[0, 1, 2\], but routers were found in \[0, 2\]; missing: \[1\]",
    ):
        bind_routers(model)


def test_a_model_with_only_fused_blocks_is_not_taken_for_dense(
    model: PreTrainedModel,
) -> None:
    for layer in model.model.layers:
        layer.mlp.gate = nn.Linear(32, 8)
    with pytest.raises(
        RoutingError, match=r"layer 0: Qwen3MoeSparseMoeBlock .*has experts but no router"
    ):
        bind_routers(model)
