"""Requests to vLLM's /inference/v1/generate, and checks of every field of its replies.

Nothing after these checks could detect a wrong reply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.errors import short_repr
from onepolicy.replay.checks import RouteSpec, check_trace
from onepolicy.replay.payloads.vllm import RoutePayloadFormat, request_trace
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
from onepolicy.types import MAX_LOGP, Completion, FinishReason, RoutingTrace, Sampling

NO_LOGP = -9999.0  # vLLM's value for a missing log-probability, and for minus infinity
TOKEN_PREFIX = "token_id:"
MAX_ID_DIGITS = 10  # of a token id
MAX_EXPERT_ID_BYTES = 4
TIES = 16
"""Tokens asked for beside twice top_k, which keeps all that tie with its last one: logits of
bfloat16 have few values."""


def requested_logprobs(sampling: Sampling, vocab: int) -> int:
    """Return how many likeliest tokens a request asks for with their log-probabilities.

    vLLM's are those after top_p, top_k and min_p, so enough of them are the support.
    """
    wanted = sampling.top_logprobs
    if sampling.support:
        assert sampling.top_k, "a rule of the settings bounds the support"
        wanted = max(wanted, min(2 * sampling.top_k + TIES, vocab))
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


@dataclass(frozen=True, slots=True)
class ReplyParser:
    """The parser of one server's replies."""

    vocab: int
    depth: int  # decoder layers
    route_spec: RouteSpec | None
    payload_format: RoutePayloadFormat

    def parse(
        self, reply: Any, *, prompt: int, first: int, sampling: Sampling, version: int
    ) -> Completion:
        """Return the completion of a request with `prompt` tokens.

        first: first slot whose routes were asked for. finish is "aborted" if the request was
        interrupted. Raises MalformedReply for anything but a complete reply.
        """
        choices = get_field(reply, "choices", list)
        if len(choices) != 1 or not isinstance(choices[0], dict):
            raise MalformedReply(f"expected one choice, got {len(choices)}")
        choice = choices[0]
        tokens = get_token_ids(choice, "token_ids", vocab=self.vocab)
        wanted = requested_logprobs(sampling, self.vocab)
        logp, top_ids, top_logp = _logprobs(choice, tokens, self.vocab, wanted)
        finish = _finish_reason(get_field(choice, "finish_reason", str), tokens, sampling)
        usage = get_field(reply, "usage", dict)
        _check_token_counts(usage, prompt, len(tokens))
        routing = None
        if self.route_spec is not None and tokens:
            details = get_field(usage, "prompt_tokens_details", dict)
            cached = get_count(details, "cached_tokens", prompt)
            routing = self._routing(
                reply,
                self.route_spec,
                prompt=prompt,
                completion=len(tokens),
                cached=cached,
                first=first,
                version=version,
            )
        return Completion(
            torch.tensor(tokens, dtype=torch.int32),
            logp,
            torch.full((len(tokens),), version, dtype=torch.int32),
            finish,
            routing,
            first,
            **_top_and_support(top_ids, top_logp, sampling),
        )

    def max_reply_bytes(self, *, prompt: int, sampling: Sampling) -> int:
        """Return the most bytes that a reply to this request may have."""
        routes = 0
        if self.route_spec is not None:
            rows = prompt + sampling.max_tokens
            routes = rows * self.depth * self.route_spec.top_k * MAX_EXPERT_ID_BYTES
        wanted = requested_logprobs(sampling, self.vocab)
        per_token = 3 + wanted  # the token, its own entry and the top tokens
        return max_reply_bytes(
            tokens=sampling.max_tokens, path=prompt, per_token=per_token, routes=routes
        )

    def _routing(
        self,
        reply: Mapping[str, Any],
        route_spec: RouteSpec,
        *,
        prompt: int,
        completion: int,
        cached: int,
        first: int,
        version: int,
    ) -> RoutingTrace:
        try:
            rows = self.payload_format.read_reply(reply, 0)
            if rows is not None and (rows < 0).any():
                raise MalformedReply(
                    "routed_experts: a negative id; vLLM writes zeros where nothing was captured"
                )
            trace = request_trace(
                rows,
                self.payload_format,
                prompt=prompt,
                completion=completion,
                cached=cached,
                route_spec=route_spec,
                depth=self.depth,
                version=version,
                first=first,
            )
        except UsageError as error:
            raise MalformedReply(str(error)) from error
        expected = prompt + completion - 1 - first
        if trace is None:
            raise MalformedReply(
                f"routed_experts: {expected} rows were due from slot {first} on, got none"
            )
        if len(trace) != expected:
            raise MalformedReply(
                f"routed_experts: {expected} rows were due from slot {first} on, got {len(trace)}"
            )
        check_reply_routes(trace, route_spec)
        return trace


