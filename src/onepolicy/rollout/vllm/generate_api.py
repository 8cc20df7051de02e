"""Requests to /inference/v1/generate and their replies, which are checked field by field: nothing behind can tell a
wrong one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.config.base import short_repr
from onepolicy.replay.checks import RouteSpec, check_trace
from onepolicy.replay.payloads.vllm import RoutePayloadFormat, request_trace
from onepolicy.rollout.servers.replies import (
    SMALLEST_LOGP,
    MalformedReply,
    get_count,
    get_field,
    get_token_ids,
    is_number,
    logprob_tensor,
    max_reply_bytes,
    top_tokens_tensors,
)
from onepolicy.types import MAX_LOGP, Completion, FinishReason, RoutingTrace, Sampling

NO_LOGP = -9999.0  # what vLLM writes for a log-probability it does not have, and for minus infinity
PREFIX = "token_id:"
LONGEST_ID = 10  # digits of a token id
WIDEST_ID = 4  # bytes of an expert's id, at most


def sampling_params(sampling: Sampling, seed: int, *, first: int, vocab: int) -> dict[str, Any]:
    """vLLM's sampling_params. first: slot whose routes are the first wanted."""
    asked = sampling.top_logprobs
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "stop_token_ids": list(sampling.stop),
        "ignore_eos": True,  # only our stop tokens stop
        "seed": seed,
        "logprobs": min(asked + 1, vocab)
        if asked
        else 0,  # vLLM cuts the list behind the sampled token, its first
        "detokenize": False,
        "routed_experts_prompt_start": first,
    }


def resumed_seed(seed: int, done: int) -> int:
    """Seed of a request's rest after `done` tokens: its first numbers must not be those of the beginning again."""
    return int(np.random.SeedSequence([seed, done]).generate_state(1, np.uint64)[0] >> np.uint64(1))


@dataclass(frozen=True, slots=True)
class ReplyParser:
    """How this server's replies are read. vocab: token ids it may name; depth: decoder layers."""

    vocab: int
    depth: int
    route_spec: RouteSpec | None
    contract: RoutePayloadFormat

    def parse(
        self, reply: Any, *, prompt: int, first: int, sampling: Sampling, version: int
    ) -> Completion:
        """What a request of `prompt` tokens for routes from slot `first` sampled, "aborted" if it was interrupted.
        Malformed for anything but a complete answer."""
        choices = get_field(reply, "choices", list)
        if len(choices) != 1 or not isinstance(choices[0], dict):
            raise MalformedReply(f"expected one choice, got {len(choices)}")
        choice = choices[0]
        tokens = get_token_ids(choice, "token_ids", vocab=self.vocab)
        logp, top_ids, top_logp = _logp(choice, tokens, self.vocab, sampling.top_logprobs)
        finish = _finish(get_field(choice, "finish_reason", str), tokens, sampling)
        usage = get_field(reply, "usage", dict)
        counted = (
            get_field(usage, "prompt_tokens", int),
            get_field(usage, "completion_tokens", int),
        )
        if counted != (prompt, len(tokens)):
            raise MalformedReply(
                f"usage says {short_repr(counted[0])} + {short_repr(counted[1])} tokens, "
                f"but {prompt} were sent and {len(tokens)} came back"
            )
        routing = None
        if self.route_spec is not None and tokens:
            cached = get_count(
                get_field(usage, "prompt_tokens_details", dict), "cached_tokens", prompt
            )
            routing = self._routing(reply, prompt, len(tokens), cached, first, version)
        return Completion(
            torch.tensor(tokens, dtype=torch.int32),
            logp,
            torch.full((len(tokens),), version, dtype=torch.int32),
            finish,
            routing,
            first,
            top_ids=top_ids,
            top_logp=top_logp,
        )

    def most_bytes(self, *, prompt: int, sampling: Sampling) -> int:
        """The most bytes a reply to this request can have."""
        routes = 0
        if self.route_spec is not None:
            routes = (prompt + sampling.max_tokens) * self.depth * self.route_spec.top_k * WIDEST_ID
        per_token = 2 + sampling.top_logprobs + 1  # the token, its own entry and the list behind it
        return max_reply_bytes(
            tokens=sampling.max_tokens, path=prompt, per_token=per_token, routes=routes
        )

    def _routing(
        self,
        reply: Mapping[str, Any],
        prompt: int,
        completion: int,
        cached: int,
        first: int,
        version: int,
    ) -> RoutingTrace:
        rules = self.route_spec
        assert rules is not None
        try:
            rows = self.contract.read_reply(reply, 0)
            if rows is not None and (rows < 0).any():
                raise MalformedReply(
                    "routed_experts: a negative id; vLLM writes zeros where nothing was captured"
                )
            trace = request_trace(
                rows,
                self.contract,
                prompt=prompt,
                completion=completion,
                cached=cached,
                route_spec=rules,
                depth=self.depth,
                version=version,
                first=first,
            )
        except UsageError as error:
            raise MalformedReply(str(error)) from error
        expected = prompt + completion - 1 - first
        if trace is None or len(trace) != expected:
            found = "none" if trace is None else len(trace)
            raise MalformedReply(
                f"routed_experts: {expected} rows were due from slot {first} on, got {found}"
            )
        check_reply_routes(trace, rules)
        return trace


