"""Rescoring: the trainer's forward over the same tokens with other settings.

The settings are another temperature, a part of the vocabulary, or another model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onepolicy.config import R3, RolloutReplay, WeightsReplay
from onepolicy.divergence.compare import Mismatch
from onepolicy.divergence.logprob import mismatch
from onepolicy.interfaces import Scorer
from onepolicy.models.logits_chunks import whole_logits
from onepolicy.models.top_k_top_p import WHOLE_VOCABULARY, apply_top_k_top_p
from onepolicy.replay.routers import bind_routers
from onepolicy.train.scorer import PolicyScorer
from onepolicy.types import TokenBatch

TEMPERATURE_STEP = 0.02  # relative, for the derivative with respect to the temperature
SAME_FACTOR = 0.01  # a fitted factor closer to 1 than this counts as 1
MAX_ROUNDS = 4  # of the Gauss-Newton fit
# Nats by which logits outside the support are lowered. It is finite because a sampled token may be
# among them.
OUTSIDE = 20.0
NEARLY_ALL = 0.99  # a support with more than this share of the mass counts as the whole vocabulary


@dataclass(frozen=True, slots=True)
class Rescorer:
    """A scorer at another temperature, or over a part of the vocabulary."""

    scorer: PolicyScorer
    factor: float = 1.0  # of the batch's temperature
    top_k: int = 0  # 0: no bound
    top_p: float = 1.0

    def __call__(self, batch: TokenBatch, *, replay: bool = False) -> TokenBatch:
        """Return the batch with logp_old of this scoring. replay: with the rollout's routes."""
        with self._limit_support(float((batch.temperature * self.factor)[0])):
            return score_at(self.scorer, batch, self.factor, replay=replay)

    def with_scorer(self, scorer: PolicyScorer) -> Rescorer:
        return dataclasses.replace(self, scorer=scorer)

    @property
    def support(self) -> str:
        """The support in words; empty for the whole vocabulary."""
        bounds = []
        if self.top_k:
            bounds.append(f"top-k {self.top_k}")
        if self.top_p < 1:
            bounds.append(f"top-p {self.top_p:.3f}")
        return " and ".join(bounds)

    @contextmanager
    def _limit_support(self, temperature: float) -> Iterator[None]:
        """Lower the logits outside the support in every forward of the scorer."""
        if not self.support:
            yield
            return

        def lower(logits: Tensor) -> Tensor:
            column, device = (len(logits), 1), logits.device
            top_k = torch.full(column, self.top_k or WHOLE_VOCABULARY, device=device)
            top_p = torch.full(column, self.top_p, device=device)
            tempered = logits.float() / temperature
            kept = apply_top_k_top_p(tempered, top_k=top_k, top_p=top_p).isfinite()
            return torch.where(kept, logits, logits - OUTSIDE)

        with change_logits(self.scorer.model, lower):
            yield


def score_at(
    scorer: Scorer, batch: TokenBatch, factor: float, *, replay: bool = False
) -> TokenBatch:
    """Return the batch with logp_old at `factor` times its temperature."""
    at_factor = batch.replace(temperature=batch.temperature * factor)
    return scorer.score(at_factor, replay=replay).replace(temperature=batch.temperature)


def variant_scorer(
    scorer: PolicyScorer, *, model: Any = None, experts_only: bool = False, **train: Any
) -> PolicyScorer:
    """Return a scorer with other train settings, or of another model.

    It accepts any routes, however little they agree with the trainer's own. experts_only: it
    replays no combine weights, which a router of lower precision cannot hold.
    """
    config = scorer.config
    settings = config.train.model_copy(update={"activation_checkpointing": False, **train})
    replay = config.replay
    if isinstance(replay, RolloutReplay):
        replay = replay.model_copy(update={"min_agreement": 0.0})
        if experts_only and isinstance(replay, WeightsReplay):
            replay = R3(min_agreement=0.0)
    routers = scorer.routers
    if model is not None and routers is not None:
        routers = bind_routers(model)
    if model is None:
        model = scorer.model
    changed = config.model_copy(update={"train": settings, "replay": replay})
    return PolicyScorer(model, changed, routers=routers)


