"""Sources of the old policy's log-probabilities, and the forward that an update is made of.

`ScoringFirst` is the usual one. `correction.ratio = new/rollout` (bypass) selects `BypassScoring`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from onepolicy.replay.contexts import ReplayHandle, RouteRecorder
from onepolicy.train.forward import Scored
from onepolicy.train.scorer import PolicyScorer, ScoreBuffer
from onepolicy.train.update_parts import Measured, MicroBatch
from onepolicy.types import TokenBatch


class ScoringFirst:
    """A scoring forward before the update, and a forward of its own in the update.

    With `train.reuse_scoring_forward` the update uses the graphs of the scoring forwards.
    """

    def __init__(self, scorer: PolicyScorer) -> None:
        self.scorer = scorer
        self._most_graphs = scorer.config.most_reused_forwards
        self._graphs: dict[tuple[int, ...], tuple[Scored, list[Tensor]]] = {}
        """Scores and `Measured.replaced` of a forward, by the samples of its micro-batch."""

    def score(self, batch: TokenBatch) -> TokenBatch:
        """Fill the fields of the old policy, if it is scored before the update."""
        self._graphs.clear()
        scorer = self.scorer
        if len(scorer.batcher.updated(batch)) > self._most_graphs:
            return scorer.score(batch)

        def keep_graph(
            samples: list[int], scored: Scored, handle: RouteRecorder | ReplayHandle | None
        ) -> None:
            self._graphs[tuple(samples)] = scored, self._replaced(handle)

        scored = scorer.score_unchecked(batch, replay=True, keep_graph=keep_graph)
        return scorer.check_scored(scored)

    @contextmanager
    def minibatch(self, batch: TokenBatch, measured: Measured, *, first: bool) -> Iterator[None]:
        """Return a context for the forwards of a minibatch. first: the first of its step."""
        yield

    @contextmanager
    def update_forward(
        self, samples: list[int], micro: TokenBatch, measured: Measured
    ) -> Iterator[MicroBatch]:
        """Yield a micro-batch with its scores, which carry their graph.

        The context stays open during the backward, so that recomputed layers route as the forward
        did.
        """
        assert micro.logp_old is not None, "score() fills logp_old"
        kept = self._graphs.pop(tuple(samples), None)
        if kept is not None:
            scored, replaced = kept
            measured.replaced += replaced
            yield MicroBatch(micro, scored, micro.logp_old)
            return
        with self.scorer.routing_context(micro, native=False) as handle:
            scored = self._forward(micro)
            measured.replaced += self._replaced(handle)
            yield MicroBatch(micro, scored, micro.logp_old)

    def _forward(self, micro: TokenBatch, *, displaced: bool = False) -> Scored:
        entropy_graph = self.scorer.config.objective.entropy_coef > 0
        return self.scorer.forward(micro, entropy_graph=entropy_graph, displaced=displaced)

    def _replaced(self, handle: RouteRecorder | ReplayHandle | None) -> list[Tensor]:
        if self.scorer.replay_mode.is_soft and isinstance(handle, ReplayHandle):
            return [handle.replaced_fraction()]
        return []


class BypassScoring(ScoringFirst):
    """Nothing scores the batch before the update.

    The forwards of the first minibatch run before the first optimiser step, so their
    log-probabilities are those of the old policy.
    """

    def __init__(self, scorer: PolicyScorer) -> None:
        super().__init__(scorer)
        self._buffer: ScoreBuffer | None = None  # of the first minibatch, while it is trained on

    def score(self, batch: TokenBatch) -> TokenBatch:
        return batch

    @contextmanager
    def minibatch(self, batch: TokenBatch, measured: Measured, *, first: bool) -> Iterator[None]:
        """Keep the scores of a step's first minibatch. The later ones have other weights."""
        if not first:
            yield
            return
        self._buffer = buffer = ScoreBuffer(batch)
        yield
        self._buffer = None
        scored = buffer.fill_batch(self.scorer.routers)
        measured.scored = self.scorer.check_scored(scored)

    @contextmanager
    def update_forward(
        self, samples: list[int], micro: TokenBatch, measured: Measured
    ) -> Iterator[MicroBatch]:
        with self.scorer.routing_context(micro, native=self._buffer is not None) as handle:
            start = time.perf_counter()
            scored = self._forward(micro, displaced=True)
            self.scorer.check_displaced(micro, scored.displaced)
            if self.scorer.device.type == "cuda":
                torch.cuda.synchronize(self.scorer.device)
            measured.seconds += time.perf_counter() - start
            measured.replaced += self._replaced(handle)
            if self._buffer is not None:
                self._buffer.add_scores(samples, scored, handle)
            yield MicroBatch(micro, scored, micro.logp_rollout)
