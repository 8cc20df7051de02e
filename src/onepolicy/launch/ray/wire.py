"""Requests and completions as bytes, in the ranks' message format: samples are never pickled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NotRequired

import torch
from pydantic import ConfigDict
from torch import Tensor
from typing_extensions import TypedDict

from onepolicy.config import TrainingError, UsageError
from onepolicy.replay.checks import RoutingError
from onepolicy.support.trace import SupportTrace
from onepolicy.sync.messages import validate_message
from onepolicy.train.sharded.wire import (
    Message,
    TraceHeader,
    support_from_tensors,
    support_tensors,
    trace_from_tensors,
)
from onepolicy.types import (
    Completion,
    FinishReason,
    RouteSource,
    RouteSpan,
    RoutingTrace,
    Sampling,
)

ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (UsageError, TrainingError, RoutingError)
}


class ErrorReport(TypedDict):
    """The reply to a request that failed."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    error: str
    kind: str


@dataclasses.dataclass(frozen=True, slots=True)
class TensorFormat:
    """The expected form of one tensor of a Completion, which has a row per token."""

    kind: str  # of its numbers, as _number_kind says
    dims: int
    required: bool


COMPLETION_TENSORS = {
    "token_ids": TensorFormat("int", 1, True),
    "logp": TensorFormat("float", 1, True),
    "version": TensorFormat("int", 1, True),
    "top_ids": TensorFormat("int", 2, False),
    "top_logp": TensorFormat("float", 2, False),
}
COMPLETION_FIELDS = ("finish", "first_slot", "fingerprint")
SAMPLING_FIELDS = {field.name for field in dataclasses.fields(Sampling)}
TRACE_TENSORS = ("ids", "valid", "weights")


@dataclasses.dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request for one completion."""

    prompt_ids: Tensor  # [P] int64
    sampling: Sampling
    seed: int


def encode_requests(requests: Mapping[int, GenerateRequest]) -> bytes:
    """Encode requests by number, in their order."""
    headers = [
        {"number": number, "seed": each.seed, "sampling": dataclasses.asdict(each.sampling)}
        for number, each in requests.items()
    ]
    prompts = {str(number): each.prompt_ids for number, each in requests.items()}
    return Message({"requests": headers}, prompts).encode()


class RequestHeader(TypedDict):
    """The part of a request in a message's header. Its prompt is a tensor of the message."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    number: int
    seed: int
    sampling: dict[str, Any]


def decode_requests(data: bytes) -> dict[int, GenerateRequest]:
    """Decode requests by number, in their order. Raises TrainingError if `data` is malformed."""
    message = Message.decode(data)
    headers = validate_message(
        list[RequestHeader], message.header.get("requests"), "a batch of requests"
    )
    requests: dict[int, GenerateRequest] = {}
    for header in headers:
        number = header["number"]
        prompt = message.tensors.get(str(number))
        is_prompt = prompt is not None and prompt.dim() == 1 and _number_kind(prompt) == "int"
        if not is_prompt or header["sampling"].keys() != SAMPLING_FIELDS:
            raise TrainingError(
                f"request {number} is malformed: its prompt or its sampling is missing or wrong"
            )
        assert prompt is not None
        sampling = validate_message(Sampling, header["sampling"], f"request {number}")
        requests[number] = GenerateRequest(prompt, sampling, header["seed"])
    return requests


def encode_replies(replies: Mapping[int, Completion | BaseException]) -> bytes:
    """Encode completions and errors by the number of their request."""
    headers: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for number, reply in replies.items():
        if isinstance(reply, BaseException):
            kind = type(reply).__name__
            headers[str(number)] = {"error": str(reply) or kind, "kind": kind}
            continue
        headers[str(number)], parts = _completion_parts(reply)
        tensors |= {f"{number}.{name}": part for name, part in parts.items() if part is not None}
    return Message({"answers": headers}, tensors).encode()


