"""What SGLang 0.5.23 is asked on its native `/generate`, and what its replies must be. Pure: no connection here.

`routed_experts` is base64 of int32 bytes without a header: the shape comes from the model's config and from the law
that a path of N tokens has N - 1 rows. The server leaves the key out, with status 200, if it was not started to record
them. Rows of prefixes from the cache are filled in. `weight_versions` are spans of output tokens.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onepolicy.config import TrainingError
from onepolicy.replay.axes import trace_from
from onepolicy.replay.checks import RouteRules
from onepolicy.rollout.http import Malformed, field
from onepolicy.types import RouteSource, RouteSpan, RoutingTrace, Sampling


@dataclass(frozen=True, slots=True)
class Model:
    """What replies are checked against."""

    vocab: int
    depth: int  # decoder layers
    routes: RouteRules | None  # None: no routes are asked for


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: sample `sampling.max_tokens` tokens after `path`."""

    path: list[int]
    sampling: Sampling
    seed: int
    first_row: int  # rows before it are known already
    submitted: int  # weight version when it was sent
    key: str  # prefixes are shared among requests with the same one

    def body(self, model: Model) -> dict[str, Any]:
        sampling = self.sampling
        body: dict[str, Any] = {
            "input_ids": self.path,
            "sampling_params": {
                "max_new_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or (model.vocab if is_narrowed(sampling) else -1),
                "stop_token_ids": list(sampling.stop),
                "ignore_eos": not sampling.stop,  # it would switch stop_token_ids off as well
                "sampling_seed": self.seed,
            },
            "return_logprob": True,
            "logprob_start_len": -1,  # of output tokens only
            "top_logprobs_num": sampling.top_logprobs,
            "return_sampling_mask": is_narrowed(sampling),  # log-probabilities of what top_k and top_p leave
            "extra_key": self.key,
        }
        if model.routes is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": self.first_row}
        return body


def is_narrowed(sampling: Sampling) -> bool:
    """Do top_p or top_k leave out tokens? A greedy token is reported with its probability among all."""
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)


@dataclass(frozen=True, slots=True)
class Part:
    """One reply: a whole completion, or the tokens sampled until it was interrupted."""

    token_ids: Tensor  # [n] int32
    logp: Tensor  # [n] float32
    version: Tensor  # [n] int32
    aborted: bool
    top_ids: Tensor | None  # [n, k] int32
    top_logp: Tensor | None  # [n, k] float32
    routing: RoutingTrace | None  # rows of path + tokens from asked.first_row on


def parse(reply: Any, asked: Asked, model: Model, version_of: Callable[[str], int]) -> Part:
    """version_of: weight version as the server names it -> ours.

    Malformed for a reply that is damaged or is not what was asked for; TrainingError or UsageError for one that another
    try would not change: no routes or another model's, log-probabilities that are no numbers, another's weights.
    """
    try:
        return _part(reply, asked, model, version_of)
    except (TypeError, KeyError, IndexError, AttributeError) as error:  # entries of lists that are not what they should
        raise Malformed(f"{type(error).__name__}: {error} in {str(reply)[:200]}") from error


def _part(reply: Any, asked: Asked, model: Model, version_of: Callable[[str], int]) -> Part:
    meta = field(reply, "meta_info", dict)
    tokens = field(reply, "output_ids", list)
    aborted = _finish(meta, tokens, asked, model) == "abort"
    n, fed = len(tokens), len(asked.path)
    logp = _logp(meta, tokens, asked)
    runs = _runs(meta, n, version_of)
    if n and (field(meta, "prompt_tokens", int), field(meta, "completion_tokens", int)) != (fed, n):
        raise Malformed(
            f"it counts {meta['prompt_tokens']} + {meta['completion_tokens']} tokens, but {fed} were sent and {n} came"
        )
    version = torch.tensor([v for start, end, v in runs for _ in range(start, end)], dtype=torch.int32)
    top_ids, top_logp = _top(meta, n, asked.sampling.top_logprobs)
    routing = None
    if model.routes is not None and n:
        routing = _trace(meta, runs, asked, model, model.routes)
    return Part(torch.tensor(tokens, dtype=torch.int32), logp, version, aborted, top_ids, top_logp, routing)


def _finish(meta: dict, tokens: list[int], asked: Asked, model: Model) -> str:
    if not all(type(token) is int and 0 <= token < model.vocab for token in tokens):
        raise Malformed(f"output_ids are not all token ids in 0..{model.vocab - 1}; is it this model's server?")
    kind = field(field(meta, "finish_reason", dict), "type", str)
    if kind not in ("stop", "length", "abort"):
        raise Malformed(f"finish_reason {kind!r} is none of stop, length, abort")
    n, most = len(tokens), asked.sampling.max_tokens
    beyond = any(token in asked.sampling.stop for token in tokens[:-1])
    if n > most or beyond or (kind == "length" and n != most) or (kind == "stop" and not n):
        raise Malformed(f"{n} tokens with finish_reason {kind!r} do not end where they should (max_new_tokens {most})")
    return kind


