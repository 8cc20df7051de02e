"""Replay through peft: LoRA on attention, on 3-D expert parameters and on the router; routers and
blocks trained whole (`modules_to_save`); and a frozen router."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from onepolicy import bind_routers
from support.replay_models import build, loss_and_grads, same_bits, tokens
from support.replay_steps import routes_of

ATTENTION = ["q_proj", "v_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TARGETS = {
    "attention": (ATTENTION, []),
    "experts": ([], EXPERTS),
    "router": ([], ["gate.weight"]),
    "all": (ATTENTION, [*EXPERTS, "gate.weight"]),
}
SAVED = ("modules_to_save.default.weight", "modules_to_save.default.gate.weight")


def _adapted(targets: str):
    """Return the model with adapters that are not at their zero start."""
    modules, parameters = TARGETS[targets]
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=modules, target_parameters=parameters)
    peft = get_peft_model(build("qwen3_moe", experts="eager"), config)
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return peft


@pytest.mark.parametrize(
    "targets",
    [
        pytest.param("attention", marks=pytest.mark.full),
        pytest.param("experts", marks=pytest.mark.full),
        "router",
        "all",
    ],
)
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
    assert same_bits(grads, expected)
    assert all("lora_" in name for name in grads)
    with routers.replay(routes_of(routers), check=False):
        other, grads = loss_and_grads(model, ids)
    assert not torch.equal(other, plain)
    assert all(grad.any() for grad in grads.values())
    of_routers = [name for name in grads if "gate" in name and "gate_up" not in name]
    assert len(of_routers) == 2 * len(routers.layers) * (targets in ("router", "all"))


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
    config = LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=[saved])
    model = get_peft_model(base, config)
    routers = bind_routers(model)
    assert (routers.layers, routers.top_k) == (untouched.layers, first.top_k)
    assert routers.num_experts == untouched.num_experts
    routers.self_test()
    for name, parameter in model.named_parameters():
        if name.endswith(SAVED):
            parameter.data += torch.randn_like(parameter)
    with routers.record() as tape:
        plain, grads = loss_and_grads(model, ids)
    trained = tape.trace()
    assert trained != first
    with routers.replay(trained):
        logits, replayed = loss_and_grads(model, ids)
    assert torch.equal(logits, plain)
    assert all(torch.equal(replayed[name], grad) for name, grad in grads.items())
    assert sum(name.endswith(SAVED) for name in replayed) == len(routers.layers)
    with torch.no_grad(), routers.replay(routes_of(routers), check=False):
        assert not torch.equal(model(input_ids=ids).logits, plain)
    with torch.no_grad(), model.disable_adapter():
        with routers.record() as tape:
            assert torch.equal(model(input_ids=ids).logits, expected)
        assert tape.trace() == first
        with routers.replay(first):
            assert torch.equal(model(input_ids=ids).logits, expected)


def test_a_frozen_router_has_no_gradient(model, routers) -> None:
    ids = tokens()
    trace, gates = routes_of(routers), [layer.mlp.gate.weight for layer in model.model.layers]
    with routers.replay(trace, check=False):
        plain, expected = loss_and_grads(model, ids)
    for gate in gates:
        gate.requires_grad_(False)
    with routers.replay(trace, check=False):
        logits, grads = loss_and_grads(model, ids)
    assert torch.equal(logits, plain)
    assert all(gate.grad is None for gate in gates)
    assert grads.keys() == expected.keys() - {f"model.layers.{i}.mlp.gate.weight" for i in range(3)}
    assert all(torch.equal(grads[name], expected[name]) for name in grads)
