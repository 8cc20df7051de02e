"""Routes stay as narrow as they are stored; one layer at a time is widened to the int64 that
torch.gather needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onepolicy import bind_routers
from support.replay_models import build, loss_and_grads, random_trace, tokens


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


@pytest.mark.parametrize(("experts", "width"), [(8, 1), (300, 2)])
@pytest.mark.parametrize(
    "how", [{}, {"native": True}, {"soft": 0.8}], ids=["plain", "native", "soft"]
)
def test_one_layer_is_widened_at_a_time(experts: int, width: int, how: dict[str, Any]) -> None:
    model = build("qwen3_moe", num_experts=experts)
    routers = bind_routers(model)
    rows, layers, top_k = 21, len(routers.layers), routers.top_k
    trace = random_trace(rows, routers.layers, routers.num_experts, top_k)
    assert trace.ids.untyped_storage().nbytes() == rows * layers * top_k * width
    with LargestInt64() as largest, routers.replay(trace, **how, check=False) as replayed:
        loss_and_grads(model, tokens())
    assert largest.elements == rows * top_k
    kept = {replayer._route.untyped_storage().data_ptr() for replayer in replayed._replayers}
    assert "soft" in how or len(kept) == 1  # one copy of the trace
    for (
        replayer
    ) in replayed._replayers:  # what is kept for a recompute: views of that copy, or as narrow
        assert replayer._route.dtype == trace.ids.dtype
        if "soft" not in how:
            assert (
                replayer._route.untyped_storage().nbytes() == trace.ids.untyped_storage().nbytes()
            )
