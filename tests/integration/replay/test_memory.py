"""Routes stay as narrow as they are stored; one layer at a time is widened to the int64 that
torch.gather needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onepolicy import bind_routers
from support.replay_models import build, loss_and_grads, tokens
from support.replay_steps import routes_of


class LargestInt64(TorchDispatchMode):
    """A mode that records the elements of the largest int64 tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.dtype == torch.int64:
                self.elements = max(self.elements, leaf.numel())
        return out


def test_one_layer_is_widened_at_a_time(subtests) -> None:
    for experts, width in ((8, 1), (300, 2)):
        model = build("qwen3_moe", num_experts=experts)
        routers = bind_routers(model)
        trace = routes_of(routers)
        stored = trace.ids.untyped_storage().nbytes()
        assert stored == 21 * len(routers.layers) * routers.top_k * width
        for how in ({}, {"native": True}, {"soft": 0.8}):
            with subtests.test(experts=experts, how=how):
                with LargestInt64() as largest, routers.replay(trace, **how, check=False) as replay:
                    loss_and_grads(model, tokens())
                assert largest.elements == 21 * routers.top_k
                routes = [replayer._route for replayer in replay._replayers]
                # What is kept for a recompute: views of one copy of the trace, or as narrow as it.
                assert {route.dtype for route in routes} == {trace.ids.dtype}
                if "soft" not in how:
                    assert len({route.untyped_storage().data_ptr() for route in routes}) == 1
                    assert routes[0].untyped_storage().nbytes() == stored
