"""The trainer's forward over the same tokens again, at another temperature or over a part of the vocabulary."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onepolicy.config import FromRollout
from onepolicy.divergence.logprob import Mismatch, mismatch
from onepolicy.interfaces import Scorer
from onepolicy.models.top_k_top_p import WHOLE_VOCABULARY, apply_top_k_top_p
from onepolicy.replay.routers import bind_routers
from onepolicy.train.pack import micro_batches
from onepolicy.train.scorer import PolicyScorer
from onepolicy.types import TokenBatch
from onepolicy.verdict.rules import Gap

STEP = 0.02  # of the temperature, for its derivative
SAME = 0.01  # a fitted factor closer to 1 than this is 1
ROUNDS = 4
OUTSIDE = 20.0  # nats by which logits outside the support are lowered: finite, should a sampled token be among them
NEARLY_ALL = 0.99  # a support that holds more than this of the mass is the whole vocabulary


@dataclass(frozen=True, slots=True)
class Rescorer:
    """The same batch at another temperature, or over a part of the vocabulary."""

    scorer: PolicyScorer
    factor: float = 1.0  # of the batch's temperature
    top_k: int = 0  # 0: no bound
    top_p: float = 1.0

    def __call__(self, batch: TokenBatch, *, replay: bool = False) -> TokenBatch:
        """The batch with logp_old of this scoring; replay: with the rollout's routes."""
        with self._support(float((batch.temperature * self.factor)[0])):
            return score_at(self.scorer, batch, self.factor, replay=replay)

    def of(self, scorer: PolicyScorer) -> Rescorer:
        """The same with another scorer."""
        return dataclasses.replace(self, scorer=scorer)

    @property
    def support(self) -> str:
        both = [
            f"top-k {self.top_k}" if self.top_k else "",
            f"top-p {self.top_p:.3f}" if self.top_p < 1 else "",
        ]
        return " and ".join(part for part in both if part)

    @contextmanager
    def _support(self, temperature: float) -> Iterator[None]:
        if not self.support:
            yield
            return

        def lower(logits: Tensor) -> Tensor:
            top_k = torch.full(
                (len(logits), 1), self.top_k or WHOLE_VOCABULARY, device=logits.device
            )
            top_p = torch.full((len(logits), 1), self.top_p, device=logits.device)
            kept = apply_top_k_top_p(
                logits.float() / temperature, top_k=top_k, top_p=top_p
            ).isfinite()
            return torch.where(kept, logits, logits - OUTSIDE)

        with on_logits(self.scorer.model, lower):
            yield


def score_at(
    scorer: Scorer, batch: TokenBatch, factor: float, *, replay: bool = False
) -> TokenBatch:
    """The batch with logp_old at `factor` times its temperature."""
    at = batch.replace(temperature=batch.temperature * factor)
    return scorer.score(at, replay=replay).replace(temperature=batch.temperature)


def variant(scorer: PolicyScorer, *, model: Any = None, **train: Any) -> PolicyScorer:
    """A scorer with other train settings, or of another model. It never refuses routes."""
    config = scorer.config
    settings = config.train.model_copy(update={"activation_checkpointing": False, **train})
    replay = config.replay
    if isinstance(replay, FromRollout):
        replay = replay.model_copy(update={"min_agreement": 0.0})
    routers = scorer.routers if model is None or scorer.routers is None else bind_routers(model)
    other = config.model_copy(update={"train": settings, "replay": replay})
    return PolicyScorer(scorer.model if model is None else model, other, routers=routers)


def fit_temperature(scorer: Rescorer, start: TokenBatch) -> tuple[Rescorer, TokenBatch]:
    """By what to multiply the trainer's temperature to come closest to the rollout, in squares of log rho (Gauss-
    Newton). `start` is scored by `scorer`; both come back as they are if its factor is within SAME of the best one, or
    k3 does not fall."""
    best, scored = scorer, start
    for _ in range(ROUNDS):
        nearby = dataclasses.replace(best, factor=best.factor * (1 + STEP))(start)
        slope = (logp_of(nearby) - logp_of(scored))[start.trainable].double() / STEP
        gap = (start.logp_rollout - logp_of(scored))[start.trainable].double()
        change = float(gap @ slope / (slope @ slope).clamp(min=1e-12))
        best = dataclasses.replace(best, factor=best.factor * (1 + max(-0.5, min(1.0, change))))
        scored = best(start)
        if abs(change) < SAME / 2:
            break
    if abs(best.factor / scorer.factor - 1) < SAME or not k3_of(scored) < k3_of(start):
        return scorer, start
    return best, scored


