"""Requests and completions as bytes: the ranks' message format, so that nothing of a sample is pickled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from onepolicy.config import TrainingError
from onepolicy.train.sharded.team import ERRORS
from onepolicy.train.sharded.wire import Message
from onepolicy.types import Completion, RouteSpan, RoutingTrace, Sampling

TENSORS = ("token_ids", "logp", "version", "top_ids", "top_logp")
TRACE = ("ids", "valid", "weights")


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    prompt_ids: Tensor  # [P] int64
    sampling: Sampling
    seed: int


def encode_requests(requests: Mapping[int, Request]) -> bytes:
    """In this order, under their numbers."""
    about = [
        {"number": number, "seed": each.seed, "sampling": dataclasses.asdict(each.sampling)}
        for number, each in requests.items()
    ]
    return Message({"requests": about}, {str(number): each.prompt_ids for number, each in requests.items()}).encode()


def decode_requests(data: bytes) -> dict[int, Request]:
    message = Message.decode(data)
    return {
        each["number"]: Request(
            message.tensors[str(each["number"])],
            Sampling(**{**each["sampling"], "stop": tuple(each["sampling"]["stop"])}),
            each["seed"],
        )
        for each in message.header["requests"]
    }


def encode_answers(answers: Mapping[int, Completion | BaseException]) -> bytes:
    """What became of requests, by their numbers."""
    header: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for number, answer in answers.items():
        if isinstance(answer, BaseException):
            header[str(number)] = {"error": str(answer) or type(answer).__name__, "kind": type(answer).__name__}
            continue
        parts = {name: getattr(answer, name) for name in TENSORS}
        about = {name: getattr(answer, name) for name in ("finish", "first_slot", "fingerprint")}
        if (trace := answer.routing) is not None:
            parts |= {f"trace.{name}": getattr(trace, name) for name in TRACE}
            about["trace"] = {"layers": trace.layers, "num_experts": trace.num_experts}
            about["spans"] = [dataclasses.astuple(span) for span in trace.spans]
        header[str(number)] = about
        tensors |= {f"{number}.{name}": part for name, part in parts.items() if part is not None}
    return Message({"answers": header}, tensors).encode()


def decode_answers(data: bytes) -> dict[int, Completion | Exception]:
    message = Message.decode(data)
    return {int(number): _answer(number, about, message.tensors) for number, about in message.header["answers"].items()}


def _answer(number: str, about: dict[str, Any], tensors: dict[str, Tensor]) -> Completion | Exception:
    if "error" in about:
        kind = ERRORS.get(about["kind"])
        return kind(about["error"]) if kind else TrainingError(f"{about['kind']}: {about['error']}")
    routing = None
    if "trace" in about:
        routing = RoutingTrace(
            tensors[f"{number}.trace.ids"],
            tensors[f"{number}.trace.valid"],
            tuple(about["trace"]["layers"]),
            about["trace"]["num_experts"],
            tuple(RouteSpan(*span) for span in about["spans"]),
            tensors.get(f"{number}.trace.weights"),
        )
    return Completion(
        tensors[f"{number}.token_ids"],
        tensors[f"{number}.logp"],
        tensors[f"{number}.version"],
        about["finish"],
        routing,
        about["first_slot"],
        tensors.get(f"{number}.top_ids"),
        tensors.get(f"{number}.top_logp"),
        about["fingerprint"],
    )
