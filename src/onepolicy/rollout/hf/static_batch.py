"""Static batching for models whose caches ours cannot hold (`needs_static_batch`).

Such a cache cannot be shared, shifted or refilled row by row. So requests with equally long prompts
run as one batch over the model's native cache, from prefill to the last token of the longest. This
is slower than continuous batching.
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

from onepolicy.config import UsageError
from onepolicy.replay.contexts import RouteRecorder
from onepolicy.replay.routers import Routers
from onepolicy.rollout.hf.sampler import BatchSampling, sample_tokens, uniform_numbers
from onepolicy.rollout.hf.scheduler import SequenceRequest
from onepolicy.types import Completion, FinishReason, RoutingTrace, id_dtype, route_spans


class StaticBatch:
    """A `Batch` of equally long prompts over the model's native cache."""

    def __init__(
        self,
        model: PreTrainedModel,
        routers: Routers | None,
        *,
        max_num_seqs: int,
        combine_weights: bool = False,
    ) -> None:
        self.model, self.routers, self.max_num_seqs = model, routers, max_num_seqs
        self.device = next(model.parameters()).device
        self._record_combine_weights = combine_weights
        self._recorder: RouteRecorder | None = None
        self.clear()

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    @contextmanager
    def step_context(self) -> Iterator[None]:
        """Record the routes of all steps inside the context. Do nothing for a dense model."""
        if self.routers is None:
            yield
            return
        with self.routers.record(weights=self._record_combine_weights) as recorder:
            self._recorder = recorder
            try:
                yield
            finally:
                self._recorder = None

    def clear(self) -> None:
        self._requests: list[SequenceRequest] = []
        self._running: set[int] = set()  # indices into _requests
        self._cache: Any = None
        self._tokens: list[Tensor] = []  # each [B]
        self._logp: list[Tensor] = []
        self._routes: list[Tensor] = []  # each [B, fed, L, K]
        self._combine_weights: list[Tensor] = []  # like _routes, if recorded

    def admit(self, waiting: deque[SequenceRequest]) -> None:
        """Start the first waiting request and all with an equally long prompt, if idle."""
        while waiting and waiting[0].future.cancelled():
            waiting.popleft()
        if self._requests or not waiting:
            return
        length = len(waiting[0].prompt)
        same = [r for r in waiting if len(r.prompt) == length and not r.future.cancelled()]
        self._requests = same[: self.max_num_seqs]
        for request in self._requests:
            waiting.remove(request)
        self._running = set(range(len(self._requests)))
        self._uniform = self._uniform_table()
        sampling = [request.sampling for request in self._requests]
        self._sampling = BatchSampling.from_requests(sampling, self.device)

    def step(self, version: int) -> list[tuple[SequenceRequest, Completion]]:
        """Sample one token of every request and return the requests that ended."""
        if not self._requests:
            return []
        self._sample_next()
        newest, count = self._tokens[-1].tolist(), len(self._tokens)
        ended = []
        for i in sorted(self._running):
            request = self._requests[i]
            if count == request.sampling.max_tokens or newest[i] in request.sampling.stop:
                self._running.discard(i)
                ended.append((request, self._completion(i, version)))
            elif request.future.cancelled():
                self._running.discard(i)
        if not self._running:
            self.clear()
        return ended

    def abort_running(self, version: int) -> list[tuple[SequenceRequest, Completion]]:
        """End all running requests between two steps, and return their completions so far."""
        aborted = []
        for i in sorted(self._running):
            aborted.append((self._requests[i], self._completion(i, version, "aborted")))
        self.clear()
        return aborted

    @torch.inference_mode()
    def _sample_next(self) -> None:
        """Feed the prompts or the newest tokens, and sample a token of every row.

        Ended rows are sampled too. Their tokens are not used.
        """
        if self._tokens:
            ids = self._tokens[-1][:, None]
        else:
            ids = torch.from_numpy(np.stack([r.prompt for r in self._requests])).to(self.device)
        out = self.model(
            input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        self._cache = getattr(out, "past_key_values", None)
        if self._cache is None:
            raise UsageError(
                f"rollout.engine.kind: {type(self.model).__name__} returns no past_key_values, "
                "with which the embedded engine decodes; sample it with a server"
            )
        if self._recorder is not None:
            self._store_routes(self._recorder, ids.shape)
        uniform = self._uniform[:, min(len(self._tokens), self._uniform.shape[1] - 1)]
        sampled = sample_tokens(out.logits[:, -1].float(), uniform, self._sampling)
        self._tokens.append(sampled.tokens)
        self._logp.append(sampled.logp)
        for i in self._running:
            self._requests[i].add_top_logprobs(sampled.top_ids, sampled.top_logp, i)
            self._requests[i].add_support(sampled.support, i)

    def _store_routes(self, recorder: RouteRecorder, shape: torch.Size) -> None:
        """Store the routes of the last forward. shape: [B, fed], of its token ids."""
        routes = torch.stack(recorder.pop_ids(), 1)  # [B * fed, L, K]
        self._routes.append(routes.unflatten(0, shape))
        combine_weights = recorder.pop_weights()
        if combine_weights is not None:
            self._combine_weights.append(torch.stack(combine_weights, 1).unflatten(0, shape))

    def _uniform_table(self) -> Tensor:
        """Return the random numbers of all requests, [B, longest max_tokens] float64."""
        longest = max(r.sampling.max_tokens for r in self._requests)
        table = np.zeros((len(self._requests), longest))
        for row, request in zip(table, self._requests, strict=True):
            count = request.sampling.max_tokens
            row[:count] = uniform_numbers(request.seed, count, request.num_drawn)
        return torch.from_numpy(table).to(self.device)

    def _completion(self, i: int, version: int, finish: FinishReason | None = None) -> Completion:
        request = self._requests[i]
        tokens, logp = self._sampled(i)
        top_ids, top_logp = request.stack_top_logprobs()
        return Completion(
            tokens,
            logp,
            torch.full((len(tokens),), version, dtype=torch.int32),
            finish or request.finish_reason(int(tokens[-1])),
            self._trace(i, len(request.prompt), version),
            request.sampling.routes_from,
            top_ids=top_ids,
            top_logp=top_logp,
            support=request.join_support(),
        )

    def _sampled(self, i: int) -> tuple[Tensor, Tensor]:
        """Return the tokens [n] int32 and log-probabilities [n] of request i, by two host reads."""
        tokens = torch.stack([tokens[i] for tokens in self._tokens])
        logp = torch.stack([logp[i] for logp in self._logp])
        return tokens.cpu().int(), logp.cpu()

    def _trace(self, i: int, size: int, version: int) -> RoutingTrace | None:
        """Return the routes of request i, whose prompt has `size` tokens."""
        if self.routers is None:
            return None
        ids = torch.cat([routes[i] for routes in self._routes]).cpu()
        ids = ids.to(id_dtype(self.routers.num_experts))
        spans = route_spans(0, size, len(ids), version)
        valid = torch.ones(len(ids), dtype=torch.bool)
        combine_weights: Tensor | None = None
        if self._combine_weights:
            combine_weights = torch.cat([weights[i] for weights in self._combine_weights]).cpu()
        trace = RoutingTrace(
            ids, valid, self.routers.layers, self.routers.num_experts, spans, combine_weights
        )
        return trace.rows(self._requests[i].sampling.routes_from, len(ids))
