"""The checks that replay() makes by default: routes of other tokens, layers or weights are found at
the first forward of each source."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy import bind_routers
from onepolicy.replay import Routers, RoutingError, source_checks
from onepolicy.types import RoutingTrace
from support.replay_models import build, same_bits, take_grads, tokens

SAMPLES, LENGTH = 4, 24
IDS = tokens(SAMPLES, LENGTH)
ROWS = SAMPLES * LENGTH


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3", "gpt_oss"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return build(request.param)


@pytest.fixture
def routers(model: PreTrainedModel) -> Routers:
    return bind_routers(model)


@pytest.fixture(scope="module")
def own(model: PreTrainedModel) -> RoutingTrace:
    with torch.no_grad(), bind_routers(model).record() as tape:
        model(input_ids=IDS)
    return tape.trace()


def _given(own: RoutingTrace, ids: Tensor) -> RoutingTrace:
    valid = torch.ones(len(ids), dtype=torch.bool)
    return RoutingTrace(ids.to(own.ids.dtype), valid, own.layers, own.num_experts)


def _replay(model: PreTrainedModel, routers: Routers, trace: RoutingTrace, **how: bool) -> None:
    with torch.no_grad(), routers.replay(trace, **how):
        model(input_ids=IDS)


def _with(ids: Tensor, at: Any, new: Tensor) -> Tensor:
    out = ids.clone()
    out[at] = new
    return out


def _swapped(ids: Tensor) -> Tensor:
    samples = list(ids.split(LENGTH))
    samples[0], samples[2] = samples[2], samples[0]
    return torch.cat(samples)


def _foreign(like: Tensor) -> Tensor:
    noise = torch.rand(*like.shape[:2], 8, generator=torch.Generator().manual_seed(3))
    return noise.argsort(-1)[..., : like.shape[2]].to(like.dtype)


def _some_foreign(ids: Tensor, start: int, stop: int) -> Tensor:
    return _with(ids, slice(start, stop), _foreign(ids)[start:stop])


COLUMN = (slice(None), 1)
WRONG = {
    "one row late": (lambda ids: ids.roll(1, 0), "one row late"),
    "one row early": (lambda ids: ids.roll(-1, 0), "one row early"),
    "layers permuted": (lambda ids: ids.flip(1), "layer"),
    "one layer overwritten": (lambda ids: _with(ids, COLUMN, ids[:, 0]), "layer"),
    "one layer foreign": (lambda ids: _with(ids, COLUMN, _foreign(ids)[:, 1]), "layer"),
    "all foreign": (_foreign, "every layer is wrong"),
    "samples swapped": (_swapped, "rows|layer"),
    "a stale half": (lambda ids: _with(ids, slice(ROWS // 2), ids[ROWS // 2 :]), "rows|layer"),
    "a shifted history": (lambda ids: _with(ids, slice(24, 48), ids[23:47]), "rows 2|rows 3"),
    "twelve foreign rows": (lambda ids: _some_foreign(ids, 42, 54), "rows 40 to 55"),
    "twelve at the end": (lambda ids: _some_foreign(ids, 84, 96), "rows 80 to 95"),
}


def test_wrong_routes_are_refused_unasked(model, own, subtests) -> None:
    for kind, (change, words) in WRONG.items():
        with subtests.test(kind):
            routers, wrong = bind_routers(model), _given(own, change(own.ids))
            words = f"not those of this forward.*({words}).*check=False"
            for _ in range(2):  # a source that failed is looked at again
                with pytest.raises(RoutingError, match=words):
                    _replay(model, routers, wrong)
            _replay(model, routers, wrong, check=False)


def test_every_source_is_checked_at_its_first_forward(model, routers, own) -> None:
    """The sources are recorded routes, an engine's by layer axis, hand-made and combined ones. No
    source counts for another."""
    wrong = own.ids.roll(1, 0)
    _replay(model, routers, own)
    sources = {
        "engine": lambda ids: routers.trace_from(ids),
        "given": lambda ids: _given(own, ids),
        "reordered": lambda ids: routers.trace_from(ids.flip(0)).at(torch.arange(ROWS - 1, -1, -1)),
        "joined": lambda ids: RoutingTrace.concat([own.rows(0, 24), _given(own, ids[24:])]),
    }
    for make in sources.values():
        with pytest.raises(RoutingError, match="not those of this forward"):
            _replay(model, routers, make(wrong))
        _replay(model, routers, make(own.ids))
        _replay(model, routers, make(own.ids))
    assert len({make(own.ids).origin.source for make in sources.values()}) == len(sources)


def test_a_source_that_passed_is_checked_again_later(model, routers, own, monkeypatch) -> None:
    monkeypatch.setattr(source_checks, "CHECK_EVERY", 5)
    wrong = _given(own, own.ids.roll(1, 0))
    _replay(model, routers, _given(own, own.ids))
    for _ in range(4):
        _replay(model, routers, wrong)
    for _ in range(2):
        with pytest.raises(RoutingError, match="one row late"):
            _replay(model, routers, wrong)


def test_short_traces_count_for_no_check(model, routers, own) -> None:
    with torch.no_grad(), routers.replay(_given(own, own.ids[:5])):
        model(input_ids=IDS[:1, :5])
    with pytest.raises(RoutingError, match="one row late"):
        _replay(model, routers, _given(own, own.ids.roll(1, 0)))


def test_a_trace_without_a_valid_row_is_refused(model, routers, own) -> None:
    nothing = dataclasses.replace(own, valid=torch.zeros(ROWS, dtype=torch.bool))
    with pytest.raises(RoutingError, match=r"none of the trace's 96 rows is valid.*check=False"):
        _replay(model, routers, nothing)
    _replay(model, routers, nothing, check=False)
    _replay(model, routers, _given(own, own.ids))
    _replay(model, routers, nothing)  # of a source that has routes: a sample without


def test_rows_that_are_not_valid_are_not_compared(model, routers, own) -> None:
    trace = _given(own, _with(own.ids, slice(30, 60), own.ids[0]))
    trace.valid[30:60] = False
    _replay(model, routers, trace)


def test_the_check_keeps_nothing_for_the_caller(model, routers, own) -> None:
    with torch.no_grad(), routers.replay(own) as replayed:
        model(input_ids=IDS)
    for ask in (replayed.native, replayed.gate_mass, replayed.check_alignment):
        with pytest.raises(RoutingError, match="native=True"):
            ask()


def test_an_error_of_the_callers_own_is_not_hidden(model, routers, own) -> None:
    def run() -> None:
        with routers.replay(_given(own, own.ids.roll(1, 0))):
            model(input_ids=IDS)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run()


def test_gradients_are_those_of_an_unchecked_replay(model, routers, own) -> None:
    found = []
    for check in (True, False):
        with routers.replay(own, check=check):
            loss = model(input_ids=IDS).logits.log_softmax(-1)[..., 5].sum()
        loss.backward()
        found.append(take_grads(model))
    assert found[0]
    assert same_bits(*found)


def test_a_lower_bound_may_be_given(model, routers, own) -> None:
    ids = _some_foreign(own.ids, 0, 24)
    with torch.no_grad(), routers.replay(_given(own, ids), native=True, check=False) as replayed:
        model(input_ids=IDS)
    with pytest.raises(RoutingError, match="expected at least 80%"):
        replayed.check_alignment()
    replayed.check_alignment(least=0.05)


def test_traces_are_equal_by_content(own: RoutingTrace) -> None:
    other = own.at(torch.arange(ROWS))
    assert own == own.to("cpu") == other
    assert hash(own) == hash(other)
    assert own != dataclasses.replace(own, ids=own.ids.roll(1, 0))
    assert own != dataclasses.replace(own, valid=torch.zeros_like(own.valid))
    assert own != own.rows(0, 5)
    assert own != "trace"
    wide = RoutingTrace(own.ids.to(torch.uint16), own.valid, own.layers, 300)
    assert wide == dataclasses.replace(wide) != own
