"""Requests and completions as bytes: the ranks' message format, so that nothing of a sample is pickled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NotRequired

from pydantic import ConfigDict
from torch import Tensor
from typing_extensions import TypedDict

from onepolicy.config import TrainingError
from onepolicy.sync.messages import read_as
from onepolicy.train.sharded.team import ERRORS, Failed
from onepolicy.train.sharded.wire import Message, TraceAbout, kind_of, trace_of
from onepolicy.types import Completion, Finish, RouteSource, RouteSpan, Sampling

PARTS = {
    "token_ids": ("int", 1, True),
    "logp": ("float", 1, True),
    "version": ("int", 1, True),
    "top_ids": ("int", 2, False),
    "top_logp": ("float", 2, False),
}
"""A Completion's tensors, with a row per token: numbers, axes, and whether it always has them."""
TENSORS, ABOUT = tuple(PARTS), ("finish", "first_slot", "fingerprint")
SAMPLING = {field.name for field in dataclasses.fields(Sampling)}
TRACE = ("ids", "valid", "weights")


@dataclasses.dataclass(frozen=True, slots=True)
class GenerateRequest:
    prompt_ids: Tensor  # [P] int64
    sampling: Sampling
    seed: int


def encode_requests(requests: Mapping[int, GenerateRequest]) -> bytes:
    """In this order, under their numbers."""
    about = [
        {"number": number, "seed": each.seed, "sampling": dataclasses.asdict(each.sampling)}
        for number, each in requests.items()
    ]
    return Message(
        {"requests": about}, {str(number): each.prompt_ids for number, each in requests.items()}
    ).encode()


class RequestAbout(TypedDict):
    """What a message's header says of a request beside its prompt."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    number: int
    seed: int
    sampling: dict[str, Any]


def decode_requests(data: bytes) -> dict[int, GenerateRequest]:
    """TrainingError for bytes that are no requests."""
    message = Message.decode(data)
    requests: dict[int, GenerateRequest] = {}
    for each in read_as(list[RequestAbout], message.header.get("requests"), "a batch of requests"):
        prompt = message.tensors.get(str(each["number"]))
        if (
            prompt is None
            or prompt.dim() != 1
            or kind_of(prompt) != "int"
            or each["sampling"].keys() != SAMPLING
        ):
            raise TrainingError(
                f"request {each['number']} is malformed: its prompt or its sampling is none"
            )
        sampling = read_as(Sampling, each["sampling"], f"request {each['number']}")
        requests[each["number"]] = GenerateRequest(prompt, sampling, each["seed"])
    return requests


def encode_replies(answers: Mapping[int, Completion | BaseException]) -> bytes:
    """What became of requests, by their numbers."""
    header: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for number, answer in answers.items():
        if isinstance(answer, BaseException):
            header[str(number)] = {
                "error": str(answer) or type(answer).__name__,
                "kind": type(answer).__name__,
            }
            continue
        parts = {name: getattr(answer, name) for name in TENSORS}
        about = {name: getattr(answer, name) for name in ABOUT}
        if (trace := answer.routing) is not None:
            parts |= {f"trace.{name}": getattr(trace, name) for name in TRACE}
            about["trace"] = {"layers": trace.layers, "num_experts": trace.num_experts}
            about["spans"] = [dataclasses.astuple(span) for span in trace.spans]
        header[str(number)] = about
        tensors |= {f"{number}.{name}": part for name, part in parts.items() if part is not None}
    return Message({"answers": header}, tensors).encode()


class Done(TypedDict):
    """What a message's header says of a completion beside its tensors."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    finish: Finish
    first_slot: int
    fingerprint: str | None
    trace: NotRequired[TraceAbout]
    spans: NotRequired[list[tuple[int, int, RouteSource, int]]]


def decode_replies(data: bytes) -> dict[int, Completion | Exception]:
    """TrainingError for bytes that are no answers."""
    message = Message.decode(data)
    answers: dict[int, Completion | Exception] = {}
    for number, about in read_as(
        dict[str, Failed | Done], message.header.get("answers"), "a batch of answers"
    ).items():
        if not (number.isascii() and number.isdecimal()):
            raise TrainingError(
                f"an answer is malformed: {number[:20]!r} is no number of a request"
            )
        answers[int(number)] = _answer(number, about, message.tensors)
    return answers


def _answer(
    number: str, about: dict[str, Any], tensors: dict[str, Tensor]
) -> Completion | Exception:
    if "error" in about:
        kind = ERRORS.get(about["kind"])
        return kind(about["error"]) if kind else TrainingError(f"{about['kind']}: {about['error']}")
    parts: dict[str, Any] = {name: tensors.get(f"{number}.{name}") for name in TENSORS}
    rows = -1 if parts["token_ids"] is None else parts["token_ids"].shape[:1].numel()
    for name, (kind_wanted, dims, needed) in PARTS.items():
        part = parts[name]
        if part is None and not needed:
            continue
        if part is None or kind_of(part) != kind_wanted or part.dim() != dims or len(part) != rows:
            raise TrainingError(
                f"answer {number} is malformed: its {name} is missing or does not fit its tokens"
            )
    routing = None
    if "trace" in about:
        spans = tuple(RouteSpan(*span) for span in about.get("spans", ()))
        routing = trace_of(tensors, f"{number}.trace", about["trace"], spans)
        if any(
            span.start < 0 or span.length < 0 or span.start + span.length > len(routing)
            for span in spans
        ):
            raise TrainingError(
                f"answer {number} is malformed: a span of its routes is not among them"
            )
    return Completion(**parts, **{name: about[name] for name in ABOUT}, routing=routing)
