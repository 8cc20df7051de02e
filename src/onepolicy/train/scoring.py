"""Sources of the old policy's log-probabilities, and the forward that an update is made of.

`ScoringFirst` is the usual one. The others leave its forward out: `BypassScoring` because the
correction does not ask for the old policy, `EqualScoring` because the rollout was the old policy to
the bit. Their scores in the update are checked before its first optimiser step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from onepolicy.config import RunConfig
from onepolicy.replay.contexts import ReplayHandle, RouteRecorder
from onepolicy.train import pack
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
        self._buffer: ScoreBuffer | None = None  # while the first minibatch is trained on
        self._samples: list[int] = []  # of the first minibatch, in the batch of the buffer

    def score(self, batch: TokenBatch) -> TokenBatch:
        return batch

    @contextmanager
    def minibatch(self, batch: TokenBatch, measured: Measured, *, first: bool) -> Iterator[None]:
        """Keep the scores of a step's first minibatch. The later ones have other weights."""
        if not first:
            yield
            return
        self._buffer = buffer = self._new_buffer(batch)
        yield
        self._score_the_rest(buffer)
        self._buffer = None
        scored = self.scorer.check_scored(buffer.fill_batch(self.scorer.routers))
        if self.require is not None:
            self.require(scored)
        measured.scored = scored

    def _new_buffer(self, minibatch: TokenBatch) -> ScoreBuffer:
        self._samples = list(range(minibatch.num_samples))
        return ScoreBuffer(minibatch)

    @property
    def _saves_scoring(self) -> bool:
        """True if a forward of the update replaces one that would only score."""
        return True

    def _score_the_rest(self, buffer: ScoreBuffer) -> None:
        """Score the samples of the buffer that the update left out."""

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
            if self._saves_scoring:
                measured.seconds += time.perf_counter() - start
            measured.replaced += self._replaced(handle)
            if self._buffer is not None:
                self._buffer.add_scores([self._samples[i] for i in samples], scored, handle)
            yield MicroBatch(micro, scored, micro.logp_rollout)


class EqualScoring(BypassScoring):
    """The rollout's log-probabilities are those of the old policy, to the bit (numerics on-policy).

    This is believed of no sample. Before the first optimiser step every sample of the step has been
    scored: in the update's own forward, or else in one without a graph (a group without advantage,
    a later minibatch). `require` compares them with the rollout's.
    """

    def score(self, batch: TokenBatch) -> TokenBatch:
        if not self.scorer.config.scores_old:
            return batch
        return batch.replace(logp_old=batch.logp_rollout)

    def begin(self, batch: TokenBatch) -> None:
        self._batch = batch

    def _new_buffer(self, minibatch: TokenBatch) -> ScoreBuffer:
        count = self.scorer.config.objective.num_minibatches
        self._samples = pack.minibatches(self._batch, count)[0]
        return ScoreBuffer(self._batch)

    @property
    def _saves_scoring(self) -> bool:
        return self._buffer is not None  # later minibatches are scored as well

    def _score_the_rest(self, buffer: ScoreBuffer) -> None:
        rest = [s for s in range(buffer.batch.num_samples) if s not in buffer.samples]
        if not rest:
            return
        for part in self.scorer.micro_batches(buffer.batch.select(rest)):
            self.scorer.score_into(buffer, [rest[i] for i in part], replay=True)


def scoring_of(scorer: PolicyScorer, config: RunConfig) -> ScoringFirst:
    """Return the source of the old policy's log-probabilities that a run's settings ask for."""
    if config.scores_first:
        return ScoringFirst(scorer)
    if config.rollout_is_old:
        return EqualScoring(scorer)
    return BypassScoring(scorer)
