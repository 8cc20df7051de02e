"""Replay under torch.compile: no graph break, bit-equal to eager, and new routes run the existing
graph.

The fast test stops at dynamo (backend eager). Slow ones trace the backward too (aot_eager) and run
inductor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo import config as dynamo
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from onepolicy import bind_routers
from onepolicy.types import RoutingTrace
from support.replay_models import build, loss_and_grads, same_bits, tokens
from support.replay_steps import routes_of


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _build(family: str, **changes: object) -> PreTrainedModel:
    # AOTAutograd cannot trace transformers' CPU grouped_mm.
    return build(family, experts="batched_mm", **changes)


def _traces(model: PreTrainedModel, count: int, *, every: int = 0, weights: bool = False) -> list:
    routers, traces = bind_routers(model), []
    for seed in range(2, 2 + count):
        trace = routes_of(routers, seed=seed, every=every)
        if weights:
            random = torch.rand(trace.ids.shape, generator=torch.Generator().manual_seed(seed))
            trace = dataclasses.replace(trace, weights=random)
        traces.append(trace)
    return traces


def _replayed(model: PreTrainedModel, traces: list[RoutingTrace], **how: Any) -> list[tuple]:
    routers, found = bind_routers(model), []
    for trace in traces:
        with routers.replay(trace, **how, check=False) as replay:
            logits, grads = loss_and_grads(model, tokens())
        found.append((logits, grads, replay.native().ids if how.get("native") else None))
    return found


def _check(
    model: PreTrainedModel, expected: list, traces: list[RoutingTrace], *, graphs: int, **how: Any
) -> None:
    """Check for the same bits as eager, and that the first replay is the last one that compiles."""
    found = _replayed(model, traces[:1], **how)
    compiled = counters["stats"]["unique_graphs"]
    assert compiled == graphs
    found += _replayed(model, traces[1:], **how)
    assert counters["stats"]["unique_graphs"] == compiled
    for (logits, grads, native), (plain, plain_grads, plain_native) in zip(
        found, expected, strict=True
    ):
        assert torch.equal(logits, plain)
        assert same_bits(grads, plain_grads)
        assert native is None or torch.equal(native, plain_native)
    assert not torch.equal(found[0][0], found[1][0])


def test_a_router_compiles_whole_and_takes_new_routes() -> None:
    model = _build("qwen3_moe", num_hidden_layers=1)
    plain = model(input_ids=tokens()).logits
    traces = _traces(model, 2, every=3)
    expected = _replayed(model, traces, native=True)
    model.model.layers[0].mlp.gate.compile(backend="eager", fullgraph=True)
    _check(model, expected, traces, graphs=1, native=True)
    assert torch.equal(model(input_ids=tokens()).logits, plain)  # outside the context: native again
    routers = bind_routers(model)
    with routers.record() as tape:
        model(input_ids=tokens())
    with routers.replay(tape.trace(), check=False):
        assert torch.equal(model(input_ids=tokens()).logits, plain)


MODES = {
    "plain": ({}, {}),
    "native": ({"native": True}, {}),
    "some_native": ({}, {"every": 3}),
    "soft": ({"soft": 0.8}, {}),
    "weights": ({"weights": True}, {"weights": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "deepseek_v2_groups", "gpt_oss"])
def test_a_whole_model_compiles_in_one_graph(family: str, mode: str) -> None:
    how, kind = MODES[mode]
    model = _build(family)
    traces = _traces(model, 3, **kind)
    expected = _replayed(model, traces, **how)
    model.compile(backend="aot_eager", fullgraph=True)
    _check(model, expected, traces, graphs=1, **how)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["whole_model", "blocks"])
def test_compile_with_activation_checkpointing(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For checkpoints, dynamo needs the information that a recompute has no side effects (has this
    router run?)."""
    model = _build("qwen3_moe")
    traces = _traces(model, 3)
    expected = _replayed(model, traces)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if how == "blocks":
        # Each by itself, inside its layer's checkpoint: one graph more, for the recompute.
        for layer in model.model.layers:
            layer.mlp.compile(backend="aot_eager", fullgraph=True)
    else:
        monkeypatch.setattr(dynamo, "skip_fwd_side_effects_in_bwd_under_checkpoint", True)
        model.compile(backend="aot_eager", fullgraph=True)
    _check(model, expected, traces, graphs=1 if how == "whole_model" else 2)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.needs("g++")  # of inductor
def test_inductor_takes_new_routes() -> None:
    model = _build("qwen3_moe", num_hidden_layers=1)
    traces = _traces(model, 2)
    expected = _replayed(model, traces)
    model.model.layers[0].mlp.compile(fullgraph=True)
    found = _replayed(model, traces)
    for (logits, grads, _), (plain, plain_grads, _) in zip(found, expected, strict=True):
        torch.testing.assert_close(logits, plain, atol=1e-4, rtol=1e-4)  # inductor fuses
        for name in plain_grads:
            torch.testing.assert_close(grads[name], plain_grads[name], atol=1e-5, rtol=1e-3)
    assert counters["stats"]["unique_graphs"] == 1
