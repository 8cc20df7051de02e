"""Continuous batching over the slab: a row whose request ends goes to the next one at once."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from onepolicy.models.decode_attention import KVCacheStep
from onepolicy.rollout.hf.forward import CachedForward, RowSpan
from onepolicy.rollout.hf.sampler import BatchSampling, sample_tokens, uniform_numbers
from onepolicy.rollout.hf.scheduler import SequenceRequest
from onepolicy.types import Completion, FinishReason, RoutingTrace, route_spans

MIN_SHARED_PREFIX = 8  # tokens; a shorter common prefix is computed again rather than copied


class CacheRows:
    """Tokens and fed length of every slab row, free rows included: what they hold can start another request."""

    def __init__(self, num_rows: int, max_len: int, device: torch.device) -> None:
        self.tokens = torch.zeros(num_rows, max_len, dtype=torch.int64, device=device)
        self.length = np.zeros(num_rows, dtype=np.int64)  # positions whose keys are in the slab
        self.active: dict[int, SequenceRequest] = {}
        self._idle = dict.fromkeys(
            range(num_rows)
        )  # rows without a request, the longest idle first

    @property
    def free(self) -> int:
        return len(self._idle)

    def best_prefix(self, prompt: Tensor) -> tuple[int, int]:
        """(row, tokens shared) of the row that shares most with `prompt` [P], leaving at least one token to feed."""
        size = len(prompt)
        same = (self.tokens[:, :size] == prompt).to(torch.int32).cumprod(1).sum(1).cpu().numpy()
        shared = np.minimum(np.minimum(same, self.length), size - 1)
        row = int(shared.argmax())
        return row, int(shared[row])

    def assign_row(self, request: SequenceRequest, row: int | None = None) -> int:
        """Give the request this free row, or the one idle for longest."""
        if row is None:
            row = next(iter(self._idle))
        del self._idle[row]
        self.active[row] = request
        return row

    def release_row(self, row: int) -> None:
        """The row's content stays until another request takes it."""
        del self.active[row]
        self._idle[row] = None

    def clear(self) -> None:
        self.active.clear()
        self.length[:] = 0
        self._idle = dict.fromkeys(range(len(self.length)))

    def plan_compaction(self) -> tuple[list[int], list[int]]:
        """(from, to): pairs of rows to swap so that running rows come first; nothing if they are dense already."""
        count = len(self.active)
        if not count or 4 * count >= 3 * (max(self.active) + 1):
            return [], []
        movers = sorted(row for row in self.active if row >= count)
        holes = [row for row in range(count) if row not in self.active]
        return movers, holes

    def swap_rows(self, movers: list[int], holes: list[int]) -> None:
        """Bookkeeping of a compaction."""
        here, there = [*movers, *holes], [*holes, *movers]
        self.tokens[there] = self.tokens[here]
        self.length[there] = self.length[here]
        now_idle = dict(zip(holes, movers, strict=True))
        self._idle = {now_idle.get(row, row): None for row in self._idle}
        for mover, hole in zip(movers, holes, strict=True):
            self.active[hole] = self.active.pop(mover)


