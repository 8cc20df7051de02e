"""A model's parameters may be on another device than its computation: routes move to the device of
the routers' scores."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor

from onepolicy import bind_routers
from onepolicy.config import UsageError
from onepolicy.replay.contexts import RouteRecorder
from onepolicy.replay.layers import Router
from onepolicy.replay.topk_hook import TopkReplayer
from support.replay_models import build, tokens
from support.replay_steps import routes_of


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2_groups"])
def test_offloaded_parameters(family: str) -> None:
    model, ids = build(family).eval(), tokens()
    expected = model(input_ids=ids).logits
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert next(model.parameters()).is_meta
    routers = bind_routers(model)
    with torch.no_grad(), routers.record() as tape:
        assert torch.equal(model(input_ids=ids).logits, expected)
    with torch.no_grad(), routers.replay(tape.trace(), native=True) as replayed:
        assert torch.equal(model(input_ids=ids).logits, expected)
    replayed.check_alignment()
    assert replayed.gate_mass().shape == (21, len(routers.layers))
    with torch.no_grad(), routers.replay(routes_of(routers), check=False):
        assert not torch.equal(model(input_ids=ids).logits, expected)
    routers.self_test()


def test_a_trace_without_data_is_refused(routers) -> None:
    trace = routes_of(routers)
    split = dataclasses.replace(trace, valid=trace.valid.to("meta"))
    for wrong, words in (
        (trace.to("meta"), "on meta, which holds no routes"),
        (split, "ids on cpu, valid on meta"),
    ):
        with pytest.raises(UsageError, match=words), routers.replay(wrong):
            pytest.fail("entered")


class Elsewhere(torch.nn.Module):
    """A router that computes on another device than its trace is on (meta: the only one besides a
    CPU)."""

    top_k, num_experts = 2, 4

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return torch.topk(hidden.to("meta"), self.top_k, dim=-1)


def test_routes_follow_the_scores() -> None:
    """Ids, validity and weights move, as with layers over several devices, of which a trace knows
    one."""
    router = Router("layers.0.gate", 0, Elsewhere(), 4, 2, 0, 0)
    route, valid = torch.tensor([[0, 1]] * 3, dtype=torch.uint8), torch.tensor([True, False, True])
    replayer = TopkReplayer(router, route, valid, native=True, mass=True, weights=torch.rand(3, 2))
    values, ids = replayer(torch.rand(3, 4))
    found = [values, ids, replayer.native, replayer.gate_mass]
    assert {each.device.type for each in found} == {"meta"}


def test_recorded_routes_of_layers_on_several_devices_come_to_the_first_one() -> None:
    routers = [Router(f"layers.{i}.gate", i, Elsewhere(), 4, 2, 0, 0) for i in (0, 1)]
    tape = RouteRecorder(routers, weights=True)
    for recorder, device in zip(tape.recorders, ("meta", "cpu"), strict=True):
        recorder.seen.append(torch.zeros(3, 2, dtype=torch.int64, device=device))
        recorder.weights.append(torch.zeros(3, 2, device=device))
    trace = tape.trace()
    assert trace.ids.shape == trace.weights.shape == (3, 2, 2)
    assert {trace.ids.device.type, trace.weights.device.type} == {"meta"}
