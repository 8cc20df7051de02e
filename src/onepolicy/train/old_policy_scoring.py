"""Where the log-probabilities of the old policy come from, and the forward that an update is made of."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from onepolicy.train.forward import Scored
from onepolicy.train.scorer import PolicyScorer, ScoreBuffer
from onepolicy.types import TokenBatch


class SeparateScoring:
    """A scoring forward before the update, and another in it. The usual way."""

    def __init__(self, scorer: PolicyScorer) -> None:
        self.scorer = scorer
        self.scored: TokenBatch | None = None  # what the update itself scored; see BypassScoring
        self.seconds = 0.0  # of the update's forwards

    def score(self, batch: TokenBatch) -> TokenBatch:
        """Fill the fields of the old policy, if it is scored before the update."""
        return self.scorer.score(batch)

    def begin(self) -> None:
        """An RL step's update begins."""
        self.scored, self.seconds = None, 0.0

    def begin_minibatch(self, batch: TokenBatch) -> None: ...

    @contextmanager
    def __call__(self, chosen: list[int], micro: TokenBatch) -> Iterator[Scored]:
        """The policy's scoring of a micro-batch, with its graph. Held during the backward, so that recomputed layers
        route as the forward did."""
        with self.scorer.routing(micro, native=False) as tape:
            scored = self._forward(micro)
            self.scorer.mode.saw(tape)
            yield scored

    def end_minibatch(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}

    def _forward(self, micro: TokenBatch) -> Scored:
        return self.scorer.forward(
            micro, entropy_graph=self.scorer.config.objective.entropy_coef > 0
        )


class ReusedScoring(SeparateScoring):
    """train.reuse_scoring_forward: the scoring forwards keep their graphs, and the update takes those."""

    def __init__(self, scorer: PolicyScorer) -> None:
        super().__init__(scorer)
        self._graphs: deque[tuple[list[int], Scored]] = deque()  # in the order of the micro-batches

    def score(self, batch: TokenBatch) -> TokenBatch:
        self._graphs.clear()

        def keep(chosen: list[int], scored: Scored) -> None:
            self._graphs.append((chosen, scored))

        return self.scorer.checked(self.scorer.fill(batch, replay=True, keep=keep))

    @contextmanager
    def __call__(self, chosen: list[int], micro: TokenBatch) -> Iterator[Scored]:
        assert self._graphs, "score() comes before step() when its forward is reused"
        samples, scored = self._graphs.popleft()
        assert samples == chosen
        yield scored


class BypassScoring(SeparateScoring):
    """correction.ratio = new/rollout: nobody scores the batch before the update.

    The forwards of the first mini-step see the weights of before it, so their log-probabilities stand in for that.
    """

    def __init__(self, scorer: PolicyScorer) -> None:
        super().__init__(scorer)
        self._scores: ScoreBuffer | None = None

    def score(self, batch: TokenBatch) -> TokenBatch:
        return batch

    def begin_minibatch(self, batch: TokenBatch) -> None:
        """Of a step the first mini-step is kept: the later ones have other weights."""
        self._scores = ScoreBuffer(batch) if self.scored is None else None

    @contextmanager
    def __call__(self, chosen: list[int], micro: TokenBatch) -> Iterator[Scored]:
        with self.scorer.routing(micro, native=self._scores is not None) as tape:
            start = time.perf_counter()
            scored = self._forward(micro)
            if self.scorer.device.type == "cuda":
                torch.cuda.synchronize(self.scorer.device)
            self.seconds += time.perf_counter() - start
            self.scorer.mode.saw(tape)
            if self._scores is not None:
                self._scores.put(chosen, scored, tape)
            yield scored

    def end_minibatch(self) -> None:
        if self._scores is not None:
            self.scored = self.scorer.checked(self._scores.filled(self.scorer.routers))

    def metrics(self) -> dict[str, float]:
        return {"time/score_saved": self.seconds}
