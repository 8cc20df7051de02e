"""What record and replay refuse, and that they leave nothing behind."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from replay_models import FAMILIES, build, experts_inputs, loss_and_grads, random_trace, tokens
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from onepolicy import bind_routers
from onepolicy.config import UsageError
from onepolicy.replay import Routers, RoutingError, is_moe, preflight
from onepolicy.replay.layers import decoder_index
from onepolicy.types import RoutingTrace

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


@pytest.fixture
def routers(model: PreTrainedModel) -> Routers:
    return bind_routers(model)


def _trace(routers: Routers, rows: int = 21) -> RoutingTrace:
    return random_trace(rows, routers.layers, routers.num_experts, routers.top_k)


def _untouched(model: nn.Module) -> bool:
    return not any("forward" in module.__dict__ for module in model.modules())


# --- the tape ---------------------------------------------------------------------------------------------------------


def test_tape_keeps_forwards_in_order(model: PreTrainedModel, routers: Routers) -> None:
    batches = [tokens(rows, length, seed=rows) for rows, length in ((1, 5), (4, 1), (2, 3))]
    alone = []
    for batch in batches:
        with routers.record() as tape, torch.no_grad():
            model(input_ids=batch)
        alone.append(tape.trace())
    with routers.record() as tape, torch.no_grad():
        for batch in batches:
            model(input_ids=batch)
        last = tape.ids()
    trace = tape.trace()
    assert torch.equal(trace.ids, torch.cat([t.ids for t in alone]))
    assert trace.ids.dtype == torch.uint8
    assert torch.equal(torch.stack(last, 1), alone[-1].ids.long())
    assert [ids.dtype for ids in last] == [torch.int64] * 3


@pytest.mark.parametrize("family", FAMILIES)
def test_take_reads_one_forward_and_forgets_it(family: str) -> None:
    """The second forward on, the ids are read from the router's output: the experts must have got the same."""
    model = build(family).eval()
    routers = bind_routers(model)
    with torch.inference_mode(), routers.record() as tape, experts_inputs(model) as computed:
        for step in range(3):
            computed.clear()
            model(input_ids=tokens(4, 1, seed=step), use_cache=False)
            for ids, (used, _) in zip(tape.take(), computed, strict=True):
                assert torch.equal(ids, used)
        with pytest.raises(RoutingError, match="fired 0 times"):
            tape.take()


def test_tape_without_a_forward_has_nothing_to_give(routers: Routers) -> None:
    with routers.record() as tape:
        pass
    with pytest.raises(RoutingError, match="no forward"):
        tape.trace()


def test_many_experts_are_stored_wide() -> None:
    model = build("qwen3_moe", num_experts=300)
    routers = bind_routers(model)
    with routers.record() as tape:
        plain = model(input_ids=tokens()).logits
    trace = tape.trace()
    assert trace.ids.dtype == torch.uint16
    with routers.replay(trace, native=True) as replayed:
        assert torch.equal(model(input_ids=tokens()).logits, plain)
    assert torch.equal(replayed.native().ids.to(torch.int64), trace.ids.to(torch.int64))


# --- rows without a route ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "deepseek_v2_groups", "gpt_oss"])
def test_invalid_rows_route_themselves(family: str) -> None:
    """No row's sums depend on another sequence, so the one sequence that is not replayed keeps its bits."""
    model, ids = build(family, experts="eager"), tokens()
    routers = bind_routers(model)
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        with routers.record() as tape:
            model(input_ids=ids)
        trace = _trace(routers)
        trace.valid[7:14] = False  # the second sequence
        trace.ids[7:14] = 255  # filler that must never be read
        with experts_inputs(model) as computed, routers.replay(trace) as _:
            logits = model(input_ids=ids).logits
    own = tape.trace().ids
    for column, (used, _) in enumerate(computed):
        assert torch.equal(used[7:14], own[7:14, column].long())
        assert torch.equal(used[:7], trace.ids[:7, column].long())
        assert torch.equal(used[14:], trace.ids[14:, column].long())
    assert torch.equal(logits[1], plain[1])
    assert not torch.equal(logits[0], plain[0])


def test_all_rows_invalid_is_the_unhooked_model(model: PreTrainedModel, routers: Routers) -> None:
    plain, plain_grads = loss_and_grads(model, tokens())
    trace = _trace(routers)
    with routers.replay(dataclasses.replace(trace, valid=torch.zeros(21, dtype=torch.bool))):
        logits, grads = loss_and_grads(model, tokens())
    assert torch.equal(logits, plain)
    assert all(torch.equal(grads[name], grad) for name, grad in plain_grads.items())


# --- refused traces ---------------------------------------------------------------------------------------------------


def test_a_trace_of_another_model_is_refused(routers: Routers) -> None:
    good = _trace(routers)
    for wrong, words in (
        (dataclasses.replace(good, layers=(1, 2, 3)), "layers"),
        (random_trace(21, (0, 1), 8, 3), "layers"),
        (dataclasses.replace(good, num_experts=9), "num_experts is 9"),
        (random_trace(21, (0, 1, 2), 8, 2), "2 experts per token"),
        (good.to("meta"), "meta"),
    ):
        with pytest.raises(UsageError, match=words), routers.replay(wrong):
            pytest.fail("entered")


