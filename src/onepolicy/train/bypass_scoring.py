"""Scoring by the update's own forwards (correction.ratio = new/rollout)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from onepolicy.train.extension import MicroBatch
from onepolicy.train.old_policy_scoring import ScoringFirst
from onepolicy.train.scorer import PolicyScorer, ScoreBuffer
from onepolicy.types import TokenBatch


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

    def begin_minibatch(self, batch: TokenBatch) -> None:
        """Keep the scores of a step's first minibatch. The later ones have other weights."""
        self._buffer = None
        if self.scored is None:
            self._buffer = ScoreBuffer(batch)

    @contextmanager
    def update_forward(self, samples: list[int], micro: TokenBatch) -> Iterator[MicroBatch]:
        with self.scorer.routing_context(micro, native=self._buffer is not None) as handle:
            start = time.perf_counter()
            scored = self._forward(micro)
            if self.scorer.device.type == "cuda":
                torch.cuda.synchronize(self.scorer.device)
            self.seconds += time.perf_counter() - start
            self.scorer.replay_mode.record_update_forward(handle)
            if self._buffer is not None:
                self._buffer.add_scores(samples, scored, handle)
            yield MicroBatch(micro, scored, micro.logp_rollout)

    def end_minibatch(self) -> None:
        if self._buffer is not None:
            scored = self._buffer.fill_batch(self.scorer.routers)
            self.scored = self.scorer.check_scored_routes(scored)

    def metrics(self) -> dict[str, float]:
        return {"time/score_saved": self.seconds}
