"""Sources of the old policy's log-probabilities, and the forward that an update is made of.

`ScoringFirst` is the usual one. `correction.ratio = new/rollout` (bypass) selects `BypassScoring`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from onepolicy.train.forward import Scored
from onepolicy.train.scorer import PolicyScorer, ScoreBuffer
from onepolicy.types import TokenBatch


class ScoringFirst:
    """A scoring forward before the update, and a forward of its own in the update.

    With `train.reuse_scoring_forward` the update uses the graphs of the scoring forwards.
    """

    def __init__(self, scorer: PolicyScorer) -> None:
        self.scorer = scorer
        # The batch as the update itself scored it; only BypassScoring sets it.
        self.scored: TokenBatch | None = None
        self.seconds = 0.0  # of the update's forwards
        self._graphs: deque[tuple[list[int], Scored]] = deque()  # in the order of the micro-batches

    def score(self, batch: TokenBatch) -> TokenBatch:
        """Fill the fields of the old policy, if it is scored before the update."""
        self._graphs.clear()
        scorer = self.scorer
        if not scorer.config.reuses_scoring_forward(len(scorer.micro_batches(batch))):
            return scorer.score(batch)

        def keep_graph(samples: list[int], scored: Scored) -> None:
            self._graphs.append((samples, scored))

        scored = scorer.score_unchecked(batch, replay=True, keep_graph=keep_graph)
        return scorer.check_scored_routes(scored)

    def begin_step(self) -> None:
        """Reset the measurements before the update of a step."""
        self.scored, self.seconds = None, 0.0

    def begin_minibatch(self, batch: TokenBatch) -> None: ...

    @contextmanager
    def update_forward(self, samples: list[int], micro: TokenBatch) -> Iterator[Scored]:
        """Yield the scores of a micro-batch, with their graph.

        The context stays open during the backward, so that recomputed layers route as the forward
        did.
        """
        if self._graphs:
            samples_of_graph, scored = self._graphs.popleft()
            assert samples_of_graph == samples
            yield scored
            return
        with self.scorer.routing_context(micro, native=False) as handle:
            scored = self._forward(micro)
            self.scorer.replay_mode.record_update_forward(handle)
            yield scored

    def end_minibatch(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}

    def _forward(self, micro: TokenBatch) -> Scored:
        entropy_graph = self.scorer.config.objective.entropy_coef > 0
        return self.scorer.forward(micro, entropy_graph=entropy_graph)


class BypassScoring(ScoringFirst):
    """Scoring by the update's own forwards (correction.ratio = new/rollout).

    Nothing scores the batch before the update. The forwards of the first minibatch run before the
    first optimiser step, so their log-probabilities are those of the old policy.
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
    def update_forward(self, samples: list[int], micro: TokenBatch) -> Iterator[Scored]:
        with self.scorer.routing_context(micro, native=self._buffer is not None) as handle:
            start = time.perf_counter()
            scored = self._forward(micro)
            if self.scorer.device.type == "cuda":
                torch.cuda.synchronize(self.scorer.device)
            self.seconds += time.perf_counter() - start
            self.scorer.replay_mode.record_update_forward(handle)
            if self._buffer is not None:
                self._buffer.add_scores(samples, scored, handle)
            yield scored

    def end_minibatch(self) -> None:
        if self._buffer is not None:
            scored = self._buffer.fill_batch(self.scorer.routers)
            self.scored = self.scorer.check_scored_routes(scored)

    def metrics(self) -> dict[str, float]:
        return {"time/score_saved": self.seconds}


def build_scoring(scorer: PolicyScorer) -> ScoringFirst:
    """Build the scoring that the run's settings ask for."""
    if not scorer.config.scores_old:
        return BypassScoring(scorer)
    return ScoringFirst(scorer)
