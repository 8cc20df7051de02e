"""The checks that replay() makes by default: routes of other tokens, layers or weights are found in
the forward in which they appear."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy import bind_routers
from onepolicy.config import UsageError
from onepolicy.replay import Routers, RoutingError
from onepolicy.replay.padding import pad_routes
from onepolicy.types import RoutingTrace
from support.replay_models import build, same_bits, take_grads, tokens

SAMPLES, LENGTH = 4, 24
IDS = tokens(SAMPLES, LENGTH)
ROWS = SAMPLES * LENGTH


@pytest.fixture(
    scope="module",
    params=["qwen3_moe", "deepseek_v3", pytest.param("gpt_oss", marks=pytest.mark.full)],
)
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


def _samples(own: RoutingTrace, ids: Tensor) -> RoutingTrace:
    """Return a trace that knows where its samples begin."""
    return RoutingTrace.concat([_given(own, part) for part in ids.split(LENGTH)])


def _replay(model: PreTrainedModel, routers: Routers, trace: RoutingTrace, **how: Any) -> None:
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
    "twelve foreign rows": (lambda ids: _some_foreign(ids, 42, 54), "rows 42 to 5[3-5]"),
    "twelve at the end": (lambda ids: _some_foreign(ids, 84, 96), "rows 8[345] to 95"),
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


def test_a_resumed_sample_in_mid_run_is_named(model, routers, own) -> None:
    """Of its 24 rows the first 10 come twice, and the last 10 are cut off (verl#6029)."""
    samples = list(own.ids.split(LENGTH))
    samples[2] = torch.cat([samples[2][:10], samples[2]])[:LENGTH]
    wrong = _samples(own, torch.cat(samples))
    for _ in range(3):
        _replay(model, routers, own)
    words = r"sample 2 of the batch, rows \d+ to \d+, agree.* repeat from row 10 .*resumed"
    for _ in range(3):
        with pytest.raises(RoutingError, match=words):
            _replay(model, routers, wrong)
    _replay(model, routers, wrong, check=False)


def test_where_samples_begin_is_known_by_recorded_joined_and_padded_traces(model, own) -> None:
    starts = tuple(range(0, ROWS, LENGTH))
    parts = [own.rows(start, start + LENGTH) for start in starts]
    assert own.origin.starts == RoutingTrace.concat(parts).origin.starts == starts
    assert own.rows(30, 80).origin.starts == (0, 18, 42)
    assert own.at(torch.arange(ROWS)).origin.starts == (0,)
    mask = torch.ones(2, LENGTH + 3)
    mask[0, :3] = mask[1, LENGTH:] = 0
    padded = pad_routes(parts[:2], mask)
    assert padded.origin.starts == padded.to("cpu").origin.starts == (0, LENGTH + 3)


@pytest.mark.parametrize("late", [False, True])
def test_a_wrong_sample_is_dropped_and_the_others_replayed(model, routers, own, late) -> None:
    """To the bit what a replay gives in which this sample has no routes."""
    other = _some_foreign(own.ids, LENGTH, 2 * LENGTH)
    if late:
        other = _with(other, slice(LENGTH, LENGTH + 8), own.ids[LENGTH : LENGTH + 8])
    expected = _samples(own, own.ids)
    expected.valid[LENGTH : 2 * LENGTH] = False
    found = []
    for trace, how in ((_samples(own, other), {"on_mismatch": "drop"}), (expected, {})):
        with routers.replay(trace, **how) as replayed:
            loss = model(input_ids=IDS).logits.log_softmax(-1)[..., 5].sum()
        loss.backward()
        found.append(take_grads(model))
        assert torch.equal(replayed.trace.valid, expected.valid)
    assert same_bits(*found)
    with torch.no_grad(), routers.replay(_samples(own, other), on_mismatch="drop") as replayed:
        model(input_ids=IDS)
    assert replayed.dropped == (1,)
    with torch.no_grad(), routers.replay(own, on_mismatch="drop") as replayed:
        model(input_ids=IDS)
    assert replayed.dropped == ()


def test_what_the_first_layer_cannot_tell_stops_although_samples_are_dropped(
    model, routers, own
) -> None:
    wrong = _samples(own, _with(own.ids, COLUMN, _foreign(own.ids)[:, 1]))
    with pytest.raises(RoutingError, match="layer"):
        _replay(model, routers, wrong, on_mismatch="drop")
    with pytest.raises(UsageError, match="on_mismatch is 'skip', expected"):
        _replay(model, routers, own, on_mismatch="skip")


def test_a_layer_that_was_not_captured(model, routers, own) -> None:
    wrong = _samples(own, _with(own.ids, COLUMN, own.ids[0, 1]))
    words = r"layer \d has the same experts .* did not capture.*check=False"
    with pytest.raises(RoutingError, match=words):
        _replay(model, routers, wrong)
    _replay(model, routers, wrong, check=False)


def test_with_their_own_choice_kept_all_windows_are_tested(model, routers, own) -> None:
    """TRL and verl log the agreement, and its limit must act there."""
    _replay(model, routers, own, native=True)
    with pytest.raises(RoutingError, match="agree in"):
        _replay(model, routers, _given(own, own.ids.roll(1, 0)), native=True)


def test_a_trace_without_a_valid_row_is_refused(model, routers, own) -> None:
    nothing = dataclasses.replace(own, valid=torch.zeros(ROWS, dtype=torch.bool))
    with pytest.raises(RoutingError, match=r"none of the trace's 96 rows is valid.*check=False"):
        _replay(model, routers, nothing)
    _replay(model, routers, nothing, check=False)
    _replay(model, routers, _given(own, own.ids))
    _replay(model, routers, nothing)  # once routes were replayed, samples may be without


def test_rows_that_are_not_valid_are_not_compared(model, routers, own) -> None:
    for filler in (own.ids[0], torch.full_like(own.ids[0], 255)):  # no expert has this number
        trace = _given(own, _with(own.ids, slice(30, 60), filler))
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
    before, found = torch.get_rng_state(), []
    ways = routers.replay(own), routers.replay(own, check=False), routers.replay_known(own)
    for way in ways:
        with way:
            loss = model(input_ids=IDS).logits.log_softmax(-1)[..., 5].sum()
        loss.backward()
        found.append(take_grads(model) | {"loss": loss.detach()})
    assert all(same_bits(found[0], other) for other in found[1:])
    assert torch.equal(torch.get_rng_state(), before)  # it draws no number


def test_a_known_trace_has_a_row_for_every_token(model, routers, own) -> None:
    wrong = _given(own, own.ids.roll(1, 0))
    with torch.no_grad(), routers.replay_known(wrong, native=True) as replayed:
        model(input_ids=IDS)
    assert torch.equal(replayed.native().ids[:, 0], own.ids[:, 0])  # later layers see other sums
    short = routers.replay_known(own.at(slice(0, ROWS - 1)), native=True)
    with pytest.raises(RoutingError, match="has 95 rows"), short:
        model(input_ids=IDS)
    with pytest.raises(RoutingError, match="was not called"), routers.replay_known(own):
        pass


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


def test_a_lower_bound_may_be_given(model, routers, own) -> None:
    ids = _some_foreign(own.ids, 0, 24)
    with torch.no_grad(), routers.replay(_given(own, ids), native=True, check=False) as replayed:
        model(input_ids=IDS)
    with pytest.raises(RoutingError, match="expected at least 80%"):
        replayed.check_alignment()
    replayed.check_alignment(least=0.05)
