"""What vLLM returns as routes: four contract generations, each read into rows, and the rows into a `RoutingTrace`.

| vLLM      | in this process                           | over HTTP                      | layers   | ids          |
|-----------|-------------------------------------------|--------------------------------|----------|--------------|
| 0.14-0.20 | CompletionOutput, when the request stops  | nothing                        | all      | int32        |
| 0.21      | RequestOutput (prompt) + CompletionOutput | nested lists, prompt at the top| MoE only | int16        |
| 0.22-0.30 | CompletionOutput, prompt and completion   | base64 of .npy bytes per choice| all      | uint8, uint16|
| 0.31-0.33 | the same, a block store behind it         | the same                       | all      | uint8, uint16|

Rows are those of the fed tokens, prompt + completion - 1; dense layers hold zeros; ids are logical, in the router's own
top-k order. Up to 0.30 a row that no forward wrote is all zeros: it comes out as not valid, never as expert 0.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from onepolicy.config import UsageError
from onepolicy.config.base import shown
from onepolicy.replay.axes import Axis, trace_from
from onepolicy.replay.checks import RouteSpec
from onepolicy.replay.payloads.npy import InvalidNpyError, parse_npy
from onepolicy.types import RoutingTrace, route_spans

Version = tuple[int, int]
NEWEST_VERSION = "0.33"
ALL_ZERO_ISSUE = "https://github.com/vllm-project/vllm/issues/54730"
LARGEST_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RoutePayloadFormat:
    """One generation. Its two readers return [rows, layers on its axis, K] integers, or None for a request without."""

    newest_version: Version
    """Last version of it."""
    axis: Axis
    read_output: Callable[[Any], np.ndarray | None]
    """Of a RequestOutput with one finished completion."""
    read_reply: Callable[[Mapping[str, Any], int], np.ndarray | None]
    """Of the JSON body of a non-streamed reply to one prompt, and the index of the choice."""
    zeros_mean_missing: bool = True
    """Rows live in a buffer that starts as zeros."""
    may_drop_requests: bool = False
    """Routes of a request may be dropped without a sign, so that their absence is no mistake of the set-up."""


def parse_version(version: str) -> Version:
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise UsageError(
            f"vllm {version}: not a released version; install one of 0.14 to {NEWEST_VERSION}"
        )
    return int(match[1]), int(match[2])


def payload_format_of(version: str) -> RoutePayloadFormat:
    """The generation of a vLLM version. UsageError for one that is older or newer than all of them."""
    found = parse_version(version)
    if found < (0, 14):
        raise UsageError(f"vllm {version}: cannot return routes; 0.14 is the first that does")
    for payload_format in PAYLOAD_FORMATS:
        if found <= payload_format.newest_version:
            return payload_format
    raise UsageError(
        f"vllm {version}: how it returns routes is not known here; the newest that is known is {NEWEST_VERSION}"
    )


def request_trace(
    rows: np.ndarray | None,  # [R, layers on the contract's axis, K]
    payload_format: RoutePayloadFormat,
    *,
    prompt: int,
    completion: int,
    cached: int,
    route_spec: RouteSpec,
    depth: int,
    version: int,
    first: int = 0,
    aborted: bool = False,
) -> RoutingTrace | None:
    """The routes of one request, from slot `first` on.

    prompt, completion, cached: its tokens, and how many of the prompt's the prefix cache had. None where vLLM drops the
    routes of a request (0.21: a preempted one; any: aborted before it began). Rows an aborted request lacks are not
    valid. UsageError if routes are missing otherwise, are all zeros, or are not of this model's layers. How many there
    are is checked by `replay.checks.check_completion`.
    """
    if rows is None:
        if aborted or payload_format.may_drop_requests:
            return None
        raise UsageError(
            "vLLM returned no routes for a request; start it with --enable-return-routed-experts"
        )
    expected = prompt + completion - 1 - first
    captured: np.ndarray = np.ones(len(rows), dtype=bool)  # [R]
    if payload_format.zeros_mean_missing and route_spec.top_k > 1 and rows.ndim == 3 and len(rows):
        captured = np.asarray(rows.any(axis=(1, 2)))
        if not captured.any():
            raise UsageError(
                f"vLLM returned zeros for all routes of a request: no MoE kernel was captured ({ALL_ZERO_ISSUE})"
            )
    if aborted and len(rows) < expected:
        rows = np.concatenate([rows, np.zeros((expected - len(rows), *rows.shape[1:]), rows.dtype)])
        captured = np.concatenate([captured, np.zeros(expected - len(captured), dtype=bool)])
    trace = trace_from(
        torch.from_numpy(rows),
        layers=route_spec.layers,
        depth=depth,
        num_experts=route_spec.num_experts,
        axis=payload_format.axis,
        valid=torch.from_numpy(captured),
    )
    spans = route_spans(cached, prompt, first + len(rows), version, start=first)
    return RoutingTrace(trace.ids, trace.valid, trace.layers, trace.num_experts, spans)


def _of_completion(output: Any) -> np.ndarray | None:
    routes: np.ndarray | None = output.outputs[0].routed_experts
    return routes


def _of_prompt_and_completion(output: Any) -> np.ndarray | None:
    return _joined(output.prompt_routed_experts, output.outputs[0].routed_experts)


def _no_reply(body: Mapping[str, Any], choice: int) -> np.ndarray | None:
    raise UsageError("vLLM up to 0.20 returns no routes over HTTP; use 0.22 or newer")


def _nested_lists(body: Mapping[str, Any], choice: int) -> np.ndarray | None:
    """The prompt's rows stand at the top, of the first prompt only: one prompt per request."""
    return _joined(
        _array("prompt_routed_experts", body.get("prompt_routed_experts")),
        _array("routed_experts", body["choices"][choice].get("routed_experts")),
    )


