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

from onepolicy import bind_routers
from onepolicy.config import UsageError
from onepolicy.replay import Routers, RoutingError
from onepolicy.types import RoutingTrace
from support.replay_models import build, tokens

IDS = tokens()


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


def test_a_wrapped_model_is_the_model(tmp_path: Path, subtests) -> None:
    engine, meeting = torch.arange(27).view(3, 3, 3) % 8, f"file://{tmp_path}/rendezvous"
    wraps = {
        "own": lambda model: Policy(lm=model),
        "DataParallel": nn.DataParallel,
        "DDP": DistributedDataParallel,
        "fully_shard": lambda model: fully_shard(Policy(lm=model)),
    }
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        for name, wrap in wraps.items():
            with subtests.test(name):
                model = build("qwen3_moe")
                plain, wrapped = model(input_ids=IDS).logits, wrap(model)
                routers = bind_routers(wrapped)
                if name != "fully_shard":  # where the inner model alone is sharded by a stranger
                    assert routers == bind_routers(model)
                with routers.replay(_own_trace(wrapped, routers)):
                    logits = wrapped(input_ids=IDS).logits
                assert torch.equal(logits, plain)
                assert routers.trace_from(engine).layers == (0, 1, 2)
    finally:
        dist.destroy_process_group()


def test_a_replaced_block_is_found_through_a_wrapper(model) -> None:
    model.model.layers[1].mlp = nn.Identity()
    with pytest.raises(RoutingError, match=r"missing: \[1\]"):
        bind_routers(Policy(lm=model))


def test_anything_but_a_single_model_is_refused(model) -> None:
    with pytest.raises(UsageError, match="several models, lm, reference"):
        bind_routers(Policy(lm=model, reference=build("qwen3_moe")))
    with pytest.raises(UsageError, match="got str"):
        bind_routers("org/model")


def test_anything_but_a_trace_is_refused(model, routers) -> None:
    with routers.record() as tape:
        model(input_ids=IDS)
    for wrong in (tape, tape.trace().ids):
        with pytest.raises(UsageError, match="expected a RoutingTrace, got"), routers.replay(wrong):
            pytest.fail("entered")


def test_a_load_balancing_loss_is_refused(model, routers) -> None:
    trace = _own_trace(model, routers)
    model.config.output_router_logits = True
    with pytest.raises(UsageError, match="output_router_logits=True"), routers.replay(trace):
        pytest.fail("entered")


def test_bounds_of_another_batch_are_refused(model, routers, subtests) -> None:
    with routers.replay(_own_trace(model, routers), native=True) as replayed:
        model(input_ids=IDS)
    replayed.check_alignment(torch.tensor([0, 7, 14, 21]))
    with pytest.raises(UsageError, match="integer tensor"):
        replayed.check_alignment([0, 7, 14, 21])
    two_dimensional, floating = [[0, 21]], [0.0, 21]
    for bounds in (
        [7, 7, 7],
        [0, 7, 14],
        [0, 7, 30],
        [0, 14, 7, 21],
        two_dimensional,
        [],
        floating,
    ):
        with subtests.test(bounds=bounds), pytest.raises(UsageError, match="from 0 to 21"):
            replayed.check_alignment(torch.tensor(bounds))
