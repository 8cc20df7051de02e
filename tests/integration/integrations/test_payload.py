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
        shorter = to_trace(routers(), payload, tokens=TOKENS - 2, form=form)
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