def _array(name: str, found: Any) -> np.ndarray | None:
    """[rows, layers, K] int64 of nested lists."""
    if found is None:
        return None
    if not _are_rows(found):
        raise UsageError(
            f"{name}: expected nested lists [rows][layers][K] of integers, got {shown(found)}"
        )
    return np.asarray(found, dtype=np.int64)


def _are_rows(found: Any) -> bool:
    """Whether it is a list of lists of lists, of one length on each level, of whole numbers that int32 holds."""
    level: list[Any] = [found]
    for _ in range(3):
        if not all(type(each) is list for each in level) or len({len(each) for each in level}) != 1:
            return False
        level = [inner for each in level for inner in each]
    return bool(level) and all(type(each) is int and abs(each) <= LARGEST_ID for each in level)


def _base64_npy(body: Mapping[str, Any], choice: int) -> np.ndarray | None:
    text = body["choices"][choice].get("routed_experts")
    if text is None:
        return None
    wrong = f"routed_experts: expected base64 of an .npy file, got {shown(text)}"
    if type(text) is not str:
        raise UsageError(wrong)
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:  # also characters that are not ASCII
        raise UsageError(f"{wrong}: {error}") from error
    try:
        rows = parse_npy(data)
    except InvalidNpyError as error:
        raise UsageError(f"{wrong}: {error}") from error
    if rows.dtype.kind not in "iu" or rows.dtype == np.uint64:
        raise UsageError(f"routed_experts: expected integers, got an .npy of {rows.dtype}")
    if rows.ndim != 3:
        raise UsageError(
            f"routed_experts: expected the shape [rows, layers, K], got an .npy of shape {rows.shape}"
        )
    return rows.copy()  # torch wants memory that may be written to


def _joined(prompt: np.ndarray | None, completion: np.ndarray | None) -> np.ndarray | None:
    """A completion of one token has no rows of its own; no prompt rows: the routes were dropped."""
    if prompt is None or completion is None:
        return prompt
    if prompt.shape[1:] != completion.shape[1:]:
        raise UsageError(
            f"prompt_routed_experts has rows of {prompt.shape[1:]}, routed_experts of {completion.shape[1:]}; "
            "expected one model's [layers, K]"
        )
    return np.concatenate([prompt, completion])


PAYLOAD_FORMATS = (
    RoutePayloadFormat((0, 20), "all", _of_completion, _no_reply),
    RoutePayloadFormat(
        (0, 21), "moe", _of_prompt_and_completion, _nested_lists, may_drop_requests=True
    ),
    RoutePayloadFormat((0, 30), "all", _of_completion, _base64_npy),
    RoutePayloadFormat((0, 33), "all", _of_completion, _base64_npy, zeros_mean_missing=False),
)
