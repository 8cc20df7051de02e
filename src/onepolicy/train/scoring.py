"""Scores of the policy being trained: a forward before the update, whose graph it may use.

This is the usual source. `bypass.py` has those that leave the forward out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from onepolicy.replay.contexts import ReplayHandle, RouteRecorder
from onepolicy.train.forward import Scored
from onepolicy.train.scorer import PolicyScorer
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
        self.require: Callable[[TokenBatch], None] | None = None
        """Raises if the scores of an update are not as they must be, before its optimiser moves."""

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

    def begin(self, batch: TokenBatch) -> None:
        """Begin the update of a step on this batch, whose advantages and weights are set."""

    @contextmanager
    def minibatch(self, batch: TokenBatch, measured: Measured, *, index: int) -> Iterator[None]:
        """Return a context for the forwards of a minibatch. index: its number in the step."""
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
            rows, share = handle.trace.valid.sum(), handle.replaced_fraction().nan_to_num()
            return [torch.stack([share * rows, rows.expand_as(share).to(share)])]
        return []