def check_reply_routes(trace: RoutingTrace, rules: RouteSpec) -> None:
    """Malformed for routes that cannot be this model's, or of which no row was captured."""
    if len(trace) and not trace.valid.any():
        raise MalformedReply("routed_experts: no row was captured, all of them are negative")
    try:
        check_trace(
            trace,
            layers=rules.layers,
            num_experts=rules.num_experts,
            top_k=rules.top_k,
            name="routed_experts",
        )
    except UsageError as error:
        raise MalformedReply(str(error)) from error


def _logp(
    choice: Mapping[str, Any], tokens: list[int], vocab: int, asked: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Of the sampled tokens [n], and ids and log-probabilities [n, asked] of the likeliest ones."""
    content = get_field(get_field(choice, "logprobs", dict), "content", list)
    if len(content) != len(tokens):
        raise MalformedReply(f"logprobs: {len(content)} for {len(tokens)} tokens")
    values, rows = [], []
    for token, entry in zip(tokens, content, strict=True):
        found, value = _entry(entry, vocab)
        if found != token:
            raise MalformedReply(f"logprobs: of token {found} where {token} was sampled")
        if value == NO_LOGP:
            raise MalformedReply(f"logprobs: the sampled token {token} has none")
        values.append(value)
        if asked:
            rows.append([_entry(each, vocab) for each in get_field(entry, "top_logprobs", list)])
    logp = logprob_tensor(values, "logprobs")
    if not asked:
        return logp, None, None
    ids, top = top_tokens_tensors(rows, asked, "top_logprobs")
    return logp, ids, top.masked_fill(top == NO_LOGP, -torch.inf)


def _entry(entry: Any, vocab: int) -> tuple[int, float]:
    if not isinstance(entry, dict):
        raise MalformedReply(f"logprobs: expected an object, got {short_repr(entry)}")
    name = get_field(entry, "token", str)
    value: Any = entry.get("logprob")
    digits = name.removeprefix(PREFIX)
    plain = digits.isascii() and digits.isdecimal() and len(digits) <= LONGEST_ID
    if not name.startswith(PREFIX) or not plain or int(digits) >= vocab:
        raise MalformedReply(f"logprobs: expected {PREFIX}ID, got {name[:60]!r}")
    if not is_number(value) or not SMALLEST_LOGP <= value <= MAX_LOGP:
        raise MalformedReply(
            f"logprobs: {short_repr(value)} is no log-probability (token {digits})"
        )
    return int(digits), float(value)


def _finish(reason: str, tokens: list[int], sampling: Sampling) -> FinishReason:
    """Does the way it ended fit the tokens? An abort that came after the last token changes nothing."""
    stopped = bool(tokens) and tokens[-1] in sampling.stop
    full = len(tokens) == sampling.max_tokens
    if len(tokens) > sampling.max_tokens or any(token in sampling.stop for token in tokens[:-1]):
        raise MalformedReply(
            f"token_ids: goes on after its end ({len(tokens)} of at most {sampling.max_tokens} tokens)"
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
