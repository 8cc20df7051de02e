"""Every router runs once on the rows of its trace, and no state is left behind."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from onepolicy import bind_routers
from onepolicy.replay import RoutingError
from support.replay_models import tokens
from support.replay_steps import routes_of, untouched


def test_row_count_must_match(model, routers) -> None:
    for rows, native in itertools.product((20, 22), (False, True)):
        fix = r"input_ids\[:, :-1\].*op.pad_routes\(\[trace\]" if rows == 20 else "op.pad_routes"
        words = f"layer 0 routes 21 tokens, but the trace has {rows} rows; .*{fix}"
        context = routers.replay(routes_of(routers, rows), native=native, check=False)
        with pytest.raises(RoutingError, match=words), context:
            model(input_ids=tokens())
        assert untouched(model)


def test_one_forward_per_replay(model, routers) -> None:
    with routers.replay(routes_of(routers), check=False):
        model(input_ids=tokens())
        with pytest.raises(RoutingError, match="layer 0 was called twice"):
            model(input_ids=tokens())
    context = routers.replay(routes_of(routers), check=False)
    with pytest.raises(RoutingError, match=r"layer 0.*was not called"), context:
        pass


def test_self_test_catches_a_router_that_changes_under_replay(model, routers, monkeypatch) -> None:
    routers.self_test()
    assert all(module.training for module in model.modules())
    gate, calls = model.model.layers[1].mlp.gate, itertools.count(1)
    original = gate.forward

    def unsteady(x: Tensor) -> Any:
        logits, weights, ids = original(x)
        return logits, weights * next(calls), ids

    monkeypatch.setattr(gate, "forward", unsteady)
    with pytest.raises(RoutingError, match="changed the logits"):
        routers.self_test()


def test_self_test_catches_a_router_that_ignores_its_selection(model, routers) -> None:
    gate = model.model.layers[1].mlp.gate

    def forward(x: Tensor) -> Any:
        logits = x @ gate.weight.T
        torch.topk(logits, 3)
        probs, ids = logits.softmax(-1).sort(-1, descending=True)
        return logits, probs[:, :3], ids[:, :3]

    gate.forward = forward
    with pytest.raises(RoutingError, match="layer 1: replaying other experts changed nothing"):
        routers.self_test()
    assert gate.forward is forward


# --- nothing left behind --------------------------------------------------------------------------


def _open(routers, how: str):
    if how == "record":
        return routers.record()
    return routers.replay(routes_of(routers), check=False)


def test_nested_use_of_one_model_raises(model, routers) -> None:
    again = bind_routers(model)
    assert again == routers
    for outer, inner in itertools.product(("record", "replay"), repeat=2):
        with _open(routers, outer):
            with pytest.raises(RoutingError, match="already"), _open(again, inner):
                pytest.fail("entered")
            model(input_ids=tokens())
        assert untouched(model)


def test_an_exception_leaves_no_state(model, routers) -> None:
    plain = model(input_ids=tokens()).logits

    def fail(*_: Any) -> None:
        raise KeyError("midway")

    for how in ("record", "replay"):
        handle = model.model.layers[2].register_forward_pre_hook(fail)
        with pytest.raises(KeyError, match="midway"), _open(routers, how):
            model(input_ids=tokens())
        handle.remove()
        assert untouched(model)
        assert torch.equal(model(input_ids=tokens()).logits, plain)
        with routers.record() as tape:
            model(input_ids=tokens())
        with routers.replay(tape.trace(), check=False):
            assert torch.equal(model(input_ids=tokens()).logits, plain)


def test_a_forward_set_by_someone_else_is_put_back(model, routers) -> None:
    gate = model.model.layers[0].mlp.gate
    original = gate.forward

    def wrapped(x: Tensor) -> Any:
        return original(x)

    gate.forward = wrapped
    for how in ("record", "replay"):
        with _open(routers, how):
            model(input_ids=tokens())
        assert gate.forward is wrapped
