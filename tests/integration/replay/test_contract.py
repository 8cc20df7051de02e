"""Every router runs once on the rows of its trace, and no state is left behind."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from onepolicy import bind_routers
from onepolicy.replay import Routers, RoutingError
from onepolicy.types import RoutingTrace
from support.replay_models import build, random_trace, tokens


@pytest.fixture
def model() -> PreTrainedModel:
    return build("qwen3_moe")


@pytest.fixture
def routers(model: PreTrainedModel) -> Routers:
    return bind_routers(model)


def _trace(routers: Routers, rows: int = 21) -> RoutingTrace:
    return random_trace(rows, routers.layers, routers.num_experts, routers.top_k)


def _untouched(model: nn.Module) -> bool:
    return not any("forward" in module.__dict__ for module in model.modules())


# --- every router is called once on the trace's rows ----------------------------------------------


def test_row_count_must_match(model: PreTrainedModel, routers: Routers) -> None:
    for rows, native in itertools.product((20, 22), (False, True)):
        with (
            pytest.raises(
                RoutingError, match=f"layer 0 routes 21 tokens, but the trace has {rows} rows"
            ),
            routers.replay(_trace(routers, rows), native=native, check=False),
        ):
            model(input_ids=tokens())
        assert _untouched(model)


def test_one_forward_per_replay(model: PreTrainedModel, routers: Routers) -> None:
    with routers.replay(_trace(routers), check=False):
        model(input_ids=tokens())
        with pytest.raises(RoutingError, match="layer 0 was called twice"):
            model(input_ids=tokens())


def test_a_replay_without_a_forward_raises(routers: Routers) -> None:
    with (
        pytest.raises(RoutingError, match=r"layer 0.*was not called"),
        routers.replay(_trace(routers), check=False),
    ):
        pass


class FusedGate(nn.Module):
    """A router with its own arithmetic, as a fused kernel would have."""

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.weight = gate.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x @ self.weight.T
        probs, ids = logits.softmax(-1).sort(-1, descending=True)
        return logits, probs[:, :3], ids[:, :3]


def test_a_gate_fused_before_binding_is_refused(model: PreTrainedModel) -> None:
    block = model.model.layers[1].mlp
    block.gate = FusedGate(block.gate)
    with pytest.raises(RoutingError, match=r"layer 1: .*model\.layers\.1\.mlp"):
        bind_routers(model)


def test_a_gate_fused_after_binding_raises_at_the_first_forward(
    model: PreTrainedModel, routers: Routers
) -> None:
    block = model.model.layers[1].mlp
    block.gate = FusedGate(block.gate)
    with (
        pytest.raises(RoutingError, match=r"layer 1.*was not called"),
        routers.replay(_trace(routers), check=False),
    ):
        model(input_ids=tokens())
    with pytest.raises(RoutingError, match=r"layer 1.*was called 0 times"), routers.record():
        model(input_ids=tokens())
    with routers.record() as tape:
        model(input_ids=tokens())
        with pytest.raises(RoutingError, match="layer 1 was called 0 times"):
            tape.pop_ids()
        tape.recorders[1].seen.append(torch.zeros(21, 3))  # let the context end
        tape.recorders[0].seen.append(torch.zeros(21, 3))


@pytest.mark.parametrize("selections", [0, 2])
def test_a_router_without_exactly_one_selection_raises(
    model: PreTrainedModel, routers: Routers, monkeypatch: pytest.MonkeyPatch, selections: int
) -> None:
    gate = model.model.layers[2].mlp.gate
    fused = FusedGate(gate)

    def forward(x: Tensor) -> Any:
        for _ in range(selections):
            torch.topk(x @ gate.weight.T, 3)
        return fused(x)

    monkeypatch.setattr(gate, "forward", forward)
    with (
        pytest.raises(RoutingError, match=rf"layer 2.*ran {selections} top-3"),
        routers.replay(_trace(routers), check=False),
    ):
        model(input_ids=tokens())
    with pytest.raises(RoutingError, match=rf"layer 2.*ran {selections} top-3"), routers.record():
        model(input_ids=tokens())
    assert gate.forward is forward


def test_self_test_catches_a_router_that_changes_under_replay(
    model: PreTrainedModel, routers: Routers, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_self_test_catches_a_router_that_ignores_its_selection(
    model: PreTrainedModel, routers: Routers, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = model.model.layers[1].mlp.gate
    fused = FusedGate(gate)

    def forward(x: Tensor) -> Any:
        torch.topk(x @ gate.weight.T, 3)
        return fused(x)

    monkeypatch.setattr(gate, "forward", forward)
    with pytest.raises(RoutingError, match="layer 1: replaying other experts changed nothing"):
        routers.self_test()
    assert gate.forward is forward


# --- nothing left behind --------------------------------------------------------------------------


def test_nested_use_of_one_model_raises(model: PreTrainedModel, routers: Routers) -> None:
    again = bind_routers(model)
    assert again == routers
    for outer, inner in itertools.product(("record", "replay"), repeat=2):
        opened = [getattr(r, how) for r, how in ((routers, outer), (again, inner))]
        hows = (
            {} if how == "record" else {"trace": _trace(routers), "check": False}
            for how in (outer, inner)
        )
        contexts = [f(**how) for f, how in zip(opened, hows, strict=True)]
        with contexts[0]:
            with pytest.raises(RoutingError, match="already"), contexts[1]:
                pytest.fail("entered")
            model(input_ids=tokens())
        assert _untouched(model)


def test_two_models_do_not_interfere(model: PreTrainedModel, routers: Routers) -> None:
    other = build("qwen3_moe", seed=9)
    other_routers = bind_routers(other)
    assert other_routers != routers
    plain, other_plain = model(input_ids=tokens()).logits, other(input_ids=tokens()).logits
    with routers.record() as mine, other_routers.record() as theirs:
        model(input_ids=tokens())
        other(input_ids=tokens())
    with routers.replay(_trace(routers), check=False):
        assert torch.equal(other(input_ids=tokens()).logits, other_plain)
        with other_routers.replay(theirs.trace(), check=False):
            assert torch.equal(other(input_ids=tokens()).logits, other_plain)
            assert not torch.equal(model(input_ids=tokens()).logits, plain)
    with routers.replay(mine.trace(), check=False):
        assert torch.equal(model(input_ids=tokens()).logits, plain)


@pytest.mark.parametrize("how", ["record", "replay"])
def test_an_exception_leaves_no_state(model: PreTrainedModel, routers: Routers, how: str) -> None:
    plain = model(input_ids=tokens()).logits
    last = model.model.layers[2]

    def fail(*_: Any) -> None:
        raise KeyError("midway")

    handle = last.register_forward_pre_hook(fail)
    context = routers.record() if how == "record" else routers.replay(_trace(routers), check=False)
    with pytest.raises(KeyError, match="midway"), context:
        model(input_ids=tokens())
    handle.remove()
    assert _untouched(model)
    assert torch.equal(model(input_ids=tokens()).logits, plain)
    with routers.record() as tape:
        model(input_ids=tokens())
    with routers.replay(tape.trace(), check=False):
        assert torch.equal(model(input_ids=tokens()).logits, plain)


def test_a_forward_set_by_someone_else_is_put_back(
    model: PreTrainedModel, routers: Routers
) -> None:
    gate = model.model.layers[0].mlp.gate
    original = gate.forward

    def wrapped(x: Tensor) -> Any:
        return original(x)

    gate.forward = wrapped
    with routers.record() as tape:
        model(input_ids=tokens())
    assert gate.forward is wrapped
    with routers.replay(tape.trace(), check=False):
        model(input_ids=tokens())
    assert gate.forward is wrapped
