"""Models of an engine server's replies, with the bounds of every field.

For any reply these functions return a value or raise MalformedReply. `EngineClient` then retries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeAlias

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from onepolicy.config import UsageError, printable
from onepolicy.errors import short_repr
from onepolicy.replay.checks import RouteSpec, check_trace
from onepolicy.rollout.remote.bodies import MalformedReply
from onepolicy.types import MAX_LOGP, FinishReason, RoutingTrace, Sampling

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MAX_DEPTH = 32  # nesting levels of a server's description
MAX_RANKS = 4096  # of one server; a process group takes memory for each
MIN_LOGP = -1e6  # nats; a lower value is a constant for a token that cannot be sampled
EXPECTED = {
    "int_type": "int",
    "string_type": "str",
    "list_type": "list",
    "dict_type": "an object",
    "model_type": "an object",
}
"""pydantic's name of an error -> what was expected."""
BROKEN = (
    "if this repeats, the log-probabilities are not numbers because the server's weights or "
    "kernels are broken for this model"
)

Text: TypeAlias = Annotated[str, AfterValidator(printable)]
"""A text that errors may quote."""
Count: TypeAlias = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds: TypeAlias = Annotated[list[int], Field(fail_fast=True)]
LogProbs: TypeAlias = Annotated[list[float], Field(fail_fast=True)]


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """The adapters that a server takes. A vLLM server sends it as JSON."""

    rank: int  # the largest
    layers: list[str]  # last parts of the names of layers that may have one; SGLang: or "all"


class Reply(BaseModel):
    """A reply, or an object in one. Fields that we do not use may be there too."""

    model_config = ConfigDict(strict=True, frozen=True)

    @classmethod
    def read(cls, reply: Any, name: str = "the reply") -> Self:
        """Return the checked reply. name: of it in errors."""
        try:
            return cls.model_validate(reply)
        except ValidationError as error:
            raise MalformedReply(_describe(error.errors(include_url=False)[0], name)) from None


def _describe(error: ErrorDetails, name: str) -> str:
    """Return the place, the value and what was expected there."""
    place = ".".join(map(str, error["loc"])) or name
    kind, value, bounds = error["type"], error["input"], error.get("ctx", {})
    shown = short_repr(value)
    if kind == "missing":
        return f"{place} is missing"
    if kind in EXPECTED:
        return f"{place} is {type(value).__name__}, expected {EXPECTED[kind]}"
    if kind == "greater_than_equal":
        return f"{place} is {shown}, expected {bounds['ge']} or more"
    if kind == "less_than_equal":
        return f"{place} is {shown}, expected {bounds['le']} or less"
    if kind == "value_error":
        return f"{place}: {shown} {bounds['error']}"
    if kind == "float_type":  # every float of a reply is one
        return f"{place}: {shown} is no log-probability; {BROKEN}"
    return f"{place} is {shown}: {error['msg']}"


