"""Mistakes of a user's own trainer: wrapped models, no traces, bounds of another batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from onepolicy import bind_routers
from onepolicy.config import UsageError
from onepolicy.replay import Routers, RoutingError
from onepolicy.types import RoutingTrace
from support.replay_models import build, tokens

IDS = tokens()


@pytest.fixture
def model() -> PreTrainedModel:
    return build("qwen3_moe")


@pytest.fixture
def routers(model: PreTrainedModel) -> Routers:
    return bind_routers(model)


def _own_trace(model: nn.Module, routers: Routers) -> RoutingTrace:
    with torch.no_grad(), routers.record() as tape:
        model(input_ids=IDS)
    return tape.trace()


class Policy(nn.Module):
    """A module of the user's, without a config."""

    def __init__(self, **models: nn.Module) -> None:
        super().__init__()
        for name, model in models.items():
            setattr(self, name, model)

    def forward(self, **kwargs: Any) -> Any:
        return self.lm(**kwargs)


@pytest.mark.parametrize("wrap", ["own", "DataParallel", "DDP", "fully_shard"])
def test_a_wrapped_model_is_the_model(model: PreTrainedModel, wrap: str, tmp_path: Path) -> None:
    plain, engine = model(input_ids=IDS).logits, torch.arange(3 * 3 * 3).view(3, 3, 3) % 8
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        if wrap == "fully_shard":
            wrapped: nn.Module = fully_shard(Policy(lm=model))
        else:
            wrapped = {
                "own": lambda m: Policy(lm=m),
                "DataParallel": nn.DataParallel,
                "DDP": DistributedDataParallel,
            }[wrap](model)
        routers = bind_routers(wrapped)  # type: ignore[arg-type]
        if wrap != "fully_shard":  # where the inner model alone is sharded by a stranger
            assert routers == bind_routers(model)
        with routers.replay(_own_trace(wrapped, routers)):
            logits = wrapped(input_ids=IDS).logits
        assert torch.equal(logits, plain)
        assert routers.trace_from(engine).layers == (0, 1, 2)
    finally:
        dist.destroy_process_group()


def test_a_replaced_block_is_found_through_a_wrapper(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp = nn.Identity()
    with pytest.raises(RoutingError, match=r"missing: \[1\]"):
        bind_routers(Policy(lm=model))  # type: ignore[arg-type]


def test_anything_but_a_single_model_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(UsageError, match="several models, lm, reference"):
        bind_routers(Policy(lm=model, reference=build("qwen3_moe")))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="got str"):
        bind_routers("org/model")  # type: ignore[arg-type]


def test_anything_but_a_trace_is_refused(model: PreTrainedModel, routers: Routers) -> None:
    with routers.record() as tape:
        model(input_ids=IDS)
    for wrong in (tape, tape.trace().ids):
        with pytest.raises(UsageError, match="expected a RoutingTrace, got"), routers.replay(wrong):
            pytest.fail("entered")


def test_a_load_balancing_loss_is_refused(model: PreTrainedModel, routers: Routers) -> None:
    trace = _own_trace(model, routers)
    model.config.output_router_logits = True
    with pytest.raises(UsageError, match="output_router_logits=True"), routers.replay(trace):
        pytest.fail("entered")


@pytest.mark.parametrize(
    ("ids", "valid", "words"),
    [
        ([[[0]]], None, "routes are list"),
        (torch.ones(2, 3, 3, dtype=torch.bool), None, "dtype torch.bool"),
        (torch.arange(18).view(2, 3, 3) % 3, torch.ones(2), "dtype torch.float32, expected bool"),
        (torch.arange(18).view(2, 3, 3) % 3, torch.ones(2, 1, dtype=torch.bool), r"shape \(2, 1\)"),
    ],
)
def test_engine_routes_of_another_kind_are_refused(
    routers: Routers, ids: Any, valid: Any, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        routers.trace_from(ids, valid=valid)


@pytest.mark.parametrize(
    "bounds",
    [
        [0, 7, 14, 21],
        [7, 7, 7],
        [7, 14, 21],
        [0, 7, 14],
        [0, 7, 30],
        [0, 14, 7, 21],
        [[0, 21]],
        [],
        [0.0, 21],
    ],
)
def test_bounds_of_another_batch_are_refused(
    model: PreTrainedModel, routers: Routers, bounds: list
) -> None:
    with routers.replay(_own_trace(model, routers), native=True) as replayed:
        model(input_ids=IDS)
    if bounds == [0, 7, 14, 21]:
        replayed.check_alignment(torch.tensor(bounds))
        with pytest.raises(UsageError, match="integer tensor"):
            replayed.check_alignment(bounds)  # type: ignore[arg-type]
    else:
        with pytest.raises(UsageError, match="from 0 to 21"):
            replayed.check_alignment(torch.tensor(bounds))
