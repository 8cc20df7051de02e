"""What SGLang 0.5.23 is asked on its native `/generate`, and what its replies must be. Pure: no connection here.

`routed_experts` is base64 of int32 bytes without a header: the shape comes from the model's config and from the law
that a path of N tokens has N - 1 rows. The server leaves the key out, with status 200, if it was not started to record
them. Rows of prefixes from the cache are filled in. `weight_versions` are spans of output tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.config.base import short_repr
from onepolicy.replay.axes import trace_from
from onepolicy.replay.checks import RouteSpec, check_trace
from onepolicy.replay.payloads.sglang import ID_BYTES, route_ids
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
from onepolicy.types import MAX_LOGP, RouteSource, RouteSpan, RoutingTrace, Sampling

MOST_RETRACTIONS = 10**6  # of one request
MASK_BYTES = 12  # of JSON for one token id of a sampling mask, at most


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What replies are checked against."""

    vocab: int
    depth: int  # decoder layers
    route_spec: RouteSpec | None  # None: no routes are asked for


@dataclass(frozen=True, slots=True)
class SGLangRequest:
    """One request: sample `sampling.max_tokens` tokens after `path`."""

    path: list[int]
    sampling: Sampling
    seed: int
    first_row: int  # rows before it are known already
    submitted: int  # weight version when it was sent
    key: str  # prefixes are shared among requests with the same one

    def body(self, model: ModelShape) -> dict[str, Any]:
        sampling = self.sampling
        body: dict[str, Any] = {
            "input_ids": self.path,
            "sampling_params": {
                "max_new_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or (model.vocab if uses_top_k_or_top_p(sampling) else -1),
                "stop_token_ids": list(sampling.stop),
                "ignore_eos": not sampling.stop,  # it would switch stop_token_ids off as well
                "sampling_seed": self.seed,
            },
            "return_logprob": True,
            "logprob_start_len": -1,  # of output tokens only
            "top_logprobs_num": sampling.top_logprobs,
            "return_sampling_mask": uses_top_k_or_top_p(
                sampling
            ),  # log-probabilities of what top_k and top_p leave
            "extra_key": self.key,
        }
        if model.route_spec is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": self.first_row}
        return body

    def most_bytes(self, model: ModelShape) -> int:
        """The most bytes a reply to this request can have."""
        sampling, routes = self.sampling, 0
        if model.route_spec is not None:
            routes = (
                (len(self.path) + sampling.max_tokens)
                * model.depth
                * model.route_spec.top_k
                * ID_BYTES
            )
        mask = 0
        if uses_top_k_or_top_p(sampling):
            mask = sampling.max_tokens * (sampling.top_k or model.vocab) * MASK_BYTES
        per_token = 3 + sampling.top_logprobs  # the token, its own entries and the likeliest ones
        most = max_reply_bytes(
            tokens=sampling.max_tokens, path=len(self.path), per_token=per_token, routes=routes
        )
        return most + mask


def uses_top_k_or_top_p(sampling: Sampling) -> bool:
    """Do top_p or top_k leave out tokens? A greedy token is reported with its probability among all."""
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)


@dataclass(frozen=True, slots=True)
class SGLangReply:
    """One reply: a whole completion, or the tokens sampled until it was interrupted."""

    token_ids: Tensor  # [n] int32
    logp: Tensor  # [n] float32
    version: Tensor  # [n] int32
    aborted: bool
    top_ids: Tensor | None  # [n, k] int32
    top_logp: Tensor | None  # [n, k] float32
    routing: RoutingTrace | None  # rows of path + tokens from asked.first_row on


