"""`onepolicy measure --numerics on-policy`: the log-probabilities that differ in a bit."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onepolicy.build.measure import MeasureComponents
from onepolicy.divergence.routing import routing_disagreement
from onepolicy.files import write_text_atomically
from onepolicy.invariant.fingerprint import difference_reason
from onepolicy.invariant.require_equal import describe_slot, differing_slots
from onepolicy.measure.engine_noise import sample, sample_again
from onepolicy.measure.first_difference import Difference, first_difference
from onepolicy.objective.advantages import compute_outcomes
from onepolicy.train.pack import pack
from onepolicy.train.rescore import logp_of, mismatch_of
from onepolicy.types import TokenBatch


@dataclass(frozen=True, slots=True)
class Bitwise:
    """Result of a bitwise comparison of engine and trainer."""

    model: str
    dtype: str
    sequences: int
    tokens: int  # sampled
    differing: int  # of these, tokens whose two log-probabilities are different numbers
    k3: float
    routers: float | None  # share that chooses other experts; None: a dense model
    trainer_again: int  # tokens that differ if the trainer packs the samples in another order
    engine_alone: int  # tokens that differ if the engine samples one sequence at a time
    alone: int  # tokens that this was checked on
    fingerprint: dict[str, Any]  # of the trainer
    cannot_claim: str | None  # reason why rollouts and trainer do not compute alike
    where: str | None = None  # place of the first log-probability that differs
    first: Difference | None = None  # first number that differs before it; None: not found

    @property
    def holds(self) -> bool:
        """True if both sides agree on every bit, in all batches."""
        differences = (self.differing, self.routers, self.trainer_again, self.engine_alone)
        return not any(differences) and not self.cannot_claim


async def measure_bitwise(parts: MeasureComponents, model: str) -> Bitwise:
    """Sample, score without replay and compare; then repeat both sides in other batches."""
    scorer = parts.scorer
    groups = await sample(parts)
    limit = parts.config.rollout.sampling.max_tokens
    samples = compute_outcomes(groups, parts.config.objective, max_tokens=limit)
    batch = scorer.score(pack(samples), replay=False)
    wrong = differing_slots(batch).nonzero()[:, 0].tolist()
    order = list(range(batch.num_samples))[::-1]
    again = scorer.score(batch.select(order), replay=False).select(order)
    alone = await sample_again(parts, groups, batch, alone=True)
    played = int(alone.played.sum())
    found = Bitwise(
        model=model,
        dtype=parts.config.model.dtype,
        sequences=batch.num_samples,
        tokens=batch.num_trainable,
        differing=len(wrong),
        k3=mismatch_of(batch).k3,
        routers=_routers(batch),
        trainer_again=int((logp_of(again) != logp_of(batch))[batch.trainable].sum()),
        engine_alone=played - int((alone.same & (alone.logp == alone.before)).sum()),
        alone=played,
        fingerprint=json.loads(scorer.fingerprint),
        cannot_claim=difference_reason(scorer.fingerprint, batch.fingerprints),
    )
    if not wrong:
        return found
    number = int(batch.segment[wrong[0]])
    first = await first_difference(parts, scorer, batch, number)
    return dataclasses.replace(found, where=describe_slot(batch, wrong[0], groups), first=first)


def _routers(batch: TokenBatch) -> float | None:
    if batch.routing is None or batch.routing_native is None:
        return None
    return routing_disagreement(batch.routing_native, batch.routing).routers


def write(found: Bitwise, out: Path) -> Path:
    """Write OUT/bitwise.json and return its path."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "bitwise.json"
    tree = dataclasses.asdict(found) | {"holds": found.holds}
    return write_text_atomically(path, json.dumps(tree, indent=1))
