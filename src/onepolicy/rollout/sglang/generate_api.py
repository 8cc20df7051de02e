"""Requests to SGLang 0.5.23's native `/generate`, and checks of its replies. No connection here.

`routed_experts` is base64 of int32 bytes without a header. Its shape follows from the model's
config and from the rule that a path of N tokens has N - 1 rows. If the server was not started to
record routes, it leaves the key out, with status 200. Rows of cached prefixes are filled in.
`weight_versions` are spans of output tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.errors import short_repr
from onepolicy.replay.axes import trace_from
from onepolicy.replay.checks import RouteSpec, check_trace
from onepolicy.replay.payloads.sglang import ID_BYTES, route_ids
from onepolicy.rollout.servers.replies import (
    MIN_LOGP,
    MalformedReply,
    get_count,
    get_field,
    get_token_ids,
    is_number,
    logprob_tensor,
    max_reply_bytes,
    top_tokens_tensors,
)
from onepolicy.support.trace import SupportTrace
from onepolicy.types import MAX_LOGP, RouteSource, RouteSpan, RoutingTrace, Sampling

MAX_RETRACTIONS = 10**6  # of one request
MASK_BYTES = 12  # of JSON for one token id of a sampling mask, at most

Segment = tuple[int, int, RouteSource, int]
"""start, stop, source and weight version of routing rows."""
VersionRun = tuple[int, int, int]
"""start, end and weight version of output tokens."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of the model, against which replies are checked."""

    vocab: int
    depth: int  # decoder layers
    route_spec: RouteSpec | None  # None: requests ask for no routes


@dataclass(frozen=True, slots=True)
class SGLangRequest:
    """A request to sample `sampling.max_tokens` tokens after `path`."""

    path: list[int]
    sampling: Sampling
    seed: int
    first_row: int  # of the routes to return
    version: int  # weight version at the time of the request
    prefix_key: str  # requests with the same key share prefixes
    adapter: str | None = None  # that SGLang samples with, as the server names it

    def body(self, model: ModelShape) -> dict[str, Any]:
        """Return the JSON body."""
        sampling = self.sampling
        top_k = -1  # the whole vocabulary
        if sampling.top_k or uses_top_k_or_top_p(sampling):
            top_k = kept_tokens(sampling, model.vocab)
        body: dict[str, Any] = {
            "input_ids": self.path,
            "sampling_params": {
                "max_new_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": top_k,
                "stop_token_ids": list(sampling.stop),
                "ignore_eos": not sampling.stop,  # with it, SGLang ignores stop_token_ids too
                "sampling_seed": self.seed,
            },
            "return_logprob": True,
            "logprob_start_len": -1,  # of output tokens only
            "top_logprobs_num": sampling.top_logprobs,
            # for log-probabilities of the distribution that top_k and top_p leave
            "return_sampling_mask": uses_top_k_or_top_p(sampling),
            "extra_key": self.prefix_key,
        }
        if self.adapter is not None:
            body["lora_path"] = self.adapter  # SGLang's field for a name, too
        if model.route_spec is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": self.first_row}
        return body

    def max_reply_bytes(self, model: ModelShape) -> int:
        """Return the most bytes that a reply to this request may have."""
        sampling, routes, mask = self.sampling, 0, 0
        if model.route_spec is not None:
            rows = len(self.path) + sampling.max_tokens
            routes = rows * model.depth * model.route_spec.top_k * ID_BYTES
        if uses_top_k_or_top_p(sampling):
            mask = sampling.max_tokens * kept_tokens(sampling, model.vocab) * MASK_BYTES
        per_token = 3 + sampling.top_logprobs  # the token, its two entries and the top tokens
        return mask + max_reply_bytes(
            tokens=sampling.max_tokens, path=len(self.path), per_token=per_token, routes=routes
        )


def uses_top_k_or_top_p(sampling: Sampling) -> bool:
    """Return whether top_p or top_k excludes tokens.

    They do not for a greedy token, whose log-probability is that of the whole distribution.
    """
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)


def kept_tokens(sampling: Sampling, vocabulary: int) -> int:
    """Return the most tokens that top_k keeps. Without one, or above all, it keeps all."""
    return min(sampling.top_k or vocabulary, vocabulary)


@dataclass(frozen=True, slots=True)
class SGLangReply:
    """The tokens of one reply: a whole completion, or its part before an interruption."""

    token_ids: Tensor  # [n] int32
    logp: Tensor  # [n] float32
    version: Tensor  # [n] int32
    aborted: bool
    top_ids: Tensor | None  # [n, k] int32
    top_logp: Tensor | None  # [n, k] float32
    routing: RoutingTrace | None  # rows of path + tokens from request.first_row on
    support: SupportTrace | None = None  # if the request asks for it