def _completion_parts(
    completion: Completion,
) -> tuple[dict[str, Any], dict[str, Tensor | None]]:
    """Split a completion into its header and its tensors by name."""
    header = {name: getattr(completion, name) for name in COMPLETION_FIELDS}
    tensors = {name: getattr(completion, name) for name in COMPLETION_TENSORS}
    if completion.support is not None:
        tensors |= support_tensors(completion.support, "support")
        header["support"] = True
    trace = completion.routing
    if trace is not None:
        tensors |= {f"trace.{name}": getattr(trace, name) for name in TRACE_TENSORS}
        header["trace"] = {"layers": trace.layers, "num_experts": trace.num_experts}
        header["spans"] = [dataclasses.astuple(span) for span in trace.spans]
    return header, tensors


class CompletionHeader(TypedDict):
    """The part of a completion in a message's header. The rest are tensors of the message."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    finish: FinishReason
    first_slot: int
    fingerprint: str | None
    support: NotRequired[bool]
    trace: NotRequired[TraceHeader]
    spans: NotRequired[list[tuple[int, int, RouteSource, int]]]


def decode_replies(data: bytes) -> dict[int, Completion | Exception]:
    """Decode completions and errors by the number of their request.

    Raises TrainingError if `data` is malformed.
    """
    message = Message.decode(data)
    headers = validate_message(
        dict[str, ErrorReport | CompletionHeader],
        message.header.get("answers"),
        "a batch of answers",
    )
    replies: dict[int, Completion | Exception] = {}
    for number, header in headers.items():
        if not (number.isascii() and number.isdecimal()):
            raise TrainingError(
                f"an answer is malformed: {number[:20]!r} is no number of a request"
            )
        replies[int(number)] = _decode_reply(number, header, message.tensors)
    return replies


def _decode_reply(
    number: str, header: dict[str, Any], tensors: dict[str, Tensor]
) -> Completion | Exception:
    if "error" in header:
        error_class = ERRORS.get(header["kind"])
        if error_class is None:
            return TrainingError(f"{header['kind']}: {header['error']}")
        return error_class(header["error"])
    parts: dict[str, Any] = {name: tensors.get(f"{number}.{name}") for name in COMPLETION_TENSORS}
    _check_completion_tensors(number, parts)
    fields = {name: header[name] for name in COMPLETION_FIELDS}
    support = None
    if header.get("support"):
        support = _decode_support(number, tensors, len(parts["token_ids"]))
    routing = _decode_trace(number, header, tensors)
    return Completion(**parts, **fields, routing=routing, support=support)


def _decode_support(number: str, tensors: dict[str, Tensor], tokens: int) -> SupportTrace:
    support = support_from_tensors(tensors, f"{number}.support")
    ends = support.offsets
    fits = len(support) == tokens and ends[0] == 0 and ends[-1] == len(support.ids)
    if not fits or (ends.diff() < 0).any():
        raise TrainingError(f"answer {number} is malformed: its support does not fit its tokens")
    return support


def _check_completion_tensors(number: str, parts: dict[str, Tensor | None]) -> None:
    """Raise TrainingError if a tensor is missing or differs from COMPLETION_TENSORS."""
    token_ids = parts["token_ids"]
    rows = -1
    if token_ids is not None:
        rows = token_ids.shape[:1].numel()
    for name, expected in COMPLETION_TENSORS.items():
        part = parts[name]
        if part is None:
            fits = not expected.required
        else:
            kind, dims = _number_kind(part), part.dim()
            fits = (kind, dims) == (expected.kind, expected.dims) and len(part) == rows
        if not fits:
            raise TrainingError(
                f"answer {number} is malformed: its {name} is missing or does not fit its tokens"
            )


def _decode_trace(
    number: str, header: dict[str, Any], tensors: dict[str, Tensor]
) -> RoutingTrace | None:
    if "trace" not in header:
        return None
    spans = tuple(RouteSpan(*span) for span in header.get("spans", ()))
    routing = trace_from_tensors(tensors, f"{number}.trace", header["trace"], spans)
    for span in spans:
        if span.start < 0 or span.length < 0 or span.start + span.length > len(routing):
            raise TrainingError(
                f"answer {number} is malformed: a span of its routes is not among them"
            )
    return routing


def _number_kind(tensor: Tensor) -> str:
    """Return "bool", "int" or "float"."""
    if tensor.dtype == torch.bool:
        return "bool"
    if tensor.is_floating_point():
        return "float"
    return "int"
