"""Sources of the old policy's log-probabilities, and the forward that an update is made of.

`ScoringFirst` is the usual one. `correction.ratio = new/rollout` (bypass) selects another
(train/bypass_scoring.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from onepolicy.train.extension import MicroBatch
from onepolicy.train.forward import Scored
from onepolicy.train.scorer import PolicyScorer
from onepolicy.types import TokenBatch


class ScoringFirst:
    """A scoring forward before the update, and a forward of its own in the update.

    With `train.reuse_scoring_forward` the update uses the graphs of the scoring forwards.
    """

    def __init__(self, scorer: PolicyScorer) -> None:
        self.scorer = scorer
        # The batch as the update itself scored it; only the bypass sets it.
        self.scored: TokenBatch | None = None
        self.seconds = 0.0  # of the update's forwards
        self._graphs: dict[tuple[int, ...], Scored] = {}  # by the samples of the micro-batch

    def score(self, batch: TokenBatch) -> TokenBatch:
        """Fill the fields of the old policy, if it is scored before the update."""
        self._graphs.clear()
        scorer = self.scorer
        if not scorer.config.reuses_scoring_forward(len(scorer.batcher.updated(batch))):
            return scorer.score(batch)

        def keep_graph(samples: list[int], scored: Scored) -> None:
            self._graphs[tuple(samples)] = scored

        scored = scorer.score_unchecked(batch, replay=True, keep_graph=keep_graph)
        return scorer.check_scored_routes(scored)

    def begin_step(self) -> None:
        """Reset the measurements before the update of a step."""
        self.scored, self.seconds = None, 0.0

    def begin_minibatch(self, batch: TokenBatch) -> None: ...

    @contextmanager
    def update_forward(self, samples: list[int], micro: TokenBatch) -> Iterator[MicroBatch]:
        """Yield a micro-batch with its scores, which carry their graph.

        The context stays open during the backward, so that recomputed layers route as the forward
        did.
        """
        assert micro.logp_old is not None, "score() fills logp_old"
        scored = self._graphs.pop(tuple(samples), None)
        if scored is not None:
            yield MicroBatch(micro, scored, micro.logp_old)
            return
        with self.scorer.routing_context(micro, native=False) as handle:
            scored = self._forward(micro)
            self.scorer.replay_mode.record_update_forward(handle)
            yield MicroBatch(micro, scored, micro.logp_old)

    def end_minibatch(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}

    def _forward(self, micro: TokenBatch) -> Scored:
        entropy_graph = self.scorer.config.objective.entropy_coef > 0
        return self.scorer.forward(micro, entropy_graph=entropy_graph)