def fit_temperature(scorer: Rescorer, start: TokenBatch) -> tuple[Rescorer, TokenBatch]:
    """Fit the factor on the trainer's temperature that comes closest to the rollout.

    Closest in squares of log rho, by Gauss-Newton. `start` is scored by `scorer`. Returns the
    fitted rescorer and the batch that it scored. If the factor of `scorer` is within SAME_FACTOR
    of the best one, or k3 does not fall, both arguments are returned unchanged.
    """
    best, scored = scorer, start
    for _ in range(MAX_ROUNDS):
        nearby = dataclasses.replace(best, factor=best.factor * (1 + TEMPERATURE_STEP))(start)
        slope = (logp_of(nearby) - logp_of(scored))[start.trainable].double() / TEMPERATURE_STEP
        gap = (start.logp_rollout - logp_of(scored))[start.trainable].double()
        change = float(gap @ slope / (slope @ slope).clamp(min=1e-12))
        best = dataclasses.replace(best, factor=best.factor * (1 + max(-0.5, min(1.0, change))))
        scored = best(start)
        if abs(change) < SAME_FACTOR / 2:
            break
    if abs(best.factor / scorer.factor - 1) < SAME_FACTOR or not k3_of(scored) < k3_of(start):
        return scorer, start
    return best, scored


def fit_support(scorer: Rescorer, start: TokenBatch) -> tuple[Rescorer, TokenBatch] | None:
    """Fit the smallest top-k or top-p that holds every sampled token.

    Returns the one that comes closer to the rollout, and the batch that it scored. None if both
    hold nearly the whole distribution. `start` is scored by `scorer`.
    """
    rank, mass_before = _ranks(scorer, start)
    mask = start.trainable
    candidates = []
    top_p = float(mass_before[mask].max())
    if top_p < NEARLY_ALL:
        candidates.append(dataclasses.replace(scorer, top_p=top_p + 1e-6))
    embeddings = scorer.scorer.model.get_input_embeddings()
    vocabulary = int(embeddings.num_embeddings)  # type: ignore[arg-type]
    top_k = int(rank[mask].max()) + 1
    if top_k < vocabulary // 2:
        candidates.append(dataclasses.replace(scorer, top_k=top_k))
    scored = [(candidate, candidate(start)) for candidate in candidates]
    return min(scored, key=lambda pair: k3_of(pair[1]), default=None)


def _ranks(scorer: Rescorer, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Return the tokens that the trainer finds likelier than the sampled one.

    Their number [T] int64, and their probability mass [T] float32.
    """
    rank = torch.zeros(batch.num_slots, dtype=torch.int64)
    mass_before = torch.zeros(batch.num_slots)
    samples_of_forwards = iter(scorer.scorer.micro_batches(batch))
    temperature = float(batch.temperature[0]) * scorer.factor

    def read(logits: Tensor) -> Tensor:
        slots = batch.slots_of(next(samples_of_forwards))
        slots = slots[batch.trainable[slots]]
        sampled = logits.gather(-1, batch.target_ids[slots, None].to(logits.device))
        likelier = logits > sampled
        rank[slots] = likelier.sum(-1).cpu()
        probabilities = (logits.float() / temperature).softmax(-1)
        mass_before[slots] = (probabilities * likelier).sum(-1).cpu()
        return logits

    with change_logits(scorer.scorer.model, read):
        scorer(batch)
    return rank, mass_before


@contextmanager
def change_logits(model: Any, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Apply `change` to the logits [n, V] of every forward in the context."""

    def apply(module: Any, arguments: Any, output: Any) -> Any:
        output.logits = change(output.logits[0])[None]
        return output

    with whole_logits(model), model.register_forward_hook(apply):
        yield


def logp_of(batch: TokenBatch) -> Tensor:
    assert batch.logp_old is not None
    return batch.logp_old


def mismatch_of(batch: TokenBatch) -> Mismatch:
    return mismatch(
        logp_of(batch),
        batch.logp_rollout,
        batch.trainable,
        segment=batch.segment,
        nonfinite="raise",
    )


def k3_of(batch: TokenBatch) -> float:
    return mismatch_of(batch).k3