@pytest.mark.parametrize("experts", [8, 300])
def test_bad_ids_name_layer_and_row(experts: int) -> None:
    routers = bind_routers(build("qwen3_moe_no_norm", num_experts=experts))
    assert routers.layers == (0, 2)
    for bad, words in (([1, experts, 2], "outside 0"), ([5, 3, 5], "twice")):
        trace = _trace(routers)
        trace.ids[4, 1] = torch.tensor(bad).to(trace.ids.dtype)
        with pytest.raises(UsageError, match=rf"{words}.*layer 2, row 4: \[{bad[0]}, {bad[1]}, {bad[2]}\]"):
            routers.replay(trace).__enter__()
        trace.valid[4] = False
        with routers.replay(trace):
            routers._model(input_ids=tokens())


def test_the_upper_half_of_uint16_is_out_of_range() -> None:
    routers = bind_routers(build("qwen3_moe", num_experts=300))
    trace = _trace(routers)
    trace.ids[0, 0] = torch.tensor([1, 40000, 2]).to(torch.uint16)
    with pytest.raises(UsageError, match="40000"):
        routers.replay(trace).__enter__()


# --- every router fires once on the trace's rows ----------------------------------------------------------------------


def test_row_count_must_match(model: PreTrainedModel, routers: Routers) -> None:
    for rows, native in itertools.product((20, 22), (False, True)):
        with (
            pytest.raises(RoutingError, match=f"layer 0 routes 21 tokens, but the trace has {rows} rows"),
            routers.replay(_trace(routers, rows), native=native),
        ):
            model(input_ids=tokens())
        assert _untouched(model)


def test_one_forward_per_replay(model: PreTrainedModel, routers: Routers) -> None:
    with routers.replay(_trace(routers)):
        model(input_ids=tokens())
        with pytest.raises(RoutingError, match="layer 0 fired twice"):
            model(input_ids=tokens())


def test_a_replay_without_a_forward_raises(routers: Routers) -> None:
    with pytest.raises(RoutingError, match=r"layer 0.*did not fire"), routers.replay(_trace(routers)):
        pass


class FusedGate(nn.Module):
    """Routes with its own arithmetic, as a fused kernel would."""

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


def test_a_gate_fused_after_binding_raises_at_the_first_forward(model: PreTrainedModel, routers: Routers) -> None:
    block = model.model.layers[1].mlp
    block.gate = FusedGate(block.gate)
    with pytest.raises(RoutingError, match=r"layer 1.*did not fire"), routers.replay(_trace(routers)):
        model(input_ids=tokens())
    with pytest.raises(RoutingError, match=r"layer 1.*fired 0 times"), routers.record():
        model(input_ids=tokens())
    with routers.record() as tape:
        model(input_ids=tokens())
        with pytest.raises(RoutingError, match="layer 1 fired 0 times"):
            tape.take()
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
    with pytest.raises(RoutingError, match=rf"layer 2.*ran {selections} top-3"), routers.replay(_trace(routers)):
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


def test_self_test_catches_a_router_that_ignores_what_it_selected(
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


# --- nothing left behind ----------------------------------------------------------------------------------------------


def test_nested_use_of_one_model_raises(model: PreTrainedModel, routers: Routers) -> None:
    again = bind_routers(model)
    assert again == routers
    for outer, inner in itertools.product(("record", "replay"), repeat=2):
        opened = [getattr(r, how) for r, how in ((routers, outer), (again, inner))]
        contexts = [
            f() if how == "record" else f(_trace(routers)) for f, how in zip(opened, (outer, inner), strict=True)
        ]
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
    with routers.replay(_trace(routers)):
        assert torch.equal(other(input_ids=tokens()).logits, other_plain)
        with other_routers.replay(theirs.trace()):
            assert torch.equal(other(input_ids=tokens()).logits, other_plain)
            assert not torch.equal(model(input_ids=tokens()).logits, plain)
    with routers.replay(mine.trace()):
        assert torch.equal(model(input_ids=tokens()).logits, plain)


@pytest.mark.parametrize("how", ["record", "replay"])
def test_an_exception_leaves_no_state(model: PreTrainedModel, routers: Routers, how: str) -> None:
    plain = model(input_ids=tokens()).logits
    last = model.model.layers[2]

    def fail(*_: Any) -> None:
        raise KeyError("midway")

    handle = last.register_forward_pre_hook(fail)
    context = routers.record() if how == "record" else routers.replay(_trace(routers))
    with pytest.raises(KeyError, match="midway"), context:
        model(input_ids=tokens())
    handle.remove()
    assert _untouched(model)
    assert torch.equal(model(input_ids=tokens()).logits, plain)
    with routers.record() as tape:
        model(input_ids=tokens())
    with routers.replay(tape.trace()):
        assert torch.equal(model(input_ids=tokens()).logits, plain)


def test_a_forward_set_by_someone_else_is_put_back(model: PreTrainedModel, routers: Routers) -> None:
    gate = model.model.layers[0].mlp.gate
    original = gate.forward

    def wrapped(x: Tensor) -> Any:
        return original(x)

    gate.forward = wrapped
    with routers.record() as tape:
        model(input_ids=tokens())
    assert gate.forward is wrapped
    with routers.replay(tape.trace()):
        model(input_ids=tokens())
    assert gate.forward is wrapped


# --- dense models and layer numbers -----------------------------------------------------------------------------------


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