def parse_reply(
    reply: Any, asked: SGLangRequest, model: ModelShape, version_of: Callable[[str], int]
) -> SGLangReply:
    """version_of: weight version as the server names it -> ours; it raises for another's weights.

    Malformed for anything but a complete answer to `asked`.
    """
    meta = get_field(reply, "meta_info", dict)
    tokens = get_token_ids(reply, "output_ids", vocab=model.vocab)
    aborted = _finish(meta, tokens, asked) == "abort"
    n, fed = len(tokens), len(asked.path)
    logp = _logp(meta, tokens, asked)
    runs = _runs(meta, n, version_of)
    if n and (get_field(meta, "prompt_tokens", int), get_field(meta, "completion_tokens", int)) != (
        fed,
        n,
    ):
        counted = f"{short_repr(meta['prompt_tokens'])} + {short_repr(meta['completion_tokens'])}"
        raise MalformedReply(f"it counts {counted} tokens, but {fed} were sent and {n} came")
    version = torch.tensor(
        [v for start, end, v in runs for _ in range(start, end)], dtype=torch.int32
    )
    top_ids, top_logp = _top(meta, n, asked.sampling.top_logprobs, model.vocab)
    routing = None
    if model.route_spec is not None and n:
        routing = _trace(meta, runs, asked, model, model.route_spec)
    return SGLangReply(
        torch.tensor(tokens, dtype=torch.int32), logp, version, aborted, top_ids, top_logp, routing
    )


def _finish(meta: dict, tokens: list[int], asked: SGLangRequest) -> str:
    kind = get_field(get_field(meta, "finish_reason", dict), "type", str)
    if kind not in ("stop", "length", "abort"):
        raise MalformedReply(f"finish_reason {kind[:60]!r} is none of stop, length, abort")
    n, most = len(tokens), asked.sampling.max_tokens
    beyond = any(token in asked.sampling.stop for token in tokens[:-1])
    if n > most or beyond or (kind == "length" and n != most) or (kind == "stop" and not n):
        raise MalformedReply(
            f"{n} tokens with finish_reason {kind!r} do not end where they should (max_new_tokens {most})"
        )
    return kind


def _logp(meta: dict, tokens: list[int], asked: SGLangRequest) -> Tensor:
    """[n] float32, of the distribution that was sampled from."""
    name = "output_token_logprobs"
    pairs = [_pair(entry, name) for entry in get_field(meta, name, list)]
    if [token for _, token in pairs] != tokens:
        raise MalformedReply(f"{name} are not those of output_ids, token by token")
    values = [value for value, _ in pairs]
    if uses_top_k_or_top_p(asked.sampling) and tokens:
        name = "output_token_sampling_logprobs"
        values = get_field(meta, name, list)
        if len(values) != len(tokens):
            raise MalformedReply(f"{len(values)} {name} for {len(tokens)} tokens")
    return logprob_tensor(values, name)


def _top(meta: dict, n: int, asked: int, vocab: int) -> tuple[Tensor | None, Tensor | None]:
    if not asked:
        return None, None
    name = "output_top_logprobs"
    rows = get_field(meta, name, list)
    if len(rows) != n or any(type(row) is not list or len(row) != asked for row in rows):
        raise MalformedReply(f"{name} are not {n} rows of {asked}")
    pairs = [[_pair(entry, name) for entry in row] for row in rows]
    for value, token in (pair for row in pairs for pair in row):
        if not 0 <= token < vocab:
            raise MalformedReply(f"{name}: {short_repr(token)} is no token id in 0..{vocab - 1}")
        if not is_number(value) or not SMALLEST_LOGP <= value <= MAX_LOGP:
            raise MalformedReply(f"{name}: {short_repr(value)} is no log-probability")
    return top_tokens_tensors(
        [[(token, value) for value, token in row] for row in pairs], asked, name
    )


def _pair(entry: Any, name: str) -> tuple[Any, int]:
    """(log-probability, token id) of [log-probability, token id, text]."""
    if type(entry) is not list or len(entry) < 2 or type(entry[1]) is not int:
        raise MalformedReply(f"{name}: {short_repr(entry)} is no [log-probability, token id, text]")
    return entry[0], entry[1]