class ContinuousBatch:
    """A `Batch` for models with attention layers only."""

    def __init__(self, forward: CachedForward, *, enable_prefix_caching: bool) -> None:
        self.forward, self.cache, self.enable_prefix_caching = (
            forward,
            forward.cache,
            enable_prefix_caching,
        )
        num_rows, max_len, device = self.cache.num_rows, self.cache.max_len, self.cache.device
        self.rows = CacheRows(num_rows, max_len, device)
        self.logp = torch.zeros(num_rows, max_len, device=device)  # of tokens[row, n]
        self.uniform = torch.zeros(
            num_rows, max_len, dtype=torch.float64, device=device
        )  # that decides tokens[row, n]
        self.shared = np.zeros(
            num_rows, dtype=np.int64
        )  # prompt tokens taken over from another row
        self._decoding: _Decoding | None = None  # rebuilt when the running set changes
        self._ended: list[int] = []  # rows that ended and are not handed out yet

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
        """Fill free rows, a few at a time: a prefill costs about as much as a decode step, however short."""
        for row in [row for row, request in self.rows.active.items() if request.future.cancelled()]:
            self.rows.release_row(row)
            self._decoding = None
        while waiting and waiting[0].future.cancelled():
            waiting.popleft()
        enough = min(len(waiting), max(1, self.cache.num_rows // 16))
        if waiting and (self.rows.free >= enough or not self.busy):
            self._start([waiting.popleft() for _ in range(min(len(waiting), self.rows.free))])

    def step(self, version: int) -> list[tuple[SequenceRequest, Completion]]:
        """Requests that ended with their first token are handed out before anything is decoded."""
        if not self._ended and self.rows.active:
            self._decode()
        return [self._hand_out(row, version) for row in self._take_ended()]

    def abort_running(self, version: int) -> list[tuple[SequenceRequest, Completion]]:
        """What the running requests have sampled so far, between two steps. They run no longer."""
        assert not self._ended
        self._decoding = None
        return [self._hand_out(row, version, "aborted") for row in list(self.rows.active)]

    def _start(self, requests: list[SequenceRequest]) -> None:
        """Prefill; identical prompts once, known prefixes not at all; then sample the first tokens."""
        leaders: list[SequenceRequest] = []
        followers: list[tuple[SequenceRequest, int]] = []  # and the leader of the same prompt
        seen: dict[bytes, int] = {}
        for request in requests:
            leader = (
                seen.setdefault(request.prompt.tobytes(), len(leaders))
                if self.enable_prefix_caching
                else len(leaders)
            )
            if leader == len(leaders):
                leaders.append(request)
            else:
                followers.append((request, leader))
        spans = self._place(leaders)
        logits = self.forward.prefill(self.rows.tokens, spans)
        pairs = [
            (spans[i].row, self._fill(r, self.rows.assign_row(r), len(r.prompt)))
            for r, i in followers
        ]
        self._copy(pairs, max((len(r.prompt) for r, _ in followers), default=0))
        rows = [span.row for span in spans] + [target for _, target in pairs]
        for row in rows:
            self.rows.length[row] = len(self.rows.active[row].prompt)
        self._emit(
            _Decoding(self, rows), logits[[*range(len(leaders)), *(i for _, i in followers)]]
        )
        self._decoding = None

    def _place(self, leaders: list[SequenceRequest]) -> list[RowSpan]:
        """Give each a row and what the slab holds of its prompt; return what is left to feed."""
        known = [self._known_prefix(request) for request in leaders]
        rows: dict[int, int] = {}
        for i, (source, shared) in enumerate(known):  # rows that can go on in place come first
            if shared and source not in self.rows.active:
                rows[i] = self.rows.assign_row(leaders[i], source)
        copies, longest = [], 0
        for i, (source, shared) in enumerate(known):
            if i not in rows:
                rows[i] = self.rows.assign_row(leaders[i])
                if shared:
                    copies.append((source, rows[i]))
                    longest = max(longest, shared)
        self._copy(copies, longest)
        for i, (_, shared) in enumerate(known):
            self._fill(leaders[i], rows[i], shared)
        return [RowSpan(rows[i], known[i][1], len(leaders[i].prompt)) for i in range(len(leaders))]

    def _known_prefix(self, request: SequenceRequest) -> tuple[int, int]:
        if not self.enable_prefix_caching or not self.rows.length.any():
            return 0, 0
        source, shared = self.rows.best_prefix(
            torch.from_numpy(request.prompt).to(self.cache.device)
        )
        return (source, shared) if shared >= MIN_SHARED_PREFIX else (0, 0)

    def _fill(self, request: SequenceRequest, row: int, shared: int) -> int:
        size = len(request.prompt)
        self.rows.tokens[row, :size] = torch.from_numpy(request.prompt)
        uniform = uniform_numbers(request.seed, request.limit - size, request.drawn)
        self.uniform[row, size : request.limit] = torch.from_numpy(uniform)
        self.shared[row] = shared
        return row

    def _copy(self, pairs: list[tuple[int, int]], length: int) -> None:
        if pairs:
            source, target = torch.tensor(pairs, device=self.cache.device).unbind(1)
            self.cache.copy_rows(source, target, length)

    @torch.inference_mode()
    def _decode(self) -> None:
        if self._decoding is None:
            self._compact()
            self._decoding = _Decoding(self, sorted(self.rows.active))
        running = self._decoding
        view = slice(0, running.last_row + 1)
        step = KVCacheStep(
            running.rows,
            running.position,
            running.longest + 1,
            view,
            running.place,
            equal_lengths=running.even,
        )
        ids = self.rows.tokens.view(-1).index_select(0, running.flat)
        logits = self.forward(ids, step)
        running.advance(self.rows.length)
        self._emit(running, logits)

    def _emit(self, running: _Decoding, logits: Tensor) -> None:
        """Sample the token after the last one fed, for every row of `running`; note which rows that ends."""
        new = sample_tokens(
            logits, self.uniform.view(-1).index_select(0, running.flat), running.sampling
        )
        self.rows.tokens.view(-1).index_copy_(0, running.flat, new.tokens)
        self.logp.view(-1).index_copy_(0, running.flat, new.logp)
        for i, request in running.asking:
            request.add_top_logprobs(new.top_ids, new.top_logp, i)
        self._ended += running.ended(new.tokens, self.rows.length)

    def _compact(self) -> None:
        movers, holes = self.rows.plan_compaction()
        if movers:
            here, there = [*movers, *holes], [*holes, *movers]
            at = torch.tensor([here, there], device=self.cache.device)
            self.cache.copy_rows(at[0], at[1], int(self.rows.length[here].max()))
            self.logp[there], self.uniform[there] = self.logp[here], self.uniform[here]
            self.shared[there] = self.shared[here]
            self.rows.swap_rows(movers, holes)

    def _take_ended(self) -> list[int]:
        ended, self._ended = self._ended, []
        if ended:
            self._decoding = None
        return ended

    def _hand_out(
        self, row: int, version: int, finish: FinishReason | None = None
    ) -> tuple[SequenceRequest, Completion]:
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
        )
        self.rows.release_row(row)
        return request, completion

    def _trace(self, row: int, size: int, fed: int, version: int) -> RoutingTrace | None:
        routers = self.forward.routers
        if routers is None:
            return None
        wanted = slice(self.rows.active[row].sampling.routes_from, fed)
        spans = route_spans(int(self.shared[row]), size, fed, version, start=wanted.start)
        ids = self.cache.read_routes(row, wanted, routers.num_experts)
        valid, weights = (
            torch.ones(len(ids), dtype=torch.bool),
            self.cache.read_combine_weights(row, wanted),
        )
        return RoutingTrace(ids, valid, routers.layers, routers.num_experts, spans, weights)


class _Decoding:
    """Tensors of the running set that change only by counting up, so that a decode step builds nothing."""

    def __init__(self, batch: ContinuousBatch, rows: list[int]) -> None:
        device, max_len = batch.cache.device, batch.cache.max_len
        requests = [batch.rows.active[row] for row in rows]
        lengths = batch.rows.length[rows]
        self.host_rows, self.last_row = np.array(rows), max(rows)
        self.rows = torch.from_numpy(self.host_rows).to(device)
        self.position = torch.from_numpy(lengths.copy()).to(
            device
        )  # of the newest token: sampled, not fed yet
        self.flat = self.rows * max_len + self.position
        self.longest = int(lengths.max())
        self.place = None if len(rows) == self.last_row + 1 else self.rows
        self.even = bool((lengths == lengths[0]).all())
        self.sampling = BatchSampling.from_requests([r.sampling for r in requests], device)
        self.asking = [
            (i, request) for i, request in enumerate(requests) if request.sampling.top_logprobs
        ]
        self._limits = np.array([r.limit for r in requests])
        width = max(len(r.sampling.stop) for r in requests)
        stops = [[*r.sampling.stop, *[-1] * (width - len(r.sampling.stop))] for r in requests]
        self._stops = torch.tensor(stops, device=device) if width else None

    def advance(self, length: np.ndarray) -> None:
        """The newest token of every row has been fed."""
        length[self.host_rows] += 1
        self.position += 1
        self.flat += 1
        self.longest += 1

    def ended(self, tokens: Tensor, length: np.ndarray) -> list[int]:
        """Rows that these newest tokens [B] end."""
        ended = length[self.host_rows] + 1 >= self._limits
        if self._stops is not None:
            ended |= (tokens[:, None] == self._stops).any(1).cpu().numpy()
        return self.host_rows[ended].tolist() if ended.any() else []
