"""Requests to vLLM's /inference/v1/generate, and checks of every field of its replies.

Nothing after these checks could detect a wrong reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NotRequired

import numpy as np
import torch
from pydantic import Field, StringConstraints
from torch import Tensor
from typing_extensions import TypedDict

from onepolicy.config import TrainingError, UsageError
from onepolicy.replay.payloads.vllm import NO_LOGP, RoutePayloadFormat, request_trace
from onepolicy.rollout.remote.dialect import ModelShape, Request
from onepolicy.rollout.remote.replies import (
    Count,
    MalformedReply,
    Reply,
    Text,
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
from onepolicy.support.trace import SupportTrace, likeliest_needed
from onepolicy.types import Completion, RoutingTrace, Sampling

TOKEN_PREFIX = "token_id:"


class _Entry(TypedDict):
    token: Annotated[str, StringConstraints(pattern=rf"^{TOKEN_PREFIX}[0-9]{{1,10}}$")]
    logprob: float


class _SampledEntry(_Entry):
    top_logprobs: NotRequired[Annotated[list[_Entry], Field(fail_fast=True)]]


class _LogProbs(Reply):
    content: Annotated[list[_SampledEntry], Field(fail_fast=True)]


class _Choice(Reply):
    token_ids: TokenIds
    logprobs: _LogProbs
    finish_reason: str
    # of a server with --enable-return-sampling-mask (Model Runner V2)
    sampling_mask: Annotated[list[TokenIds], Field(fail_fast=True)] | None = None


class _CacheUse(Reply):
    cached_tokens: Count | None = None


class _Usage(Reply):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _CacheUse | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that were not computed."""
        if self.prompt_tokens_details is None:
            return None
        return self.prompt_tokens_details.cached_tokens


class _GenerateReply(Reply):
    choices: Annotated[list[_Choice], Field(min_length=1, max_length=1)]
    usage: _Usage
    model: Text | None = None


def requested_logprobs(sampling: Sampling, vocab: int) -> int:
    """Return how many likeliest tokens a request asks for with their log-probabilities.

    vLLM's are those after top_p, top_k and min_p, so enough of them are the support.
    """
    wanted = sampling.top_logprobs
    if sampling.support:
        assert sampling.top_k, "a rule of the settings bounds the support"
        wanted = max(wanted, min(likeliest_needed(sampling.top_k), vocab))
    return wanted


def sampling_params(sampling: Sampling, seed: int, *, first: int, vocab: int) -> dict[str, Any]:
    """Return vLLM's sampling_params. first: first slot whose routes are returned."""
    logprobs = requested_logprobs(sampling, vocab)
    if logprobs:
        logprobs = min(logprobs + 1, vocab)  # the sampled token takes one of them
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_tokens,
        "stop_token_ids": list(sampling.stop),
        "ignore_eos": True,  # only our stop tokens end a sequence
        "seed": seed,
        "logprobs": logprobs,
        "detokenize": False,
        "routed_experts_prompt_start": first,
    }


