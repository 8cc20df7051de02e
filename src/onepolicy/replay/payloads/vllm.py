"""Readers of vLLM's routes: four payload formats, each read into rows, and rows into a trace.

| vLLM | in this process | over HTTP | layers | ids |
|---|---|---|---|---|
| 0.14-0.20 | CompletionOutput, when the request stops | nothing | all | int32 |
| 0.21 | RequestOutput (prompt) + CompletionOutput | nested lists, prompt at the top | MoE | int16 |
| 0.22-0.30 | CompletionOutput, with the prompt | base64 of .npy per choice | all | uint8, 16 |
| 0.31-0.33 | the same, with a block store behind it | the same | all | uint8, 16 |

There is one row per token that was fed: prompt + completion - 1. Dense layers are zeros. Ids are
logical, in the order of the router's own top-k. Up to 0.30 a row that no forward wrote is all
zeros. Such a row becomes invalid, never expert 0.
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
from onepolicy.errors import short_repr
from onepolicy.npy import InvalidNpyError, parse_npy
from onepolicy.replay.axes import Axis, trace_from
from onepolicy.replay.checks import RouteSpec
from onepolicy.types import RoutingTrace, route_spans

Version = tuple[int, int]
NEWEST_VERSION = "0.33"
ALL_ZERO_ISSUE = "https://github.com/vllm-project/vllm/issues/54730"
LARGEST_ID = 2**31 - 1
NO_LOGP = -9999.0
"""Value of its servers for a missing log-probability, and for minus infinity."""


@dataclass(frozen=True, slots=True)
class RoutePayloadFormat:
    """The form in which a range of vLLM versions returns routes, with its readers.

    A reader returns integers [rows, layers on its axis, K], or None for a request without routes.
    """

    newest_version: Version
    """The last version that uses this format."""
    axis: Axis
    read_output: Callable[[Any], np.ndarray | None]
    """Reader of a RequestOutput with one finished completion."""
    read_reply: Callable[[Mapping[str, Any], int], np.ndarray | None]
    """Reader of the JSON body of a non-streamed reply to one prompt. The int is the choice."""
    zeros_mean_missing: bool = True
    """Whether rows come from a buffer that starts as zeros."""
    may_drop_requests: bool = False
    """Whether vLLM may drop a request's routes silently, without a mistake in the set-up."""


def parse_version(version: str) -> Version:
    """Return (major, minor). Raises UsageError if `version` is not that of a release."""
    match = re.match(r"([0-9]{1,9})\.([0-9]{1,9})", version)
    if match is None:
        raise UsageError(
            f"vllm {version}: not a released version; install one of 0.14 to {NEWEST_VERSION}"
        )
    return int(match[1]), int(match[2])


def payload_format_of(version: str) -> RoutePayloadFormat:
    """Return the format of a vLLM version's routes.

    Raises:
        UsageError: the version is older or newer than all known formats.
    """
    parsed = parse_version(version)
    if parsed < (0, 14):
        raise UsageError(f"vllm {version}: cannot return routes; 0.14 is the first that does")
    for payload_format in PAYLOAD_FORMATS:
        if parsed <= payload_format.newest_version:
            return payload_format
    raise UsageError(
        f"vllm {version}: how it returns routes is not known here; the newest that is known is "
        f"{NEWEST_VERSION}"
    )


