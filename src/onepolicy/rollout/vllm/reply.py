"""Requests to /inference/v1/generate and their replies, which are checked field by field: nothing behind can tell a
wrong one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from onepolicy.config import UsageError
from onepolicy.replay.checks import RouteRules
from onepolicy.rollout.http import Malformed, field
from onepolicy.rollout.vllm.contract import Contract, trace_of
from onepolicy.types import Completion, Finish, RoutingTrace, Sampling

NO_LOGP = -9999.0  # what vLLM writes for a log-probability it does not have, and for minus infinity
PREFIX = "token_id:"


def parameters(sampling: Sampling, seed: int, *, first: int, vocab: int) -> dict[str, Any]:
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
        "logprobs": min(asked + 1, vocab) if asked else 0,  # vLLM cuts the list behind the sampled token, its first
        "detokenize": False,
        "routed_experts_prompt_start": first,
    }


def continued(seed: int, done: int) -> int:
    """Seed of a request's rest after `done` tokens: its first numbers must not be those of the beginning again."""
    return int(np.random.SeedSequence([seed, done]).generate_state(1, np.uint64)[0] >> np.uint64(1))


@dataclass(frozen=True, slots=True)
class Reader:
    """How this server's replies are read. vocab: token ids it may name; depth: decoder layers."""

    vocab: int
    depth: int
    routes: RouteRules | None
    contract: Contract

    def part(self, reply: Any, *, prompt: int, first: int, sampling: Sampling, version: int) -> Completion:
        """What a request of `prompt` tokens for routes from slot `first` sampled, "aborted" if it was interrupted.
        Malformed for anything but a complete answer."""
        choices = field(reply, "choices", list)
        if len(choices) != 1 or not isinstance(choices[0], dict):
            raise Malformed(f"expected one choice, got {len(choices)}")
        choice = choices[0]
        tokens = _tokens(choice, self.vocab)
        logp, top = _logp(choice, tokens, self.vocab, sampling.top_logprobs)
        finish = _finish(field(choice, "finish_reason", str), tokens, sampling)
        usage = field(reply, "usage", dict)
        if (usage.get("prompt_tokens"), usage.get("completion_tokens")) != (prompt, len(tokens)):
            raise Malformed(
                f"usage says {usage.get('prompt_tokens')} + {usage.get('completion_tokens')} tokens, "
                f"but {prompt} were sent and {len(tokens)} came back"
            )
        routing = None
        if self.routes is not None and tokens:
            cached = field(field(usage, "prompt_tokens_details", dict), "cached_tokens", int)
            routing = self._routing(reply, prompt, len(tokens), cached, first, version)
        asked = sampling.top_logprobs
        return Completion(
            torch.tensor(tokens, dtype=torch.int32),
            torch.tensor(logp, dtype=torch.float32),
            torch.full((len(tokens),), version, dtype=torch.int32),
            finish,
            routing,
            first,
            top_ids=torch.tensor([ids for ids, _ in top], dtype=torch.int32).view(-1, asked) if asked else None,
            top_logp=torch.tensor([each for _, each in top], dtype=torch.float32).view(-1, asked) if asked else None,
        )

    def _routing(
        self, reply: Mapping[str, Any], prompt: int, completion: int, cached: int, first: int, version: int
    ) -> RoutingTrace:
        assert self.routes is not None
        try:
            rows = self.contract.reply_rows(reply, 0)
            trace = trace_of(
                rows,
                self.contract,
                prompt=prompt,
                completion=completion,
                cached=cached,
                rules=self.routes,
                depth=self.depth,
                version=version,
                first=first,
            )
        except UsageError as error:
            raise Malformed(str(error)) from error
        expected = prompt + completion - 1 - first
        if trace is None or len(trace) != expected:
            found = "none" if trace is None else len(trace)
            raise Malformed(f"routed_experts: {expected} rows were due from slot {first} on, got {found}")
        return trace


def _tokens(choice: Mapping[str, Any], vocab: int) -> list[int]:
    tokens = field(choice, "token_ids", list)
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab:
            raise Malformed(f"token_ids: {str(token)[:60]!r} is no token id in 0..{vocab - 1}")
    return tokens


def _logp(
    choice: Mapping[str, Any], tokens: list[int], vocab: int, asked: int
) -> tuple[list[float], list[tuple[list[int], list[float]]]]:
    """Of the sampled tokens, and of the `asked` likeliest ones."""
    content = field(field(choice, "logprobs", dict), "content", list)
    if len(content) != len(tokens):
        raise Malformed(f"logprobs: {len(content)} for {len(tokens)} tokens")
    logp, top = [], []
    for token, entry in zip(tokens, content, strict=True):
        found, value = _entry(entry, vocab)
        if found != token:
            raise Malformed(f"logprobs: of token {found} where {token} was sampled")
        if value == NO_LOGP:
            raise Malformed(f"logprobs: the sampled token {token} has none")
        logp.append(value)
        if asked:
            top.append(_likeliest(field(entry, "top_logprobs", list), vocab, asked))
    return logp, top


def _likeliest(entries: list[Any], vocab: int, asked: int) -> tuple[list[int], list[float]]:
    """Of the sampled token and the likeliest ones, in no order that is relied on."""
    pairs = sorted((_entry(entry, vocab) for entry in entries), key=lambda pair: -pair[1])[:asked]
    if len(pairs) < asked:
        raise Malformed(f"top_logprobs: {len(pairs)} of {asked} tokens")
    return [i for i, _ in pairs], [-math.inf if p == NO_LOGP else p for _, p in pairs]


def _entry(entry: Any, vocab: int) -> tuple[int, float]:
    if not isinstance(entry, dict):
        raise Malformed(f"logprobs: expected an object, got {str(entry)[:60]!r}")
    name, value = field(entry, "token", str), entry.get("logprob")
    digits = name.removeprefix(PREFIX)
    if not name.startswith(PREFIX) or not (digits.isascii() and digits.isdecimal()) or int(digits) >= vocab:
        raise Malformed(f"logprobs: expected {PREFIX}ID, got {name[:60]!r}")
    if (
        isinstance(value, bool) or not isinstance(value, int | float) or not value <= 1e-4
    ):  # also NaN; rounding may leave a hair above 0
        raise Malformed(f"logprobs: {value!r} is no log-probability (token {digits})")
    return int(digits), float(value)


def _finish(reason: str, tokens: list[int], sampling: Sampling) -> Finish:
    """Does the way it ended fit the tokens? An abort that came after the last token changes nothing."""
    stopped = bool(tokens) and tokens[-1] in sampling.stop
    full = len(tokens) == sampling.max_tokens
    if len(tokens) > sampling.max_tokens or any(token in sampling.stop for token in tokens[:-1]):
        raise Malformed(f"token_ids: goes on after its end ({len(tokens)} of at most {sampling.max_tokens} tokens)")
    if stopped and reason in ("stop", "abort"):
        return "stop"
    if full and reason in ("length", "abort"):
        return "length"
    if reason == "abort":
        return "aborted"
    raise Malformed(f"finish_reason: {reason[:60]!r} after {len(tokens)} of {sampling.max_tokens} tokens")
