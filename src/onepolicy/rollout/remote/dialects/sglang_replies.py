"""Requests to SGLang 0.5.23's native `/generate`, and checks of its replies. No connection here.

`routed_experts` is base64 of int32 bytes without a header. Its shape follows from the model's
config and from the rule that a path of N tokens has N - 1 rows. If the server was not started to
record routes, it leaves the key out, with status 200. Rows of cached prefixes are filled in.
`weight_versions` are spans of output tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.errors import short_repr
from onepolicy.replay.axes import trace_from
from onepolicy.replay.checks import RouteSpec
from onepolicy.replay.payloads.sglang import route_ids
from onepolicy.rollout.remote.dialect import ModelShape, Request
from onepolicy.rollout.remote.replies import (
    LogProbs,
    MalformedReply,
    Reply,
    TokenIds,
    check_count,
    check_end,
    check_routes,
    check_token_counts,
    check_token_ids,
    finish_of,
    logprob_tensor,
    top_tokens_tensors,
)
from onepolicy.support.trace import SupportTrace
from onepolicy.types import Completion, RouteSource, RouteSpan, RoutingTrace, Sampling

Segment = tuple[int, int, RouteSource, int]
"""start, stop, source and weight version of routing rows."""
VersionRun = tuple[int, int, int]
"""start, end and weight version of output tokens."""


def _without_text(entry: Any) -> Any:
    """Return log-probability and token id of [log-probability, token id, text]."""
    if type(entry) is not list or len(entry) < 2:
        raise ValueError("is no [log-probability, token id, text]")
    return tuple(entry[:2])


Entry = Annotated[tuple[float, int], BeforeValidator(_without_text)]
Entries = Annotated[list[Entry], Field(fail_fast=True)]


class _FinishReason(Reply):
    type: str


class _Span(Reply):
    start: int
    end: int
    version: str


class _Meta(Reply):
    finish_reason: _FinishReason
    weight_versions: Annotated[list[_Span], Field(fail_fast=True)]
    output_token_logprobs: Entries
    output_token_sampling_logprobs: LogProbs | None = None
    output_token_sampling_mask: Annotated[list[TokenIds], Field(fail_fast=True)] | None = None
    output_top_logprobs: Annotated[list[Entries | None], Field(fail_fast=True)] | None = None
    prompt_tokens: int = -1
    completion_tokens: int = -1
    cached_tokens: int | None = None
    num_retractions: Annotated[int, Field(ge=0, le=10**6)] | None = None
    routed_experts: Any = None


class _GenerateReply(Reply):
    meta_info: _Meta
    output_ids: TokenIds


def request_body(request: Request, shape: ModelShape, prefix_key: str) -> dict[str, Any]:
    """Return the JSON body. prefix_key: requests with the same one share prefixes."""
    sampling = request.sampling
    top_k = -1  # the whole vocabulary
    if sampling.top_k or uses_top_k_or_top_p(sampling):
        top_k = kept_tokens(sampling, shape.vocab)
    body: dict[str, Any] = {
        "input_ids": request.path,
        "sampling_params": {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": top_k,
            "stop_token_ids": list(sampling.stop),
            "ignore_eos": not sampling.stop,  # with it, SGLang ignores stop_token_ids too
            "sampling_seed": request.seed,
        },
        "return_logprob": True,
        "logprob_start_len": -1,  # of output tokens only
        "top_logprobs_num": sampling.top_logprobs,
        # for log-probabilities of the distribution that top_k and top_p leave
        "return_sampling_mask": uses_top_k_or_top_p(sampling),
        "extra_key": prefix_key,
    }
    if request.adapter is not None:
        body["lora_path"] = request.adapter  # SGLang's field for a name, too
    if shape.route_spec is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": request.first_row}
    return body


def uses_top_k_or_top_p(sampling: Sampling) -> bool:
    """Return whether top_p or top_k excludes tokens.

    They do not for a greedy token, whose log-probability is that of the whole distribution.
    """
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)


def kept_tokens(sampling: Sampling, vocabulary: int) -> int:
    """Return the most tokens that top_k keeps. Without one, or above all, it keeps all."""
    return min(sampling.top_k or vocabulary, vocabulary)


def parse_reply(
    reply: Any, request: Request, shape: ModelShape, version_of: Callable[[str], int]
) -> Completion:
    """Check a reply and return its tokens.

    version_of: returns the weight version of the server's weights id, and raises for weights of
    another run. Raises MalformedReply for anything but a complete reply to `request`.
    """
    read = _GenerateReply.read(reply)
    meta, tokens, sampling = read.meta_info, read.output_ids, request.sampling
    n, reason = len(tokens), meta.finish_reason.type
    check_token_ids("output_ids", tokens, shape.vocab)
    check_end(tokens, reason, sampling, other_stops=True)
    logp = _logp(meta, tokens, sampling)
    runs = _version_runs(meta.weight_versions, n, version_of)
    _check_order(runs, request)
    if tokens:
        counts = meta.prompt_tokens, meta.completion_tokens
        check_token_counts(counts, len(request.path), n)
    version = [v for start, end, v in runs for _ in range(start, end)]
    top_ids, top_logp = _top_tokens(meta, n, sampling.top_logprobs, shape.vocab)
    routing = None
    if shape.route_spec is not None and tokens:
        routing = _trace(meta, runs, request, shape, shape.route_spec)
    return Completion(
        torch.tensor(tokens, dtype=torch.int32),
        logp,
        torch.tensor(version, dtype=torch.int32),
        finish_of(reason),
        routing,
        request.first_row,
        top_ids,
        top_logp,
        support=_support(meta, n, sampling, shape.vocab),
    )


def _logp(meta: _Meta, tokens: list[int], sampling: Sampling) -> Tensor:
    """Return the log-probabilities [n] float32 under the distribution sampled from."""
    name = "output_token_logprobs"
    if [token for _, token in meta.output_token_logprobs] != tokens:
        raise MalformedReply(f"{name} are not those of output_ids, token by token")
    values = [value for value, _ in meta.output_token_logprobs]
    if uses_top_k_or_top_p(sampling) and tokens:
        name = "output_token_sampling_logprobs"
        values = meta.output_token_sampling_logprobs or []
        if len(values) != len(tokens):
            raise MalformedReply(f"{len(values)} {name} for {len(tokens)} tokens")
    return logprob_tensor(values, name)


def _support(meta: _Meta, n: int, sampling: Sampling, vocab: int) -> SupportTrace | None:
    """Return the tokens that top_k and top_p left for each of n tokens, None if not asked for."""
    if not sampling.support:
        return None
    name, masks = "output_token_sampling_mask", meta.output_token_sampling_mask or []
    if not n:
        return SupportTrace.missing(0)
    if len(masks) != n:
        raise MalformedReply(f"{len(masks)} {name} for {n} tokens")
    for mask in masks:
        check_token_ids(name, mask, vocab)
    try:
        return SupportTrace.from_sets(masks)
    except UsageError as error:
        raise MalformedReply(f"{name}: {error}") from error


def _top_tokens(meta: _Meta, n: int, k: int, vocab: int) -> tuple[Tensor | None, Tensor | None]:
    """Return ids and log-probabilities [n, k] of the most likely tokens, None if k is 0."""
    if not k:
        return None, None
    name, rows = "output_top_logprobs", [row or [] for row in meta.output_top_logprobs or []]
    if len(rows) != n or any(len(row) != k for row in rows):
        raise MalformedReply(f"{name} are not {n} rows of {k}")
    pairs = [[(token, value) for value, token in row] for row in rows]
    return top_tokens_tensors(pairs, k, vocab, name)


def _version_runs(
    spans: Sequence[_Span], n: int, version_of: Callable[[str], int]
) -> list[VersionRun]:
    """Return the weight versions of the n tokens as runs in order.

    Runs leave no gap. Only a reply without tokens may have an empty run.
    """
    runs: list[VersionRun] = []
    covered = 0
    for span in spans:
        check_count("weight_versions: end", span.end, n)
        if span.start != covered or span.end < covered or (span.end == covered and n):
            break
        runs.append((covered, span.end, version_of(span.version)))
        covered = span.end
    if covered != n or len(runs) != len(spans) or (n and not runs):
        shown = short_repr([(span.start, span.end) for span in spans])
        raise MalformedReply(f"weight_versions {shown} do not cover {n} tokens one after the other")
    return runs


def _check_order(runs: Sequence[VersionRun], request: Request) -> None:
    """Raise MalformedReply for tokens of weights that were replaced before the request."""
    versions = [request.version, *(version for start, end, version in runs if start < end)]
    if versions != sorted(versions):
        raise MalformedReply(
            f"weight_versions: {short_repr(versions[1:])}, in this order, of a request that was "
            f"sent with version {versions[0]}"
        )


def _trace(
    meta: _Meta,
    runs: Sequence[VersionRun],
    request: Request,
    shape: ModelShape,
    route_spec: RouteSpec,
) -> RoutingTrace:
    """Return the routes of the path from request.first_row on."""
    prompt, n, first_row = len(request.path), runs[-1][1], request.first_row
    rows = prompt + n - 1 - first_row
    cached, retractions = _cache_counts(meta, prompt, n)
    segments, (foreign_start, foreign_stop) = _row_origins(runs, request, cached, retractions)
    valid = torch.ones(rows, dtype=torch.bool)
    valid[max(foreign_start - first_row, 0) : max(foreign_stop - first_row, 0)] = False
    trace = _parse_routes(meta, valid, shape, route_spec)
    spans = []
    for start, stop, source, version in segments:
        first, last = max(start - first_row, 0), min(stop - first_row, rows)
        if first < last:
            spans.append(RouteSpan(first, last - first, source, version))
    return RoutingTrace(trace.ids, trace.valid, trace.layers, trace.num_experts, tuple(spans))


def _cache_counts(meta: _Meta, prompt: int, completion: int) -> tuple[int, int]:
    """Return the number of cached tokens, and the number of the request's retractions."""
    if meta.routed_experts is None:
        raise MalformedReply(
            "SGLang returned no routed_experts with status 200; restart it with "
            "--enable-return-routed-experts"
        )
    cached, retractions = meta.cached_tokens, meta.num_retractions
    if cached is None or retractions is None:
        raise MalformedReply("meta_info.cached_tokens or num_retractions is missing")
    most = prompt  # all tokens of the prompt
    if retractions:
        most = (prompt + completion) * (retractions + 1)
    check_count("cached_tokens", cached, most)
    return cached, retractions


def _parse_routes(
    meta: _Meta, valid: Tensor, shape: ModelShape, route_spec: RouteSpec
) -> RoutingTrace:
    """Return the routes as a trace without spans. valid: [rows] bool."""
    layers, experts, depth = route_spec.layers, route_spec.num_experts, shape.depth
    try:
        ids = route_ids(meta.routed_experts, rows=len(valid), depth=depth, top_k=route_spec.top_k)
        trace = trace_from(
            ids, layers=layers, depth=depth, num_experts=experts, axis="all", valid=valid
        )
    except UsageError as error:
        raise MalformedReply(str(error)) from error
    check_routes(trace, route_spec)
    return trace


def _row_origins(
    runs: Sequence[VersionRun], request: Request, cached: int, retractions: int
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