def _logp(meta: dict, tokens: list[int], asked: Asked) -> Tensor:
    """[n] float32, of the distribution that was sampled from."""
    entries = field(meta, "output_token_logprobs", list)
    if [entry[1] for entry in entries] != tokens:
        raise Malformed("output_token_logprobs are not those of output_ids, token by token")
    values = [entry[0] for entry in entries]
    if is_narrowed(asked.sampling) and tokens:
        values = field(meta, "output_token_sampling_logprobs", list)
        if len(values) != len(tokens):
            raise Malformed(f"{len(values)} output_token_sampling_logprobs for {len(tokens)} tokens")
    if not all(isinstance(value, float | int) and math.isfinite(value) for value in values):
        raise TrainingError(
            "the server's log-probabilities are not numbers: its weights or its kernels are broken for this model"
        )
    return torch.tensor(values, dtype=torch.float32)


def _top(meta: dict, n: int, asked: int) -> tuple[Tensor | None, Tensor | None]:
    if not asked:
        return None, None
    rows = field(meta, "output_top_logprobs", list)
    if len(rows) != n or any(len(row) != asked for row in rows):
        raise Malformed(f"output_top_logprobs are not {n} rows of {asked}")
    ids = torch.tensor([[entry[1] for entry in row] for row in rows], dtype=torch.int32).view(n, asked)
    return ids, torch.tensor([[entry[0] for entry in row] for row in rows], dtype=torch.float32).view(n, asked)


def _runs(meta: dict, n: int, version_of: Callable[[str], int]) -> list[tuple[int, int, int]]:
    """(start, end, version) of the n tokens, in order, without gaps."""
    spans = field(meta, "weight_versions", list)
    runs = [(span["start"], span["end"], version_of(span["version"])) for span in spans]
    bounds = [0, *(end for _, end, _ in runs)]
    if [start for start, _, _ in runs] != bounds[:-1] or bounds[-1] != n or (n and not runs):
        raise Malformed(f"weight_versions {spans} do not cover {n} tokens one after the other")
    return runs


def _trace(
    meta: dict, runs: Sequence[tuple[int, int, int]], asked: Asked, model: Model, rules: RouteRules
) -> RoutingTrace:
    if not isinstance(meta.get("routed_experts"), str):
        raise TrainingError(
            "SGLang returned no routed_experts with status 200; restart it with --enable-return-routed-experts"
        )
    prompt, n = len(asked.path), runs[-1][1]
    rows = prompt + n - 1 - asked.first_row
    try:
        data = base64.b64decode(meta["routed_experts"], validate=True)
    except binascii.Error as error:
        raise Malformed(f"routed_experts is not base64 ({error})") from error
    if len(data) != rows * model.depth * rules.top_k * 4:
        raise Malformed(
            f"routed_experts has {len(data)} bytes; {rows} rows x {model.depth} decoder layers x {rules.top_k} experts "
            f"in int32 have {rows * model.depth * rules.top_k * 4}"
        )
    ids = torch.frombuffer(bytearray(data), dtype=torch.int32).view(rows, model.depth, rules.top_k)
    segments, foreign = _origin(runs, asked, field(meta, "cached_tokens", int), field(meta, "num_retractions", int))
    valid = torch.ones(rows, dtype=torch.bool)
    valid[max(foreign[0] - asked.first_row, 0) : max(foreign[1] - asked.first_row, 0)] = False
    trace = trace_from(
        ids, layers=rules.layers, depth=model.depth, num_experts=rules.num_experts, axis="all", valid=valid
    )
    spans = []
    for start, stop, source, version in segments:
        first, last = max(start - asked.first_row, 0), min(stop - asked.first_row, rows)
        if first < last:
            spans.append(RouteSpan(first, last - first, source, version))
    return RoutingTrace(trace.ids, trace.valid, trace.layers, trace.num_experts, tuple(spans))


def _origin(
    runs: Sequence[tuple[int, int, int]], asked: Asked, cached: int, retractions: int
) -> tuple[list[tuple[int, int, RouteSource, int]], tuple[int, int]]:
    """(start, stop, source, version) of all rows of the path, and the rows that must not be replayed.

    Row r feeds token r, so from the last prompt token on it belongs to the sampled token after it. A retracted request
    was prefilled again with what it had sampled, and its rows are those of that prefill. If the weights changed in
    between, rows of older tokens are of weights that did not sample them: the trainer has to route those itself.
    """
    prompt, (_, end, newest) = len(asked.path), runs[-1]
    if not retractions:
        decoded: list[tuple[int, int, RouteSource, int]] = [
            (max(prompt, prompt - 1 + start), prompt - 1 + stop, "decode", version) for start, stop, version in runs
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
    return [(0, again, "prefill", newest), (again, prompt + end, "decode", newest)], (prompt - 1, again - 1)
