"""Recorders of routes, rows without a route, and traces that are refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from onepolicy import bind_routers
from onepolicy.config import UsageError
from support.replay_models import (
    build,
    experts_inputs,
    random_trace,
    tokens,
)
from support.replay_steps import routes_of

# --- the tape -------------------------------------------------------------------------------------


def test_tape_keeps_forwards_in_order(model, routers) -> None:
    batches = [tokens(rows, length, seed=rows) for rows, length in ((1, 5), (4, 1), (2, 3))]
    alone = []
    for batch in batches:
        with routers.record() as tape, torch.no_grad():
            model(input_ids=batch)
        alone.append(tape.trace())
    with routers.record() as tape, torch.no_grad():
        for batch in batches:
            model(input_ids=batch)
    trace = tape.trace()
    assert torch.equal(trace.ids, torch.cat([t.ids for t in alone]))
    assert trace.ids.dtype == torch.uint8


# --- rows without a route -------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "deepseek_v2_groups", "gpt_oss"])
def test_invalid_rows_route_themselves(family: str) -> None:
    """The one sequence without replay keeps its experts and its logits (rounded: the experts'
    matrices have other heights, and a CPU's kernels depend on them)."""
    model, ids = build(family, experts="eager"), tokens()
    routers = bind_routers(model)
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        with routers.record() as tape:
            model(input_ids=ids)
        trace = routes_of(routers)
        trace.valid[7:14] = False  # the second sequence
        trace.ids[7:14] = 255  # filler that must never be read
        with experts_inputs(model) as computed, routers.replay(trace, check=False) as _:
            logits = model(input_ids=ids).logits
    own = tape.trace().ids
    for column, (used, _) in enumerate(computed):
        assert torch.equal(used[7:14], own[7:14, column].long())
        assert torch.equal(used[:7], trace.ids[:7, column].long())
        assert torch.equal(used[14:], trace.ids[14:, column].long())
    torch.testing.assert_close(logits[1], plain[1], atol=1e-5, rtol=1e-4)
    assert (logits[0] - plain[0]).abs().max() > 0.05


# --- refused traces -------------------------------------------------------------------------------


def test_a_trace_of_another_model_is_refused(routers) -> None:
    good = routes_of(routers)
    for wrong, words in (
        (dataclasses.replace(good, layers=(1, 2, 3)), "layers"),
        (random_trace(21, (0, 1), 8, 3), "layers"),
        (dataclasses.replace(good, num_experts=9), "num_experts is 9"),
        (random_trace(21, (0, 1, 2), 8, 2), "2 experts per token"),
    ):
        with pytest.raises(UsageError, match=words), routers.replay(wrong, check=False):
            pytest.fail("entered")


@pytest.mark.parametrize("experts", [8, 300])
def test_bad_ids_name_layer_and_row(experts: int) -> None:
    model = build("qwen3_moe_no_norm", num_experts=experts)
    routers = bind_routers(model)
    assert routers.layers == (0, 2)
    bad = [([1, experts, 2], "outside 0"), ([5, 3, 5], "twice")]
    if experts == 300:  # the upper half of uint16
        bad.append(([1, 40000, 2], "outside 0"))
    for ids, words in bad:
        trace = routes_of(routers)
        trace.ids[4, 1] = torch.tensor(ids).to(trace.ids.dtype)
        named = rf"{words}.*layer 2, row 4: \[{', '.join(map(str, ids))}\]"
        with pytest.raises(UsageError, match=named), routers.replay(trace, check=False):
            pytest.fail("entered")
        trace.valid[4] = False
        with routers.replay(trace, check=False):
            model(input_ids=tokens())