def make_printable(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Return a JSON value with printable text, which errors may quote.

    Raises MalformedReply if it is nested more than `depth` levels.
    """
    if depth < 0:
        raise MalformedReply(f"its description is nested more than {MAX_DEPTH} levels")
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [make_printable(each, depth - 1) for each in value]
    if isinstance(value, dict):
        return {printable(name): make_printable(each, depth - 1) for name, each in value.items()}
    return value


class Results(Reply):
    """The results of a vLLM server's workers."""

    results: list[Any]


class _Model(Reply):
    id: str
    parent: str | None = None


class Models(Reply):
    """A server's list of models. Adapters have a parent."""

    data: Annotated[list[_Model], Field(fail_fast=True)]

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters."""
        return [model.id for model in self.data if model.parent is not None]


def check_success(reply: Any) -> None:
    """Raise MalformedReply unless the reply confirms success."""
    if not isinstance(reply, dict) or reply.get("success") is not True:
        raise MalformedReply(short_repr(reply))


def check_count(name: str, value: int, maximum: int) -> None:
    """Raise MalformedReply unless the value is in 0..maximum."""
    if not 0 <= value <= maximum:
        raise MalformedReply(f"{name} is {short_repr(value)}, expected 0 to {maximum}")


def check_token_ids(name: str, ids: Sequence[int], vocab: int) -> None:
    """Raise MalformedReply for an id outside of the vocabulary."""
    for value in ids:
        if not 0 <= value < vocab:
            raise MalformedReply(
                f"{name}: {short_repr(value)!r} is no token id in 0..{vocab - 1}; is it this "
                "model's server?"
            )


def check_token_counts(told: tuple[int, int], prompt: int, completion: int) -> None:
    """Raise MalformedReply unless the reply counts as many tokens as were sent and came."""
    if told != (prompt, completion):
        raise MalformedReply(
            f"it counts {short_repr(told[0])} + {short_repr(told[1])} tokens, but {prompt} were "
            f"sent and {completion} came"
        )


def check_end(tokens: Sequence[int], reason: str, sampling: Sampling, *, other_stops: bool) -> None:
    """Raise MalformedReply if the reason for the end contradicts the tokens.

    An abort may come after the last token. other_stops: the server may also stop at a token that
    is not in `sampling.stop`.
    """
    if reason not in ("stop", "length", "abort"):
        raise MalformedReply(f"finish_reason: {reason[:60]!r} is none of stop, length, abort")
    n, limit = len(tokens), sampling.max_tokens
    goes_on = n > limit or any(token in sampling.stop for token in tokens[:-1])
    stopped = bool(n) and (other_stops or tokens[-1] in sampling.stop)
    if goes_on or (reason == "stop" and not stopped) or (reason == "length" and n != limit):
        raise MalformedReply(
            f"finish_reason: {reason!r} after {n} of {limit} tokens, which do not end where they "
            "should"
        )


def finish_of(reason: str) -> FinishReason:
    """Return a reply's reason as the finish of a part. The reason was checked by `check_end`."""
    reasons: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}
    return reasons[reason]


def logprob_tensor(values: list[float], name: str) -> Tensor:
    """Return the log-probabilities of sampled tokens as [n] float32.

    Raises MalformedReply for a value that is none.
    """
    for value in values:
        if not math.isfinite(value):
            raise MalformedReply(f"{name}: {value} is no log-probability; {BROKEN}")
        if not MIN_LOGP <= value <= MAX_LOGP:
            raise MalformedReply(f"{name}: {value} is no log-probability of a sampled token")
    return torch.tensor(values, dtype=torch.float32)


def top_tokens_tensors(
    rows: list[list[tuple[int, float]]], k: int, vocab: int, name: str
) -> tuple[Tensor, Tensor]:
    """Return ids [n, k] int32 and log-probabilities [n, k] float32, most likely first.

    rows: [n] of at least k pairs (id, log-probability), in any order. Raises MalformedReply for
    fewer than k tokens, a duplicate, or what is no token id or log-probability.
    """
    for token, value in (pair for row in rows for pair in row):
        if not 0 <= token < vocab:
            raise MalformedReply(f"{name}: {short_repr(token)} is no token id in 0..{vocab - 1}")
        if not MIN_LOGP <= value <= MAX_LOGP:  # also if it is NaN
            raise MalformedReply(f"{name}: {value} is no log-probability")
    top = [sorted(row, key=lambda pair: -pair[1])[:k] for row in rows]
    for row in top:
        if len(row) < k:
            raise MalformedReply(f"{name}: {len(row)} of {k} tokens")
        if len({token for token, _ in row}) < k:
            raise MalformedReply(f"{name}: a token is listed twice")
    ids = torch.tensor([[token for token, _ in row] for row in top], dtype=torch.int32)
    logp = torch.tensor([[value for _, value in row] for row in top], dtype=torch.float32)
    return ids.view(len(rows), k), logp.view(len(rows), k)


def check_routes(trace: RoutingTrace, route_spec: RouteSpec) -> None:
    """Raise MalformedReply for routes of another model."""
    try:
        check_trace(
            trace,
            layers=route_spec.layers,
            num_experts=route_spec.num_experts,
            top_k=route_spec.top_k,
            name="routed_experts",
        )
    except UsageError as error:
        raise MalformedReply(str(error)) from error