def fit_support(scorer: Rescorer, start: TokenBatch) -> tuple[Rescorer, TokenBatch] | None:
    """The smallest top-k, or top-p, that holds every sampled token, whichever comes closer to the rollout.

    None if both hold nearly the whole distribution. `start` is scored by `scorer`.
    """
    rank, before = _ranks(scorer, start)
    mask = start.trainable
    found = []
    if float(before[mask].max()) < NEARLY_ALL:
        found.append(dataclasses.replace(scorer, top_p=float(before[mask].max()) + 1e-6))
    vocabulary = int(scorer.scorer.model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
    if (count := int(rank[mask].max()) + 1) < vocabulary // 2:
        found.append(dataclasses.replace(scorer, top_k=count))
    scored = [(each, each(start)) for each in found]
    return min(scored, key=lambda pair: k3_of(pair[1]), default=None)


def _ranks(scorer: Rescorer, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """([T] int64, [T] float32): how many tokens the trainer finds likelier than the sampled one, and their mass."""
    rank = torch.zeros(batch.num_slots, dtype=torch.int64)
    before = torch.zeros(batch.num_slots)
    chosen = iter(micro_batches(batch, scorer.scorer.config.train.tokens_per_micro_batch))
    temperature = float(batch.temperature[0]) * scorer.factor

    def read(logits: Tensor) -> Tensor:
        slots = batch.slots_of(next(chosen))
        slots = slots[batch.trainable[slots]]
        own = logits.gather(-1, batch.target_ids[slots, None].to(logits.device))
        likelier = logits > own
        rank[slots] = likelier.sum(-1).cpu()
        before[slots] = ((logits.float() / temperature).softmax(-1) * likelier).sum(-1).cpu()
        return logits

    with on_logits(scorer.scorer.model, read):
        scorer(batch)
    return rank, before


@contextmanager
def on_logits(model: Any, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Every forward's logits [n, V] go through `change`."""

    def apply(module: Any, arguments: Any, output: Any) -> Any:
        output.logits = change(output.logits[0])[None]
        return output

    with model.register_forward_hook(apply):
        yield


def logp_of(batch: TokenBatch) -> Tensor:
    assert batch.logp_old is not None
    return batch.logp_old


def mismatch_of(batch: TokenBatch) -> Mismatch:
    return mismatch(logp_of(batch), batch.logp_rollout, batch.trainable, segment=batch.segment)


def k3_of(batch: TokenBatch) -> float:
    return mismatch_of(batch).k3


def gap_of(batch: TokenBatch) -> Gap:
    """For the verdict."""
    found = mismatch_of(batch)
    f2, f5 = found.extreme([2.0, 5.0])
    mean, error = _mean_rho(batch)
    return Gap(
        found.tokens,
        batch.num_samples,
        found.k3,
        f2,
        f5,
        found.max_dlogp,
        mean_rho=mean,
        mean_rho_error=error,
    )


def _mean_rho(batch: TokenBatch) -> tuple[float, float]:
    """Mean rho and its standard error, NaN of one sequence: tokens of a sequence are not independent."""
    mask = batch.trainable
    excess = (logp_of(batch)[mask].double() - batch.logp_rollout[mask].double()).expm1()
    index, sizes = batch.segment[mask].unique_consecutive(return_inverse=True, return_counts=True)[
        1:
    ]
    mean, sequences = excess.mean(), len(sizes)
    if sequences < 2:
        return float(1 + mean), math.nan
    of_sequence = torch.zeros_like(sizes, dtype=excess.dtype).index_add(0, index, excess - mean)
    error = (of_sequence.square().sum() * sequences / (sequences - 1)).sqrt() / len(excess)
    return float(1 + mean), float(error)
