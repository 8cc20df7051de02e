"""Updates of batches that nothing scored before: `scoring_of` chooses.

`BypassScoring` leaves the forward out because the correction does not ask for the old policy,
`EqualScoring` because the rollout was the old policy to the bit. Nobody has compared such a batch
with the trainer, so the update does. `EqualScoring` compares all of it before the first optimiser
step. `BypassScoring` compares each minibatch before its own step: values of the first alone,
because later ones have other weights, and routes of all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from onepolicy.config import RolloutReplay, RunConfig
from onepolicy.support.checks import check_displaced
from onepolicy.train import pack
from onepolicy.train.scorer import PolicyScorer, ScoreBuffer
from onepolicy.train.scoring import ScoringFirst
from onepolicy.train.update_parts import Measured, MicroBatch
from onepolicy.types import TokenBatch


class BypassScoring(ScoringFirst):
    """Nothing scores the batch before the update.

    The forwards of the first minibatch run before the first optimiser step, so their
    log-probabilities are those of the old policy.
    """

    def __init__(self, scorer: PolicyScorer) -> None:
        super().__init__(scorer)
        self._buffer: ScoreBuffer | None = None  # while a minibatch is compared
        self._samples: list[int] = []  # of that minibatch, in the batch of the buffer
        self._moved = 0  # minibatches that were trained on before, in this step
        self._replays_rollout = isinstance(scorer.config.replay, RolloutReplay)

    def score(self, batch: TokenBatch) -> TokenBatch:
        return batch

    @contextmanager
    def minibatch(self, batch: TokenBatch, measured: Measured, *, index: int) -> Iterator[None]:
        """Keep the scores of a step's first minibatch, and compare the routes of every one."""
        self._moved = index
        if not self._compares(index):
            yield
            return
        self._buffer = buffer = self._new_buffer(batch)
        yield
        self._score_the_rest(buffer)
        self._buffer = None
        scored = self.scorer.fill_batch(buffer)
        if index:  # its values are of no policy that anything samples with
            self.scorer.check_routes(scored, moved=index)
            return
        scored = self.scorer.check_scored(scored)
        if self.require is not None:
            self.require(scored)
        measured.scored = scored

    def _compares(self, index: int) -> bool:
        """Return whether the forwards of the step's minibatch `index` are compared.

        Routes that are replayed must be those of its tokens. Others do not act in the update.
        """
        return index == 0 or self._replays_rollout

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
            named = samples
            if self._buffer is not None:
                named = [self._samples[i] for i in samples]
            if scored.displaced is not None:
                check_displaced(
                    scored.displaced,
                    micro.segment,
                    micro.trainable,
                    micro.version,
                    now=self.scorer.version,
                    samples=named,
                    moved=self._moved,
                )
            if self.scorer.device.type == "cuda":
                torch.cuda.synchronize(self.scorer.device)
            if self._saves_scoring:
                measured.seconds += time.perf_counter() - start
            measured.replaced += self._replaced(handle)
            if self._buffer is not None:
                self._buffer.add_scores(named, scored, handle)
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

    def _compares(self, index: int) -> bool:
        return index == 0  # with the whole step

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