def resumed_seed(seed: int, done: int) -> int:
    """Return the seed of a request that is resumed after `done` tokens.

    It must not draw the numbers of the beginning again.
    """
    state = np.random.SeedSequence([seed, done]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def parse_reply(
    reply: Any, request: Request, shape: ModelShape, payload_format: RoutePayloadFormat
) -> Completion:
    """Check a reply and return its tokens.

    Raises MalformedReply for anything but a complete reply to `request`, and TrainingError if the
    reply names another adapter.
    """
    read = _GenerateReply.read(reply)
    choice, usage, sampling = read.choices[0], read.usage, request.sampling
    tokens, n, prompt = choice.token_ids, len(choice.token_ids), len(request.path)
    check_token_ids("token_ids", tokens, shape.vocab)
    wanted = requested_logprobs(sampling, shape.vocab)
    logp, top_ids, top_logp = _logprobs(choice.logprobs.content, tokens, shape.vocab, wanted)
    check_end(tokens, choice.finish_reason, sampling, other_stops=False)
    check_token_counts((usage.prompt_tokens, usage.completion_tokens), prompt, n)
    routing = None
    if shape.route_spec is not None and tokens:
        cached = usage.cached_tokens
        if cached is None:
            raise MalformedReply("usage.prompt_tokens_details.cached_tokens is missing")
        check_count("usage.prompt_tokens_details.cached_tokens", cached, prompt)
        routing = _routing(reply, request, shape, payload_format, completion=n, cached=cached)
    adapter, version = _adapter(read.model, request)
    return Completion(
        torch.tensor(tokens, dtype=torch.int32),
        logp,
        torch.full((n,), version, dtype=torch.int32),
        finish_of(choice.finish_reason),
        routing,
        request.first_row,
        adapter=adapter,
        **_top_and_support(top_ids, top_logp, sampling, choice.sampling_mask),
    )


def _routing(
    reply: Any,
    request: Request,
    shape: ModelShape,
    payload_format: RoutePayloadFormat,
    *,
    completion: int,
    cached: int,
) -> RoutingTrace:
    route_spec, prompt, first = shape.route_spec, len(request.path), request.first_row
    assert route_spec is not None
    try:
        rows = payload_format.read_reply(reply, 0)
        if rows is not None and (rows < 0).any():
            raise MalformedReply(
                "routed_experts: a negative id; vLLM writes zeros where nothing was captured"
            )
        trace = request_trace(
            rows,
            payload_format,
            prompt=prompt,
            completion=completion,
            cached=cached,
            route_spec=route_spec,
            depth=shape.depth,
            version=request.version,
            first=first,
        )
    except UsageError as error:
        raise MalformedReply(str(error)) from error
    expected, found = prompt + completion - 1 - first, "none"
    if trace is not None:
        found = str(len(trace))
    if trace is None or len(trace) != expected:
        raise MalformedReply(
            f"routed_experts: {expected} rows were due from slot {first} on, got {found}"
        )
    if len(trace) and not trace.valid.any():
        raise MalformedReply("routed_experts: no row was captured, all of them are negative")
    check_routes(trace, route_spec)
    return trace


def _adapter(told: str | None, request: Request) -> tuple[str | None, int]:
    """Return the name and the version of the adapter that the reply names, if any.

    Raises TrainingError if the request named another.
    """
    if request.adapter is not None and told is None:
        raise MalformedReply("model is missing, which names the adapter")
    name, at, version = (told or "").rpartition("@")
    if request.adapter is None:
        if at and "/" not in name and version.isdecimal():
            return name, request.version
        return None, request.version
    if told != request.adapter:
        raise TrainingError(
            f"rollout.engine.url: the vLLM server was asked for the adapter {request.adapter!r}, "
            f"but its reply names {(told or '')[:200]!r}: another adapter, or the frozen weights, "
            "sampled"
        )
    return name, int(version)


def top_and_support(
    ids: Tensor | None,
    logp: Tensor | None,
    sampling: Sampling,
    mask: Sequence[Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Return those of top_ids, top_logp and support that the sampling asks for, by these names.

    ids, logp: [n, k] of the likeliest tokens, most likely first; None if k is 0. mask: vLLM's own
    sets (`sampling_mask`), if it returns them. Raises UsageError if these are others, or if there
    are none and the likeliest are too few to be the whole support.
    """
    found: dict[str, Any] = {}
    if ids is None or logp is None:
        return found
    if sampling.support:
        found["support"] = _support(ids, logp, sampling, mask)
    k = sampling.top_logprobs
    if k:
        found |= {"top_ids": ids[:, :k].contiguous(), "top_logp": logp[:, :k].contiguous()}
    return found


def _support(
    ids: Tensor, logp: Tensor, sampling: Sampling, mask: Sequence[Sequence[int]] | None
) -> SupportTrace:
    own = None
    if mask is not None:
        own = SupportTrace.from_sets(mask)
        if len(own) != len(ids):
            raise UsageError(f"sampling_mask: {len(own)} sets for {len(ids)} tokens")
    try:
        listed = SupportTrace.from_logp(ids, logp)
    except UsageError:
        if own is None or sampling.support_logp:
            raise
        return own  # it has every token that ties at top_k, too
    if own is not None and own != listed.without_logp():
        raise UsageError(
            "sampling_mask: its sets are not the tokens with a log-probability; vLLM's sampler and "
            "its log-probabilities disagree"
        )
    if not sampling.support_logp:
        listed = listed.without_logp()
    return listed


def _top_and_support(
    ids: Tensor | None,
    logp: Tensor | None,
    sampling: Sampling,
    mask: list[list[int]] | None,
) -> dict[str, Any]:
    for row in mask or []:
        if not row:
            raise MalformedReply("sampling_mask: an empty set, but every token was drawn from one")
    try:
        return top_and_support(ids, logp, sampling, mask)
    except UsageError as error:
        raise MalformedReply(str(error)) from error


def _logprobs(
    content: list[_SampledEntry], tokens: list[int], vocab: int, k: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return logp [n] of the sampled tokens, and top_ids and top_logp [n, k], None if k is 0."""
    if len(content) != len(tokens):
        raise MalformedReply(f"logprobs: {len(content)} for {len(tokens)} tokens")
    for token, entry in zip(tokens, content, strict=True):
        found = _token_of(entry)
        if found != token:
            raise MalformedReply(f"logprobs: of token {found} where {token} was sampled")
        if entry["logprob"] == NO_LOGP:
            raise MalformedReply(f"logprobs: the sampled token {token} has none")
    logp = logprob_tensor([entry["logprob"] for entry in content], "logprobs")
    if not k:
        return logp, None, None
    rows = [
        [(_token_of(each), each["logprob"]) for each in entry.get("top_logprobs", [])]
        for entry in content
    ]
    top_ids, top_logp = top_tokens_tensors(rows, k, vocab, "top_logprobs")
    return logp, top_ids, top_logp.masked_fill(top_logp == NO_LOGP, -torch.inf)


def _token_of(entry: _Entry) -> int:
    return int(entry["token"].removeprefix(TOKEN_PREFIX))