def parse_reply(
    reply: Any, request: SGLangRequest, model: ModelShape, version_of: Callable[[str], int]
) -> SGLangReply:
    """Check a reply and return its tokens.

    version_of: returns the weight version of the server's weights id, and raises for weights of
    another run. Raises MalformedReply for anything but a complete reply to `request`.
    """
    meta = get_field(reply, "meta_info", dict)
    tokens = get_token_ids(reply, "output_ids", vocab=model.vocab)
    aborted = _finish_reason(meta, tokens, request) == "abort"
    logp = _logp(meta, tokens, request)
    runs = _version_runs(meta, len(tokens), version_of)
    _check_order(runs, request)
    if tokens:
        _check_token_counts(meta, len(request.path), len(tokens))
    version = [v for start, end, v in runs for _ in range(start, end)]
    top_ids, top_logp = _top_tokens(meta, len(tokens), request.sampling.top_logprobs, model.vocab)
    routing = None
    if model.route_spec is not None and tokens:
        routing = _trace(meta, runs, request, model, model.route_spec)
    return SGLangReply(
        torch.tensor(tokens, dtype=torch.int32),
        logp,
        torch.tensor(version, dtype=torch.int32),
        aborted,
        top_ids,
        top_logp,
        routing,
        _support(meta, len(tokens), request.sampling, model.vocab),
    )


def _check_token_counts(meta: dict, prompt: int, completion: int) -> None:
    counts = get_field(meta, "prompt_tokens", int), get_field(meta, "completion_tokens", int)
    if counts != (prompt, completion):
        raise MalformedReply(
            f"it counts {short_repr(counts[0])} + {short_repr(counts[1])} tokens, but {prompt} "
            f"were sent and {completion} came"
        )


def _finish_reason(meta: dict, tokens: list[int], request: SGLangRequest) -> str:
    """Return the finish reason. Raise MalformedReply if it contradicts the tokens."""
    reason = get_field(get_field(meta, "finish_reason", dict), "type", str)
    if reason not in ("stop", "length", "abort"):
        raise MalformedReply(f"finish_reason {reason[:60]!r} is none of stop, length, abort")
    n, limit = len(tokens), request.sampling.max_tokens
    goes_on = any(token in request.sampling.stop for token in tokens[:-1])
    wrong_length = (reason == "length" and n != limit) or (reason == "stop" and not n)
    if n > limit or goes_on or wrong_length:
        raise MalformedReply(
            f"{n} tokens with finish_reason {reason!r} do not end where they should "
            f"(max_new_tokens {limit})"
        )
    return reason


def _logp(meta: dict, tokens: list[int], request: SGLangRequest) -> Tensor:
    """Return the log-probabilities [n] float32 under the distribution sampled from."""
    name = "output_token_logprobs"
    pairs = [_logprob_entry(entry, name) for entry in get_field(meta, name, list)]
    if [token for _, token in pairs] != tokens:
        raise MalformedReply(f"{name} are not those of output_ids, token by token")
    values = [value for value, _ in pairs]
    if uses_top_k_or_top_p(request.sampling) and tokens:
        name = "output_token_sampling_logprobs"
        values = get_field(meta, name, list)
        if len(values) != len(tokens):
            raise MalformedReply(f"{len(values)} {name} for {len(tokens)} tokens")
    return logprob_tensor(values, name)


def _support(meta: dict, n: int, sampling: Sampling, vocab: int) -> SupportTrace | None:
    """Return the tokens that top_k and top_p left for each of n tokens, None if not asked for."""
    if not sampling.support:
        return None
    name = "output_token_sampling_mask"
    if not n:
        return SupportTrace.missing(0)
    masks = get_field(meta, name, list)
    if len(masks) != n:
        raise MalformedReply(f"{len(masks)} {name} for {n} tokens")
    sets = [get_token_ids({name: mask}, name, vocab=vocab) for mask in masks]
    try:
        return SupportTrace.from_sets(sets)
    except UsageError as error:
        raise MalformedReply(f"{name}: {error}") from error


def _top_tokens(meta: dict, n: int, k: int, vocab: int) -> tuple[Tensor | None, Tensor | None]:
    """Return ids and log-probabilities [n, k] of the most likely tokens, None if k is 0."""
    if not k:
        return None, None
    name = "output_top_logprobs"
    rows = get_field(meta, name, list)
    if len(rows) != n or any(type(row) is not list or len(row) != k for row in rows):
        raise MalformedReply(f"{name} are not {n} rows of {k}")
    pairs = [[_logprob_entry(entry, name) for entry in row] for row in rows]
    for value, token in (pair for row in pairs for pair in row):
        if not 0 <= token < vocab:
            raise MalformedReply(f"{name}: {short_repr(token)} is no token id in 0..{vocab - 1}")
        if not is_number(value) or not MIN_LOGP <= value <= MAX_LOGP:
            raise MalformedReply(f"{name}: {short_repr(value)} is no log-probability")
    return top_tokens_tensors([[(token, value) for value, token in row] for row in pairs], k, name)


def _logprob_entry(entry: Any, name: str) -> tuple[Any, int]:
    """Return the log-probability and the id of [log-probability, token id, text]."""
    if type(entry) is not list or len(entry) < 2 or type(entry[1]) is not int:
        raise MalformedReply(f"{name}: {short_repr(entry)} is no [log-probability, token id, text]")
    return entry[0], entry[1]


