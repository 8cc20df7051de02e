"""Replay through peft: LoRA on attention, on 3-D expert parameters and on the router; routers and
blocks trained whole (`modules_to_save`); and a frozen router."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from onepolicy import bind_routers
from support.replay_models import build, loss_and_grads, random_trace, tokens

ATTENTION = ["q_proj", "v_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TARGETS = {
    "attention": (ATTENTION, []),
    "experts": ([], EXPERTS),
    "router": ([], ["gate.weight"]),
    "all": (ATTENTION, [*EXPERTS, "gate.weight"]),
}


def _adapted(targets: str):
    """Return the model with adapters that are not at their zero start."""
    modules, parameters = TARGETS[targets]
    torch.manual_seed(0)
    model = build("qwen3_moe", experts="eager")
    peft = get_peft_model(
        model, LoraConfig(r=2, target_modules=modules, target_parameters=parameters)
    )
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return peft


@pytest.mark.parametrize("targets", TARGETS)
def test_replay_through_lora(targets: str) -> None:
    model, ids = _adapted(targets), tokens()
    routers = bind_routers(model)
    assert routers.layers == (0, 1, 2)
    routers.self_test()
    with routers.record() as tape:
        plain, expected = loss_and_grads(model, ids)
    with routers.replay(tape.trace(), check=False):
        logits, grads = loss_and_grads(model, ids)
    assert torch.equal(logits, plain)
    assert grads.keys() == expected.keys()
    assert all(torch.equal(grads[name], expected[name]) for name in grads)
    assert all("lora_" in name for name in grads)
    with routers.replay(
        random_trace(21, routers.layers, routers.num_experts, routers.top_k), check=False
    ):
        other, grads = loss_and_grads(model, ids)
    assert not torch.equal(other, plain)
    assert all(grad.any() for grad in grads.values())
    if targets in ("router", "all"):
        assert sum("gate" in name and "gate_up" not in name for name in grads) == 2 * len(
            routers.layers
        )


def test_lora_on_the_router_changes_the_recorded_routes() -> None:
    model = _adapted("router")
    routers = bind_routers(model)
    with routers.record() as tape:
        model(input_ids=tokens())
    with model.disable_adapter(), routers.record() as base:
        model(input_ids=tokens())
    assert not torch.equal(tape.trace().ids, base.trace().ids)


@pytest.mark.parametrize("saved", ["gate", "mlp"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_routers_that_peft_trains_whole(family: str, saved: str) -> None:
    """The active one of the copies that `modules_to_save` makes is recorded and replayed."""
    torch.manual_seed(0)
    base, ids = build(family, experts="eager"), tokens()
    untouched = bind_routers(base)
    with torch.no_grad(), untouched.record() as tape:
        expected = base(input_ids=ids).logits
    first = tape.trace()
    model = get_peft_model(
        base, LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=[saved])
    )
    routers = bind_routers(model)
    assert (routers.layers, routers.num_experts, routers.top_k) == (
        untouched.layers,
        untouched.num_experts,
        first.top_k,
    )
    routers.self_test()
    for name, parameter in model.named_parameters():
        if (
            name.endswith("modules_to_save.default.weight")
            or "modules_to_save.default.gate.weight" in name
        ):
            parameter.data += torch.randn_like(parameter)
    with routers.record() as tape:
        plain, grads = loss_and_grads(model, ids)
    trained = tape.trace()
    assert trained != first
    with routers.replay(trained):
        logits, replayed = loss_and_grads(model, ids)
    assert torch.equal(logits, plain)
    assert all(torch.equal(replayed[name], grad) for name, grad in grads.items())
    moved = [
        name
        for name in replayed
        if "modules_to_save.default" in name and "gate" in name and "weight" in name
    ]
    assert len([name for name in moved if "gate_up" not in name and "shared" not in name]) >= len(
        routers.layers
    )
    other = random_trace(21, routers.layers, routers.num_experts, routers.top_k)
    with torch.no_grad(), routers.replay(other, check=False):
        assert not torch.equal(model(input_ids=ids).logits, plain)
    with torch.no_grad(), model.disable_adapter():
        with routers.record() as tape:
            assert torch.equal(model(input_ids=ids).logits, expected)
        assert tape.trace() == first
        with routers.replay(first):
            assert torch.equal(model(input_ids=ids).logits, expected)


def test_a_frozen_router_has_no_gradient() -> None:
    model, ids = build("qwen3_moe"), tokens()
    routers = bind_routers(model)
    trace = random_trace(21, routers.layers, routers.num_experts, routers.top_k)
    with routers.replay(trace, check=False):
        plain, expected = loss_and_grads(model, ids)
    gates = [f"{router.path}.weight" for router in routers._routers]
    for router in routers._routers:
        router.module.weight.requires_grad_(False)
    with routers.replay(trace, check=False):
        logits, grads = loss_and_grads(model, ids)
    assert torch.equal(logits, plain)
    assert all(router.module.weight.grad is None for router in routers._routers)
    assert grads.keys() == expected.keys() - set(gates)
    assert all(torch.equal(grads[name], expected[name]) for name in grads)
