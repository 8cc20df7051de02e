"""The same routes in every form in which engines and trainers carry them."""

from __future__ import annotations

import base64
import io
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from onepolicy.config import UsageError
from onepolicy.integrations.core.payload import FORMS, missing_routes, to_trace
from onepolicy.replay.routers import Routers, bind_routers
from onepolicy.types import RoutingTrace
from support.replay_models import build, random_trace

TOKENS = 6


@cache
def routers(family: str = "deepseek_v3") -> Routers:
    """Return routers of a model with a dense layer, so that the layer axes differ."""
    return bind_routers(build(family))


def expected() -> RoutingTrace:
    bound = routers()
    return random_trace(TOKENS - 1, bound.layers, bound.num_experts, bound.top_k)


def all_layers(trace: RoutingTrace) -> np.ndarray:
    """Return ids [T, decoder layers, K] with zeros for dense layers, as vLLM and SGLang do."""
    ids = np.zeros((len(trace), routers().depth, trace.top_k), np.int32)
    ids[:, list(trace.layers)] = trace.ids.numpy()
    return ids


def npy(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def with_rows(ids: np.ndarray, value: int, rows: int = 2) -> np.ndarray:
    filler = np.full((rows, *ids.shape[1:]), value, ids.dtype)
    return np.concatenate([ids, filler])


def in_form(form: str) -> list[Any]:
    """Return the routes as that engine or trainer has them."""
    ids = all_layers(expected())
    filler = with_rows(ids, 0)
    filler[-2:] = np.arange(ids.shape[-1])
    zeros = with_rows(ids, 0).astype(np.int16)
    return {
        "vllm": [ids.astype(np.uint8), npy(ids.astype(np.uint8)), ids.astype(np.uint16), ids],
        "vllm-0.31": [npy(ids.astype(np.uint16))],
        "sglang": [base64.b64encode(ids.tobytes()).decode()],
        "verl": [torch.from_numpy(zeros), torch.from_numpy(zeros.astype(np.uint16)), zeros],
        "prime-rl": [{"data": zeros.tobytes(), "shape": list(zeros.shape), "dtype": "int16"}],
        "miles": [with_rows(ids, -1), with_rows(ids, -1).tolist()],
        "slime": [filler, ids.tolist()],
        "skyrl": [filler.astype(np.int8)],
    }[form]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_trace(form: str):
    for payload in in_form(form):
        found = to_trace(routers(), payload, tokens=TOKENS, form=form)
        assert found == expected()
        assert found.valid.all()


@pytest.mark.parametrize("form", FORMS)
def test_a_truncated_response_loses_its_rows_and_a_longer_one_is_native_there(form: str):
    for payload in in_form(form):
        refused = rf"has \d rows, but {TOKENS - 2} tokens have {TOKENS - 3}.*surplus=.cut"
        with pytest.raises(UsageError, match=refused):
            to_trace(routers(), payload, tokens=TOKENS - 2, form=form)
        shorter = to_trace(routers(), payload, tokens=TOKENS - 2, form=form, surplus="cut")
        assert shorter == expected().rows(0, TOKENS - 3)
    payload = in_form(form)[-1]
    if FORMS[form].missing != "length":  # legal filler: only the length tells
        longer = to_trace(routers(), payload, tokens=TOKENS + 3, form=form)
        assert longer.valid.tolist() == [True] * (TOKENS - 1) + [False] * 3


@pytest.mark.parametrize("form", FORMS)
def test_a_sample_without_routes(form: str):
    assert not to_trace(routers(), None, tokens=4, form=form).valid.any()
    assert len(to_trace(routers(), None, tokens=1, form=form)) == 0


def test_zero_rows_inside_a_path_are_native():
    ids = all_layers(expected())
    ids[2] = 0  # the last token of a turn
    found = to_trace(routers(), torch.from_numpy(ids), tokens=TOKENS, form="verl")
    assert found.valid.tolist() == [True, True, False, True, True]


def test_a_sample_of_padding_alone_is_native():
    ids = torch.zeros(TOKENS, routers().depth, routers().top_k, dtype=torch.int16)
    found = to_trace(routers(), ids, tokens=TOKENS, form="verl")
    assert found == missing_routes(routers(), TOKENS - 1)


def test_with_one_expert_a_token_zeros_are_expert_0():
    bound = bind_routers(build("qwen3_moe", num_experts_per_tok=1))
    ids = torch.zeros(3, len(bound.layers), 1, dtype=torch.int16)
    assert to_trace(bound, ids, tokens=4, form="verl").valid.all()


REFUSED: list[tuple[str, Any, str]] = [
    ("vlm", None, "no payload has the form 'vlm'; there are vllm"),
    ("vllm", "!!", "not base64"),
    ("vllm", base64.b64encode(b"x").decode(), "not an .npy"),
    ("vllm", [[1.5]], "float64"),
    ("vllm", [[1], [1, 2]], "no array"),
    ("vllm", np.zeros((3, 4), int), r"shape \[3, 4\]"),
    ("sglang", base64.b64encode(b"xyz").decode(), "3 bytes, which are no whole rows"),
    ("prime-rl", {"data": b"1"}, "expected data"),
    ("prime-rl", {"data": b"12", "shape": [1, 1, 1], "dtype": "object"}, "expected data"),
    ("prime-rl", {"data": b"12", "shape": [1, 1, 3], "dtype": "int16"}, "has 1 ids"),
    ("miles", np.full((5, 4, 2), 99, np.int32), "layers"),
]


def test_a_payload_of_another_form_is_refused(subtests: pytest.Subtests):
    for form, payload, message in REFUSED:
        with subtests.test(message), pytest.raises(UsageError, match=message):
            to_trace(routers(), payload, tokens=TOKENS, form=form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("again", [2, 4])
def test_a_resumed_requests_rows_are_named(form: str, again: int):
    """verl#6029: the rows of the first part, and then all rows."""
    payload = in_form(form)[-1]
    if isinstance(payload, dict):
        ids = np.frombuffer(payload["data"], np.int16).reshape(payload["shape"])
    elif isinstance(payload, str):
        return  # text of the same ids
    else:
        ids = np.asarray(payload)
    ids = ids[: TOKENS - 1]
    twice = np.concatenate([ids[:again], ids])
    if isinstance(payload, dict):
        twice = payload | {"data": twice.tobytes(), "shape": list(twice.shape)}
    words = (
        rf"{again + 5} rows, but 6 tokens have 5\. The rows repeat: row {again} .*the last 5 rows"
    )
    with pytest.raises(UsageError, match=words):
        to_trace(routers(), twice, tokens=TOKENS, form=form)


def test_a_row_of_the_last_token_is_not_surplus():
    ids = all_layers(expected())
    whole = np.concatenate([ids, ids[:1]])
    assert to_trace(routers(), whole, tokens=TOKENS, form="vllm-0.31") == expected()
    with pytest.raises(UsageError, match="surplus is 'keep'"):
        to_trace(routers(), ids, tokens=TOKENS, form="vllm", surplus="keep")


WRAPPED = {
    "uint8": "holds ids up to 255, but the model's experts are 0..511: higher ids have wrapped",
    "int8": "holds ids up to 127, but the model's experts are 0..511: higher ids have become neg",
}


@pytest.mark.parametrize("dtype", WRAPPED)
def test_a_dtype_that_cannot_hold_the_experts(dtype: str):
    bound = bind_routers(build("qwen3_moe", num_experts=512))
    ids = np.zeros((4, len(bound.layers), bound.top_k), dtype)
    with pytest.raises(UsageError, match=f"{WRAPPED[dtype]}.*carry torch.uint16 or a wider"):
        to_trace(bound, ids, tokens=5, form="vllm-0.31")


def test_a_column_too_many_and_ids_of_another_numbering():
    bound = routers()
    ids = torch.from_numpy(all_layers(expected()))
    wider = torch.cat([ids, torch.full_like(ids[..., :1], bound.num_experts)], -1)
    with pytest.raises(UsageError, match=rf"a fused shared expert .*ids\[..., :{bound.top_k}\]"):
        to_trace(bound, wider, tokens=TOKENS, form="vllm")
    with pytest.raises(UsageError, match=r"physical ids .* load balancing"):
        to_trace(bound, ids + bound.num_experts, tokens=TOKENS, form="vllm")


def test_uint8_marks_of_rows_that_were_not_captured():
    bound = bind_routers(build("qwen3_moe", num_experts=256))
    trace = random_trace(8, bound.layers, 256, bound.top_k)
    ids = trace.ids.clone()
    ids[3:] = 255
    model = bound.model
    with (
        pytest.raises(UsageError, match=r"5 of 8 rows are 255 alone here\. That is -1 in uint8"),
        bound.replay(bound.trace_from(ids)),
    ):
        model(input_ids=torch.ones(1, 8, dtype=torch.int64))
