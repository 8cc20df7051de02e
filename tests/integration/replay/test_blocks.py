"""Blocks that are fused, replaced, shared or missing: a RoutingError names the layer when the model
is bound, or at the first forward."""

from __future__ import annotations

import copy
from types import MethodType

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from onepolicy import bind_routers
from onepolicy.replay import Routers, RoutingError
from support.replay_models import build, tokens
from support.replay_steps import routes_of


class FusedGate(nn.Module):
    """A router with its own arithmetic, as a fused kernel would have."""

    def __init__(self, gate: nn.Module, selections: int = 0) -> None:
        super().__init__()
        self.weight, self.selections = gate.weight, selections

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x @ self.weight.T
        for _ in range(self.selections):
            torch.topk(logits, 3)
        probs, ids = logits.softmax(-1).sort(-1, descending=True)
        return logits, probs[:, :3], ids[:, :3]


class Opaque(nn.Module):
    """A block in which nothing looks like experts."""

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(hidden)


def _fused(block: nn.Module, hidden: Tensor) -> Tensor:
    """Run a whole block in one kernel, as a kernel hub's replacement of `forward` does."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    weights, ids = (flat @ block.gate.weight.T).softmax(-1).sort(-1, descending=True)
    return block.experts(flat, ids[:, :3], weights[:, :3]).view_as(hidden)


def fuse_block(model: PreTrainedModel, layer: int) -> None:
    block = model.model.layers[layer].mlp
    block.forward = MethodType(_fused, block)


def fuse_gate(model: PreTrainedModel) -> None:
    block = model.model.layers[1].mlp
    block.gate = FusedGate(block.gate)


def select(model: PreTrainedModel, times: int) -> None:
    gate = model.model.layers[2].mlp.gate
    gate.forward = FusedGate(gate, times).forward


def share_a_block(model: PreTrainedModel) -> None:
    model.model.layers[2].mlp = model.model.layers[0].mlp


def replace_block(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp = Opaque()


def replace_routers(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.mlp.gate = nn.Linear(32, 8)


def add_a_decoder(model: PreTrainedModel) -> None:
    model.draft = copy.deepcopy(model.model)


def add_a_block(model: PreTrainedModel) -> None:
    model.model.layers[0].second = build("qwen3_moe", seed=3).model.layers[0].mlp


def widen_a_layer(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp = build("qwen3_moe", num_experts=12).model.layers[1].mlp


UNBINDABLE = [
    (add_a_decoder, r"layer 0 has two routers, '(model|draft)\."),
    (add_a_block, "layer 0 has two routers"),
    (widen_a_layer, "layer 1 chooses 3 of 12"),
    (share_a_block, "layers 0 and 2 share one router"),
    (replace_block, r"\[0, 1, 2\], but routers were found in \[0, 2\]; missing: \[1\]"),
    (replace_routers, "layer 0: Qwen3MoeSparseMoeBlock .*has experts but no router"),
    (fuse_gate, r"layer 1: .*model\.layers\.1\.mlp"),
]


def test_a_model_that_cannot_be_bound(subtests) -> None:
    for change, words in UNBINDABLE:
        with subtests.test(change.__name__):
            model = build("qwen3_moe")
            change(model)
            with pytest.raises(RoutingError, match=words):
                bind_routers(model)


BROKEN_LATER = [  # arguments, what a replay says, what a recording says
    *(
        (fuse_block, [i], f"'model.layers.{i}.mlp.gate' was not called", r"layer \d, .*called")
        for i in range(3)
    ),
    (fuse_gate, [], "layer 1.*was not called", "layer 1.*was called 0 times"),
    (select, [0], "layer 2: .*ran 0 top-3", "layer 2.*ran 0 top-3"),
    (select, [2], "layer 2: .*ran 2 top-3", "layer 2.*ran 2 top-3"),
    (share_a_block, [], "layer 0 was called twice", r"layer \d, .*called"),
]


def _trace_within(routers: Routers, model: PreTrainedModel) -> None:
    """Take the trace before the recording's context is left."""
    with routers.record() as tape:
        model(input_ids=tokens())
        tape.trace()


def test_a_block_that_changes_after_binding_raises_at_the_first_forward(subtests) -> None:
    for change, arguments, replayed, recorded in BROKEN_LATER:
        with subtests.test(change.__name__, arguments=arguments):
            model = build("qwen3_moe")
            routers = bind_routers(model)
            change(model, *arguments)
            trace, forwards = routes_of(routers), _own_forwards(model)
            with pytest.raises(RoutingError, match=replayed), routers.replay(trace, check=False):
                model(input_ids=tokens())
            with pytest.raises(RoutingError, match=recorded), routers.record():
                model(input_ids=tokens())
            with pytest.raises(RoutingError, match=recorded):
                _trace_within(routers, model)
            assert _own_forwards(model) == forwards


def test_a_layer_added_after_binding(model, routers) -> None:
    """It would route natively, in a forward that is called replayed."""
    trace = routes_of(routers)
    model.model.layers.append(build("qwen3_moe", seed=1).model.layers[-1])
    depth = model.config.num_hidden_layers = len(model.model.layers)
    words = f"has {depth} decoder layers, and had {depth - 1} when .* call bind_routers again"
    with pytest.raises(RoutingError, match=words), routers.replay(trace, check=False):
        raise AssertionError("the context was entered")
    with pytest.raises(RoutingError, match=words), routers.record():
        raise AssertionError("the context was entered")
    assert len(bind_routers(model).layers) == len(routers.layers) + 1
    assert repr(routers) == f"Routers({len(routers.layers)} layers, {routers.top_k} of 8 experts)"


def _own_forwards(model: PreTrainedModel) -> list:
    return [module.__dict__.get("forward") for module in model.modules()]


def test_a_decoder_built_again_after_binding(model, routers) -> None:
    model.model = build("qwen3_moe", seed=1).model
    trace, words = routes_of(routers), r"layer 0: .*was not called"
    with pytest.raises(RoutingError, match=words), routers.replay(trace, check=False):
        model(input_ids=tokens())
    with routers.record() as tape:
        model(input_ids=tokens())
    with pytest.raises(RoutingError, match="no forward was recorded"):
        tape.trace()
