"""Continuous batching over the KV cache: when a request ends, its row is free for the next one."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from onepolicy.models.decode_attention import KVCacheStep
from onepolicy.models.recurrent.layers import install_recurrent
from onepolicy.rollout.hf.forward import CachedForward, RowSpan
from onepolicy.rollout.hf.sampler import BatchSampling, sample_tokens, uniform_numbers
from onepolicy.rollout.hf.scheduler import SequenceRequest
from onepolicy.types import Completion, FinishReason, RoutingTrace, route_spans

MIN_SHARED_PREFIX = 8  # tokens; a shorter common prefix is recomputed, not copied


class CacheRows:
    """The tokens and the length of every cache row.

    Free rows keep their content: a later request may share their prefix.
    """

    def __init__(
        self, num_rows: int, max_len: int, device: torch.device, *, recurrent: bool = False
    ) -> None:
        self.recurrent = recurrent  # a row has the state after its last token alone
        self.tokens = torch.zeros(num_rows, max_len, dtype=torch.int64, device=device)
        self.length = np.zeros(num_rows, dtype=np.int64)  # positions whose keys are cached
        self.active: dict[int, SequenceRequest] = {}
        self._idle = dict.fromkeys(range(num_rows))  # free rows, the longest idle first

    @property
    def free(self) -> int:
        return len(self._idle)

    def best_prefix(self, prompt: Tensor) -> tuple[int, int]:
        """Return the row with the longest common prefix with `prompt` [P], and its length.

        At least one token of the prompt is left to feed. A recurrent row shares all of itself.
        """
        size = len(prompt)
        same = (self.tokens[:, :size] == prompt).to(torch.int32).cumprod(1).sum(1).cpu().numpy()
        shared = np.minimum(np.minimum(same, self.length), size - 1)
        if self.recurrent:
            shared[shared != self.length] = 0
        row = int(shared.argmax())
        return row, int(shared[row])

    def assign_row(self, request: SequenceRequest, row: int | None = None) -> int:
        """Assign the free row `row`, by default the longest idle one, to the request."""
        if row is None:
            row = next(iter(self._idle))
        del self._idle[row]
        self.active[row] = request
        return row

    def release_row(self, row: int) -> None:
        """Make the row free. Its content stays until another request is assigned to it."""
        del self.active[row]
        self._idle[row] = None

    def clear(self) -> None:
        self.active.clear()
        self.length[:] = 0
        self._idle = dict.fromkeys(range(len(self.length)))

    def plan_compaction(self) -> tuple[list[int], list[int]]:
        """Return the rows to swap, pair by pair, so that active rows come first.

        Both lists are empty if active rows are dense already.
        """
        count = len(self.active)
        if not count or 4 * count >= 3 * (max(self.active) + 1):
            return [], []
        movers = sorted(row for row in self.active if row >= count)
        holes = [row for row in range(count) if row not in self.active]
        return movers, holes

    def swap_rows(self, movers: list[int], holes: list[int]) -> None:
        """Swap the tokens, lengths and requests of each pair of rows."""
        source, target = [*movers, *holes], [*holes, *movers]
        self.tokens[target] = self.tokens[source]
        self.length[target] = self.length[source]
        now_idle = dict(zip(holes, movers, strict=True))
        self._idle = {now_idle.get(row, row): None for row in self._idle}
        for mover, hole in zip(movers, holes, strict=True):
            self.active[hole] = self.active.pop(mover)


class ContinuousBatch:
    """A `Batch` for models that cache keys and values, and states of known recurrent layers."""

    def __init__(self, forward: CachedForward, *, enable_prefix_caching: bool) -> None:
        self.forward, self.cache = forward, forward.cache
        self.enable_prefix_caching = enable_prefix_caching
        num_rows, max_len, device = self.cache.num_rows, self.cache.max_len, self.cache.device
        recurrent = bool(install_recurrent(forward.model))
        self.rows = CacheRows(num_rows, max_len, device, recurrent=recurrent)
        self.logp = torch.zeros(num_rows, max_len, device=device)  # of tokens[row, n]
        # [row, n]: the random number that samples tokens[row, n]
        self.uniform = torch.zeros(num_rows, max_len, dtype=torch.float64, device=device)
        self.shared = np.zeros(num_rows, dtype=np.int64)  # prompt tokens copied from another row
        self._decoding: _DecodeState | None = None  # rebuilt when the active rows change
        self._ended: list[int] = []  # rows whose completion is not returned yet

    @property
    def busy(self) -> bool:
        return bool(self.rows.active)

    def step_context(self) -> AbstractContextManager[None]:
        return self.forward.recording()

    def clear(self) -> None:
        self.rows.clear()
        self._decoding, self._ended = None, []

    @torch.inference_mode()
    def admit(self, waiting: deque[SequenceRequest]) -> None:
        """Start waiting requests in free rows.

        Wait until several rows are free: even a short prefill costs about as much as a decode
        step.
        """
        for row in [row for row, request in self.rows.active.items() if request.future.cancelled()]:
            self.rows.release_row(row)
            self._decoding = None
        while waiting and waiting[0].future.cancelled():
            waiting.popleft()
        enough = min(len(waiting), max(1, self.cache.num_rows // 16))
        if waiting and (self.rows.free >= enough or not self.busy):
            count = min(len(waiting), self.rows.free)
            self._start([waiting.popleft() for _ in range(count)])

    def step(self, version: int) -> list[tuple[SequenceRequest, Completion]]:
        """Decode one token of every active row and return the requests that ended.

        If requests ended with their first token, return them before anything is decoded.
        """
        if not self._ended and self.rows.active:
            self._decode()
        return [self._complete_row(row, version) for row in self._pop_ended()]

    def abort_running(self, version: int) -> list[tuple[SequenceRequest, Completion]]:
        """End all active requests between two steps, and return their completions so far."""
        assert not self._ended
        self._decoding = None
        return [self._complete_row(row, version, "aborted") for row in list(self.rows.active)]

    def _start(self, requests: list[SequenceRequest]) -> None:
        """Prefill the requests' prompts and sample their first tokens.

        Identical prompts are fed once, and cached prefixes are not fed again.
        """
        leaders, followers = self._group_by_prompt(requests)
        spans = self._prepare_rows(leaders)
        logits = self.forward.prefill(self.rows.tokens, spans)
        copies = []
        for request, leader in followers:
            row = self.rows.assign_row(request)
            self._fill_row(request, row, len(request.prompt))
            copies.append((spans[leader].row, row))
        self._copy_rows(copies, max((len(r.prompt) for r, _ in followers), default=0))
        rows = [span.row for span in spans] + [target for _, target in copies]
        for row in rows:
            self.rows.length[row] = len(self.rows.active[row].prompt)
        indices = [*range(len(leaders)), *(leader for _, leader in followers)]
        self._sample_rows(_DecodeState(self, rows), logits[indices])
        self._decoding = None

    def _group_by_prompt(
        self, requests: list[SequenceRequest]
    ) -> tuple[list[SequenceRequest], list[tuple[SequenceRequest, int]]]:
        """Return the requests to prefill, and the others with the index of their equal."""
        if not self.enable_prefix_caching:
            return requests, []
        leaders: list[SequenceRequest] = []
        followers: list[tuple[SequenceRequest, int]] = []
        seen: dict[bytes, int] = {}
        for request in requests:
            leader = seen.setdefault(request.prompt.tobytes(), len(leaders))
            if leader == len(leaders):
                leaders.append(request)
            else:
                followers.append((request, leader))
        return leaders, followers

    def _prepare_rows(self, leaders: list[SequenceRequest]) -> list[RowSpan]:
        """Assign a row to each request and copy cached prefixes. Return the spans left to feed."""
        prefixes = [self._cached_prefix(request) for request in leaders]
        rows: dict[int, int] = {}
        for i, (source, shared) in enumerate(prefixes):  # first the rows that can be extended
            if shared and source not in self.rows.active:
                rows[i] = self.rows.assign_row(leaders[i], source)
        copies, longest = [], 0
        for i, (source, shared) in enumerate(prefixes):
            if i not in rows:
                rows[i] = self.rows.assign_row(leaders[i])
                if shared:
                    copies.append((source, rows[i]))
                    longest = max(longest, shared)
        self._copy_rows(copies, longest)
        spans = []
        for i, (request, (_, shared)) in enumerate(zip(leaders, prefixes, strict=True)):
            self._fill_row(request, rows[i], shared)
            spans.append(RowSpan(rows[i], shared, len(request.prompt)))
        return spans

    def _cached_prefix(self, request: SequenceRequest) -> tuple[int, int]:
        """Return the row that shares a prefix with the prompt, and the prefix's length or 0."""
        if not self.enable_prefix_caching or not self.rows.length.any():
            return 0, 0
        prompt = torch.from_numpy(request.prompt).to(self.cache.device)
        source, shared = self.rows.best_prefix(prompt)
        if shared < MIN_SHARED_PREFIX:
            return 0, 0
        return source, shared

    def _fill_row(self, request: SequenceRequest, row: int, shared: int) -> None:
        size = len(request.prompt)
        self.rows.tokens[row, :size] = torch.from_numpy(request.prompt)
        uniform = uniform_numbers(request.seed, request.limit - size, request.num_drawn)
        self.uniform[row, size : request.limit] = torch.from_numpy(uniform)
        self.shared[row] = shared

    def _copy_rows(self, pairs: list[tuple[int, int]], length: int) -> None:
        if pairs:
            source, target = torch.tensor(pairs, device=self.cache.device).unbind(1)
            self.cache.copy_rows(source, target, length)

    @torch.inference_mode()
    def _decode(self) -> None:
        if self._decoding is None:
            self._compact_rows()
            self._decoding = _DecodeState(self, sorted(self.rows.active))
        state = self._decoding
        ids = self.rows.tokens.view(-1).index_select(0, state.flat)
        logits = self.forward(ids, state.next_step())
        state.advance(self.rows.length)
        self._sample_rows(state, logits)

    def _sample_rows(self, state: _DecodeState, logits: Tensor) -> None:
        """Sample the next token of every row of `state`, and note the rows that end with it."""
        uniform = self.uniform.view(-1).index_select(0, state.flat)
        sampled = sample_tokens(logits, uniform, state.sampling)
        self.rows.tokens.view(-1).index_copy_(0, state.flat, sampled.tokens)
        self.logp.view(-1).index_copy_(0, state.flat, sampled.logp)
        for i, request in state.top_requests:
            request.add_top_logprobs(sampled.top_ids, sampled.top_logp, i)
        for i, request in state.support_requests:
            request.add_support(sampled.support, i)
        self._ended += state.ended_rows(sampled.tokens, self.rows.length)

    def _compact_rows(self) -> None:
        movers, holes = self.rows.plan_compaction()
        if not movers:
            return
        source, target = [*movers, *holes], [*holes, *movers]
        index = torch.tensor([source, target], device=self.cache.device)
        self.cache.copy_rows(index[0], index[1], int(self.rows.length[source].max()))
        self.logp[target], self.uniform[target] = self.logp[source], self.uniform[source]
        self.shared[target] = self.shared[source]
        self.rows.swap_rows(movers, holes)

    def _pop_ended(self) -> list[int]:
        ended, self._ended = self._ended, []
        if ended:
            self._decoding = None
        return ended

    def _complete_row(
        self, row: int, version: int, finish: FinishReason | None = None
    ) -> tuple[SequenceRequest, Completion]:
        """Return the row's request and completion, and release the row."""
        request = self.rows.active[row]
        size, fed = len(request.prompt), int(self.rows.length[row])
        tokens = self.rows.tokens[row, size : fed + 1].to("cpu", torch.int32)
        top_ids, top_logp = request.stack_top_logprobs()
        completion = Completion(
            tokens,
            self.logp[row, size : fed + 1].cpu().clone(),
            torch.full((len(tokens),), version, dtype=torch.int32),
            finish or request.finish_reason(int(tokens[-1])),
            self._trace(row, size, fed, version),
            request.sampling.routes_from,
            top_ids=top_ids,
            top_logp=top_logp,
            support=request.join_support(),
        )
        self.rows.release_row(row)
        return request, completion

    def _trace(self, row: int, size: int, fed: int, version: int) -> RoutingTrace | None:
        """Return the routes of a row with `size` prompt tokens and `fed` tokens in all."""
        routers = self.forward.routers
        if routers is None:
            return None
        wanted = slice(self.rows.active[row].sampling.routes_from, fed)
        spans = route_spans(int(self.shared[row]), size, fed, version, start=wanted.start)
        ids = self.cache.read_routes(row, wanted, routers.num_experts)
        valid = torch.ones(len(ids), dtype=torch.bool)
        combine_weights = self.cache.read_combine_weights(row, wanted)
        return RoutingTrace(ids, valid, routers.layers, routers.num_experts, spans, combine_weights)