def request_trace(
    rows: np.ndarray | None,  # [R, layers on the format's axis, K]
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
    """Return the routes of one request, from slot `first` on.

    Args:
        rows: the reader's result.
        payload_format: the format that the rows were read from.
        prompt: the prompt's tokens.
        completion: the completion's tokens.
        cached: the prompt's tokens that the prefix cache had.
        route_spec: the model's MoE layers, experts and K.
        depth: the model's decoder layers.
        version: RL step of the weights that sampled.
        first: the slot of the first row.
        aborted: the request was aborted. The rows that it lacks become invalid.

    Returns:
        The trace; None if vLLM may have dropped the routes of such a request. 0.21 drops those of
        a preempted request. Any version has none of a request that was aborted before it began.

    Raises:
        UsageError: routes are missing otherwise, are all zeros, or are of other layers than this
            model's. `replay.checks.check_completion` checks the number of rows.
    """
    if rows is None:
        if aborted or payload_format.may_drop_requests:
            return None
        raise UsageError(
            "vLLM returned no routes for a request; start it with --enable-return-routed-experts"
        )
    expected = prompt + completion - 1 - first
    captured: np.ndarray = np.ones(len(rows), dtype=bool)  # [R]
    if payload_format.zeros_mean_missing and route_spec.top_k > 1:
        captured = _captured_rows(rows)
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


def _captured_rows(rows: np.ndarray) -> np.ndarray:
    """Return which rows [R, layers, K] are not all zeros, [R] bool."""
    if rows.ndim != 3 or len(rows) == 0:
        return np.ones(len(rows), dtype=bool)
    captured = np.asarray(rows.any(axis=(1, 2)))
    if not captured.any():
        raise UsageError(
            "vLLM returned zeros for all routes of a request: no MoE kernel was captured "
            f"({ALL_ZERO_ISSUE})"
        )
    return captured


def _read_completion(output: Any) -> np.ndarray | None:
    routes: np.ndarray | None = output.outputs[0].routed_experts
    return routes


def _read_prompt_and_completion(output: Any) -> np.ndarray | None:
    return _join(output.prompt_routed_experts, output.outputs[0].routed_experts)


def _refuse_reply(body: Mapping[str, Any], choice: int) -> np.ndarray | None:
    raise UsageError("vLLM up to 0.20 returns no routes over HTTP; use 0.22 or newer")


def _read_nested_lists(body: Mapping[str, Any], choice: int) -> np.ndarray | None:
    """Read a reply whose top level has the prompt's rows, of the first prompt only."""
    return _join(
        _array("prompt_routed_experts", body.get("prompt_routed_experts")),
        _array("routed_experts", body["choices"][choice].get("routed_experts")),
    )


def _array(name: str, lists: Any) -> np.ndarray | None:
    """Return nested lists as an array [rows, layers, K] int64."""
    if lists is None:
        return None
    if not _are_rows(lists):
        raise UsageError(
            f"{name}: expected nested lists [rows][layers][K] of integers, got {short_repr(lists)}"
        )
    return np.asarray(lists, dtype=np.int64)


def _are_rows(lists: Any) -> bool:
    """Return whether these are lists of lists of lists of whole numbers that int32 holds.

    All lists of one level must have the same length.
    """
    level: list[Any] = [lists]
    for _ in range(3):
        if not all(type(each) is list for each in level) or len({len(each) for each in level}) != 1:
            return False
        level = [inner for each in level for inner in each]
    return bool(level) and all(type(each) is int and abs(each) <= LARGEST_ID for each in level)


def _read_base64_npy(body: Mapping[str, Any], choice: int) -> np.ndarray | None:
    text = body["choices"][choice].get("routed_experts")
    if text is None:
        return None
    wrong = f"routed_experts: expected base64 of an .npy file, got {short_repr(text)}"
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
            "routed_experts: expected the shape [rows, layers, K], got an .npy of shape "
            f"{rows.shape}"
        )
    return rows.copy()  # torch needs writable memory


def _join(prompt: np.ndarray | None, completion: np.ndarray | None) -> np.ndarray | None:
    """Join the prompt's and the completion's rows.

    A completion of one token has no rows. Without the prompt's rows the routes were dropped.
    """
    if prompt is None or completion is None:
        return prompt
    if prompt.shape[1:] != completion.shape[1:]:
        raise UsageError(
            f"prompt_routed_experts has rows of {prompt.shape[1:]}, routed_experts of "
            f"{completion.shape[1:]}; expected one model's [layers, K]"
        )
    return np.concatenate([prompt, completion])


PAYLOAD_FORMATS = (
    RoutePayloadFormat((0, 20), "all", _read_completion, _refuse_reply),
    RoutePayloadFormat(
        (0, 21), "moe", _read_prompt_and_completion, _read_nested_lists, may_drop_requests=True
    ),
    RoutePayloadFormat((0, 30), "all", _read_completion, _read_base64_npy),
    RoutePayloadFormat(
        (0, 33), "all", _read_completion, _read_base64_npy, zeros_mean_missing=False
    ),
)