def _runs(meta: dict, n: int, version_of: Callable[[str], int]) -> list[tuple[int, int, int]]:
    """(start, end, version) of the n tokens, in order, without gaps. None is empty, but where there is no token."""
    spans = get_field(meta, "weight_versions", list)
    runs: list[tuple[int, int, int]] = []
    reached = 0
    for span in spans:
        start, end = get_count(span, "start", n), get_count(span, "end", n)
        if start != reached or (end == start and n):
            break
        runs.append((start, end, version_of(get_field(span, "version", str))))
        reached = end
    if reached != n or len(runs) != len(spans) or (n and not runs):
        raise MalformedReply(
            f"weight_versions {short_repr(spans)} do not cover {n} tokens one after the other"
        )
    return runs


def _trace(
    meta: dict,
    runs: Sequence[tuple[int, int, int]],
    asked: SGLangRequest,
    model: ModelShape,
    rules: RouteSpec,
) -> RoutingTrace:
    prompt, n = len(asked.path), runs[-1][1]
    rows = prompt + n - 1 - asked.first_row
    if "routed_experts" not in meta or meta["routed_experts"] is None:
        raise MalformedReply(
            "SGLang returned no routed_experts with status 200; restart it with --enable-return-routed-experts"
        )
    retractions = get_count(meta, "num_retractions", MOST_RETRACTIONS)
    cached = get_count(meta, "cached_tokens", (prompt + n) * (retractions + 1))
    if cached > prompt and not retractions:
        raise MalformedReply(
            f"cached_tokens is {cached}, expected 0 to {prompt}, the tokens of the prompt"
        )
    segments, foreign = _origin(runs, asked, cached, retractions)
    valid = torch.ones(rows, dtype=torch.bool)
    valid[max(foreign[0] - asked.first_row, 0) : max(foreign[1] - asked.first_row, 0)] = False
    try:
        ids = route_ids(meta["routed_experts"], rows=rows, depth=model.depth, top_k=rules.top_k)
        trace = trace_from(
            ids,
            layers=rules.layers,
            depth=model.depth,
            num_experts=rules.num_experts,
            axis="all",
            valid=valid,
        )
        check_trace(
            trace,
            layers=rules.layers,
            num_experts=rules.num_experts,
            top_k=rules.top_k,
            name="routed_experts",
        )
    except UsageError as error:
        raise MalformedReply(str(error)) from error
    spans = []
    for start, stop, source, version in segments:
        first, last = max(start - asked.first_row, 0), min(stop - asked.first_row, rows)
        if first < last:
            spans.append(RouteSpan(first, last - first, source, version))
    return RoutingTrace(trace.ids, trace.valid, trace.layers, trace.num_experts, tuple(spans))


def _origin(
    runs: Sequence[tuple[int, int, int]], asked: SGLangRequest, cached: int, retractions: int
) -> tuple[list[tuple[int, int, RouteSource, int]], tuple[int, int]]:
    """(start, stop, source, version) of all rows of the path, and the rows that must not be replayed.

    Row r feeds token r, so from the last prompt token on it belongs to the sampled token after it. A retracted request
    was prefilled again with what it had sampled, and its rows are those of that prefill. If the weights changed in
    between, rows of older tokens are of weights that did not sample them: the trainer has to route those itself.
    """
    prompt, (_, end, newest) = len(asked.path), runs[-1]
    if not retractions:
        decoded: list[tuple[int, int, RouteSource, int]] = [
            (max(prompt, prompt - 1 + start), prompt - 1 + stop, "decode", version)
            for start, stop, version in runs
        ]
        # prefixes are shared among requests sent under one version: of its weights, or of newer ones
        head: list[tuple[int, int, RouteSource, int]] = [
            (0, cached, "cache", asked.submitted),
            (cached, prompt, "prefill", runs[0][2]),
        ]
        return [*head, *decoded], (0, 0)
    changed = runs[-1][0]  # tokens sampled before the newest weights
    if not changed:  # out of memory: which rows were computed again, SGLang does not say
        return [(0, prompt + end, "prefill", newest)], (0, 0)
    again = prompt + changed
    return [(0, again, "prefill", newest), (again, prompt + end, "decode", newest)], (
        prompt - 1,
        again - 1,
    )