def _check_token_counts(usage: dict, prompt: int, completion: int) -> None:
    counts = get_field(usage, "prompt_tokens", int), get_field(usage, "completion_tokens", int)
    if counts != (prompt, completion):
        raise MalformedReply(
            f"usage says {short_repr(counts[0])} + {short_repr(counts[1])} tokens, "
            f"but {prompt} were sent and {completion} came back"
        )


def check_reply_routes(trace: RoutingTrace, route_spec: RouteSpec) -> None:
    """Raise MalformedReply for routes of another model, or if no row was captured."""
    if len(trace) and not trace.valid.any():
        raise MalformedReply("routed_experts: no row was captured, all of them are negative")
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


def top_and_support(ids: Tensor | None, logp: Tensor | None, sampling: Sampling) -> dict[str, Any]:
    """Return those of top_ids, top_logp and support that the sampling asks for, by these names.

    ids, logp: [n, k] of the likeliest tokens, most likely first; None if k is 0. Raises UsageError
    if there are too few of them to be the whole support.
    """
    found: dict[str, Any] = {}
    if ids is None or logp is None:
        return found
    if sampling.support:
        found["support"] = SupportTrace.from_logp(ids, logp)
    k = sampling.top_logprobs
    if k:
        found |= {"top_ids": ids[:, :k].contiguous(), "top_logp": logp[:, :k].contiguous()}
    return found


def _top_and_support(ids: Tensor | None, logp: Tensor | None, sampling: Sampling) -> dict[str, Any]:
    try:
        return top_and_support(ids, logp, sampling)
    except UsageError as error:
        raise MalformedReply(str(error)) from error


def _logprobs(
    choice: Mapping[str, Any], tokens: list[int], vocab: int, k: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return logp [n] of the sampled tokens, and top_ids and top_logp [n, k], None if k is 0."""
    content = get_field(get_field(choice, "logprobs", dict), "content", list)
    if len(content) != len(tokens):
        raise MalformedReply(f"logprobs: {len(content)} for {len(tokens)} tokens")
    values, rows = [], []
    for token, entry in zip(tokens, content, strict=True):
        found, value = _parse_entry(entry, vocab)
        if found != token:
            raise MalformedReply(f"logprobs: of token {found} where {token} was sampled")
        if value == NO_LOGP:
            raise MalformedReply(f"logprobs: the sampled token {token} has none")
        values.append(value)
        if k:
            top = get_field(entry, "top_logprobs", list)
            rows.append([_parse_entry(each, vocab) for each in top])
    logp = logprob_tensor(values, "logprobs")
    if not k:
        return logp, None, None
    top_ids, top_logp = top_tokens_tensors(rows, k, "top_logprobs")
    return logp, top_ids, top_logp.masked_fill(top_logp == NO_LOGP, -torch.inf)


def _parse_entry(entry: Any, vocab: int) -> tuple[int, float]:
    """Return token id and log-probability of {"token": "token_id:ID", "logprob": ...}."""
    if not isinstance(entry, dict):
        raise MalformedReply(f"logprobs: expected an object, got {short_repr(entry)}")
    name = get_field(entry, "token", str)
    value: Any = entry.get("logprob")
    digits = name.removeprefix(TOKEN_PREFIX)
    is_plain = digits.isascii() and digits.isdecimal() and len(digits) <= MAX_ID_DIGITS
    if not name.startswith(TOKEN_PREFIX) or not is_plain or int(digits) >= vocab:
        raise MalformedReply(f"logprobs: expected {TOKEN_PREFIX}ID, got {name[:60]!r}")
    if not is_number(value) or not MIN_LOGP <= value <= MAX_LOGP:
        raise MalformedReply(
            f"logprobs: {short_repr(value)} is no log-probability (token {digits})"
        )
    return int(digits), float(value)


def _finish_reason(reason: str, tokens: list[int], sampling: Sampling) -> FinishReason:
    """Return the finish reason. Raise MalformedReply if it contradicts the tokens.

    An abort after the last token changes nothing.
    """
    stopped = bool(tokens) and tokens[-1] in sampling.stop
    full = len(tokens) == sampling.max_tokens
    if len(tokens) > sampling.max_tokens or any(token in sampling.stop for token in tokens[:-1]):
        raise MalformedReply(
            f"token_ids: goes on after its end ({len(tokens)} of at most {sampling.max_tokens} "
            "tokens)"
        )
    if stopped and reason in ("stop", "abort"):
        return "stop"
    if full and reason in ("length", "abort"):
        return "length"
    if reason == "abort":
        return "aborted"
    raise MalformedReply(
        f"finish_reason: {reason[:60]!r} after {len(tokens)} of {sampling.max_tokens} tokens"
    )