class _DecodeState:
    """Tensors of the active rows. A decode step only increments them and builds no new ones."""

    def __init__(self, batch: ContinuousBatch, rows: list[int]) -> None:
        device, max_len = batch.cache.device, batch.cache.max_len
        requests = [batch.rows.active[row] for row in rows]
        lengths = batch.rows.length[rows]
        self.host_rows, self.last_row = np.array(rows), max(rows)
        self.rows = torch.from_numpy(self.host_rows).to(device)
        # position of the newest token, which is sampled but not fed yet
        self.position = torch.from_numpy(lengths.copy()).to(device)
        self.flat = self.rows * max_len + self.position
        self.longest = int(lengths.max())
        self.place: Tensor | None = None
        if len(rows) != self.last_row + 1:
            self.place = self.rows
        self.equal_lengths = bool((lengths == lengths[0]).all())
        self.sampling = BatchSampling.from_requests([r.sampling for r in requests], device)
        self.top_requests = [(i, r) for i, r in enumerate(requests) if r.sampling.top_logprobs]
        self.support_requests = [(i, r) for i, r in enumerate(requests) if r.sampling.support]
        self._limits = np.array([r.limit for r in requests])
        self._stops: Tensor | None = None  # [B, most stop tokens], filled with -1
        width = max(len(r.sampling.stop) for r in requests)
        if width:
            stops = [[*r.sampling.stop, *[-1] * (width - len(r.sampling.stop))] for r in requests]
            self._stops = torch.tensor(stops, device=device)

    def next_step(self) -> KVCacheStep:
        """Return the step that feeds the newest token of every row."""
        return KVCacheStep(
            self.rows,
            self.position,
            self.longest + 1,
            slice(0, self.last_row + 1),
            self.place,
            equal_lengths=self.equal_lengths,
        )

    def advance(self, length: np.ndarray) -> None:
        """Count the newest token of every row as fed. `length` is updated in place."""
        length[self.host_rows] += 1
        self.position += 1
        self.flat += 1
        self.longest += 1

    def ended_rows(self, tokens: Tensor, length: np.ndarray) -> list[int]:
        """Return the rows that end with the newest tokens [B]."""
        ended = length[self.host_rows] + 1 >= self._limits
        if self._stops is not None:
            ended |= (tokens[:, None] == self._stops).any(1).cpu().numpy()
        rows: list[int] = self.host_rows[ended].tolist()
        return rows