def _version_runs(meta: dict, n: int, version_of: Callable[[str], int]) -> list[VersionRun]:
    """Return the weight versions of the n tokens as runs in order.

    Runs leave no gap. Only a reply without tokens may have an empty run.
    """
    spans = get_field(meta, "weight_versions", list)
    runs: list[VersionRun] = []
    covered = 0
    for span in spans:
        start, end = get_count(span, "start", n), get_count(span, "end", n)
        if start != covered or (end == start and n):
            break
        runs.append((start, end, version_of(get_field(span, "version", str))))
        covered = end
    if covered != n or len(runs) != len(spans) or (n and not runs):
        raise MalformedReply(
            f"weight_versions {short_repr(spans)} do not cover {n} tokens one after the other"
        )
    return runs


def _check_order(runs: Sequence[VersionRun], request: SGLangRequest) -> None:
    """Raise MalformedReply for tokens of weights that were replaced before the request."""
    versions = [request.version, *(version for start, end, version in runs if start < end)]
    if versions != sorted(versions):
        raise MalformedReply(
            f"weight_versions: {short_repr(versions[1:])}, in this order, of a request that was "
            f"sent with version {versions[0]}"
        )


def _trace(
    meta: dict,
    runs: Sequence[VersionRun],
    request: SGLangRequest,
    model: ModelShape,
    route_spec: RouteSpec,
) -> RoutingTrace:
    """Return the routes of the path from request.first_row on."""
    prompt, n, first_row = len(request.path), runs[-1][1], request.first_row
    rows = prompt + n - 1 - first_row
    cached, retractions = _cache_counts(meta, prompt, n)
    segments, (foreign_start, foreign_stop) = _row_origins(runs, request, cached, retractions)
    valid = torch.ones(rows, dtype=torch.bool)
    valid[max(foreign_start - first_row, 0) : max(foreign_stop - first_row, 0)] = False
    trace = _parse_routes(meta, valid, model, route_spec)
    spans = []
    for start, stop, source, version in segments:
        first, last = max(start - first_row, 0), min(stop - first_row, rows)
        if first < last:
            spans.append(RouteSpan(first, last - first, source, version))
    return RoutingTrace(trace.ids, trace.valid, trace.layers, trace.num_experts, tuple(spans))


def _cache_counts(meta: dict, prompt: int, completion: int) -> tuple[int, int]:
    """Return the number of cached tokens, and the number of the request's retractions."""
    if meta.get("routed_experts") is None:
        raise MalformedReply(
            "SGLang returned no routed_experts with status 200; restart it with "
            "--enable-return-routed-experts"
        )
    retractions = get_count(meta, "num_retractions", MAX_RETRACTIONS)
    cached = get_count(meta, "cached_tokens", (prompt + completion) * (retractions + 1))
    if cached > prompt and not retractions:
        raise MalformedReply(
            f"cached_tokens is {cached}, expected 0 to {prompt}, the tokens of the prompt"
        )
    return cached, retractions


def _parse_routes(
    meta: dict, valid: Tensor, model: ModelShape, route_spec: RouteSpec
) -> RoutingTrace:
    """Return the routes as a trace without spans. valid: [rows] bool."""
    layers, num_experts, top_k = route_spec.layers, route_spec.num_experts, route_spec.top_k
    try:
        ids = route_ids(meta["routed_experts"], rows=len(valid), depth=model.depth, top_k=top_k)
        trace = trace_from(
            ids, layers=layers, depth=model.depth, num_experts=num_experts, axis="all", valid=valid
        )
        check_trace(
            trace, layers=layers, num_experts=num_experts, top_k=top_k, name="routed_experts"
        )
    except UsageError as error:
        raise MalformedReply(str(error)) from error
    return trace


def _row_origins(
    runs: Sequence[VersionRun], request: SGLangRequest, cached: int, retractions: int
) -> tuple[list[Segment], tuple[int, int]]:
    """Return the segments of all rows of the path, and the range of rows not to be replayed.

    Row r feeds token r. So from the last prompt token on, it belongs to the sampled token after it.
    SGLang prefills a retracted request again together with its sampled tokens, and returns the
    rows of that prefill. If the weights changed in between, the rows of older tokens come from
    weights that did not sample them. The trainer must route those tokens itself.
    """
    prompt, (changed, end, newest) = len(request.path), runs[-1]
    if not retractions:
        # Requests sent under one version share prefixes, made by its weights or newer ones.
        segments: list[Segment] = [
            (0, cached, "cache", request.version),
            (cached, prompt, "prefill", runs[0][2]),
        ]
        for start, stop, version in runs:
            first = max(prompt, prompt - 1 + start)
            segments.append((first, prompt - 1 + stop, "decode", version))
        return segments, (0, 0)
    if not changed:  # out of memory; SGLang does not return which rows were computed again
        return [(0, prompt + end, "prefill", newest)], (0, 0)
    prefilled = prompt + changed  # with the tokens sampled before the newest weights
    segments = [
        (0, prefilled, "prefill", newest),
        (prefilled, prompt + end, "decode", newest),
    ]
    return segments, (prompt - 1, prefilled - 1)
