"""Models whose state is more than keys and values (linear attention, Mamba, convolutions): use the model's own cache.

Such state cannot be shared, shifted or refilled row by row, so requests whose prompts are equally long run as one batch
from prefill to the last token of the longest. Slower than the slab, and correct.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.replay.contexts import RouteRecorder
from onepolicy.replay.routers import Routers
from onepolicy.rollout.hf.sampler import BatchSampling, sample_tokens, uniform_numbers
from onepolicy.rollout.hf.scheduler import SequenceRequest
from onepolicy.types import Completion, FinishReason, RoutingTrace, id_dtype, route_spans


class StaticBatch:
    """A `Batch` of equally long prompts over whatever cache the model makes for itself."""

    def __init__(
        self,
        model: PreTrainedModel,
        routers: Routers | None,
        *,
        max_num_seqs: int,
        combine_weights: bool = False,
    ) -> None:
        self.model, self.routers, self.max_num_seqs, self._keep_combine_weights = (
            model,
            routers,
            max_num_seqs,
            combine_weights,
        )
        self.device = next(model.parameters()).device
        self._tape: RouteRecorder | None = None
        self.clear()

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    @contextmanager
    def step_context(self) -> Iterator[None]:
        if self.routers is None:
            yield
            return
        with self.routers.record(weights=self._keep_combine_weights) as tape:
            self._tape = tape
            try:
                yield
            finally:
                self._tape = None

    def clear(self) -> None:
        self._requests: list[SequenceRequest] = []
        self._open: set[int] = set()  # indices into _requests still running
        self._cache: Any = None
        self._tokens: list[Tensor] = []  # each [B]
        self._logp: list[Tensor] = []
        self._routes: list[Tensor] = []  # each [B, fed, L, K]
        self._combine_weights: list[Tensor] = []  # the same of their combine weights, if kept

    def admit(self, waiting: deque[SequenceRequest]) -> None:
        """When idle, start the first waiting request and all others with as long a prompt."""
        while waiting and waiting[0].future.cancelled():
            waiting.popleft()
        if self._requests or not waiting:
            return
        same = [
            r
            for r in waiting
            if len(r.prompt) == len(waiting[0].prompt) and not r.future.cancelled()
        ]
        self._requests = same[: self.max_num_seqs]
        for request in self._requests:
            waiting.remove(request)
        self._open = set(range(len(self._requests)))
        self._uniform = self._all_uniforms()
        self._sampling = BatchSampling.from_requests(
            [r.sampling for r in self._requests], self.device
        )

    def step(self, version: int) -> list[tuple[SequenceRequest, Completion]]:
        if not self._requests:
            return []
        self._sample_next()
        newest, count = self._tokens[-1].tolist(), len(self._tokens)
        done = []
        for i in sorted(self._open):
            request = self._requests[i]
            if count == request.sampling.max_tokens or newest[i] in request.sampling.stop:
                self._open.discard(i)
                done.append((request, self._completion(i, version)))
            elif request.future.cancelled():
                self._open.discard(i)
        if not self._open:
            self.clear()
        return done

    def abort_running(self, version: int) -> list[tuple[SequenceRequest, Completion]]:
        """What the running requests have sampled so far, between two steps. They run no longer."""
        taken = [
            (self._requests[i], self._completion(i, version, "aborted")) for i in sorted(self._open)
        ]
        self.clear()
        return taken

    @torch.inference_mode()
    def _sample_next(self) -> None:
        """Feed the prompts or the newest tokens, and sample one token for every row, ended ones included."""
        if self._tokens:
            ids = self._tokens[-1][:, None]
        else:
            ids = torch.from_numpy(np.stack([r.prompt for r in self._requests])).to(self.device)
        out = self.model(
            input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        self._cache = out.past_key_values
        if self._tape is not None:
            routes = torch.stack(self._tape.pop_ids(), 1)  # [B * fed, L, K]
            self._routes.append(routes.unflatten(0, ids.shape))
            weights = self._tape.pop_weights()
            if weights is not None:
                self._combine_weights.append(torch.stack(weights, 1).unflatten(0, ids.shape))
        uniform = self._uniform[:, min(len(self._tokens), self._uniform.shape[1] - 1)]
        new = sample_tokens(out.logits[:, -1].float(), uniform, self._sampling)
        self._tokens.append(new.tokens)
        self._logp.append(new.logp)
        for i in self._open:
            self._requests[i].add_top_logprobs(new.top_ids, new.top_logp, i)

    def _all_uniforms(self) -> Tensor:  # [B, longest max_tokens] float64
        longest = max(r.sampling.max_tokens for r in self._requests)
        table = np.zeros((len(self._requests), longest))
        for row, request in zip(table, self._requests, strict=True):
            count = request.sampling.max_tokens
            row[:count] = uniform_numbers(request.seed, count, request.drawn)
        return torch.from_numpy(table).to(self.device)

    def _completion(self, i: int, version: int, finish: FinishReason | None = None) -> Completion:
        tokens = torch.tensor([int(t[i]) for t in self._tokens], dtype=torch.int32)
        logp = torch.tensor([float(p[i]) for p in self._logp])
        versions = torch.full((len(tokens),), version, dtype=torch.int32)
        request = self._requests[i]
        trace, (top_ids, top_logp) = (
            self._trace(i, len(request.prompt), version),
            request.stack_top_logprobs(),
        )
        finish = finish or request.finish_reason(int(tokens[-1]))
        first = request.sampling.routes_from
        return Completion(
            tokens, logp, versions, finish, trace, first, top_ids=top_ids, top_logp=top_logp
        )

    def _trace(self, i: int, size: int, version: int) -> RoutingTrace | None:
        if self.routers is None:
            return None
        ids = (
            torch.cat([routes[i] for routes in self._routes])
            .cpu()
            .to(id_dtype(self.routers.num_experts))
        )
        spans = route_spans(0, size, len(ids), version)
        valid = torch.ones(len(ids), dtype=torch.bool)
        weights = (
            torch.cat([weights[i] for weights in self._combine_weights]).cpu()
            if self._combine_weights
            else None
        )
        trace = RoutingTrace(
            ids, valid, self.routers.layers, self.routers.num_experts, spans, weights
        )
        return trace.rows(self._requests[i].sampling.routes_from, len(ids))
