"""The check that an engine uses the weights it is given, and the gap that its dtype causes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from onepolicy.build.measure import EngineAndScorer
from onepolicy.config import ModelConfig, TrainingError, UsageError
from onepolicy.config.rules import Check
from onepolicy.engine_check.checks import (
    GeneratedBatch,
    generate_all,
    score_generated,
    upper_quartile_gap,
)
from onepolicy.models import fp32_head
from onepolicy.notation import number
from onepolicy.rollout.copies import load_engine_copy
from onepolicy.sync.canary import Canary
from onepolicy.sync.push import checked_push, push_weights
from onepolicy.train.rescore import variant_scorer
from onepolicy.train.scorer import PolicyScorer
from onepolicy.types import TokenBatch

MIN_LIMIT = {"float32": 5e-4, "bfloat16": 5e-3}
"""Smallest limit of `upper_quartile_gap`, by the engine's dtype [nats]."""
MARGIN = 5.0
"""Limit, as a multiple of the gap between the trainer and its copy in the engine's dtype."""
PERTURBATION = 0.2
"""Relative noise on the weight matrices that are pushed to see whether the engine uses them."""


class RoundedModel:
    """A copy of the trainer's model in the engine's dtype. It shows the gap of rounding alone."""

    def __init__(self, scorer: PolicyScorer, model: ModelConfig) -> None:
        rollout = scorer.config.rollout
        self._learner, self._dtype = scorer, rollout.engine.dtype
        self._model = load_engine_copy(model, rollout, scorer.device)
        self._scorer = variant_scorer(scorer, model=self._model, autocast="off")

    def load_learner_weights(self) -> None:
        fp32_head.load_weights(self._model, self._learner.named_weights())

    def limit(self, batch: TokenBatch) -> float:
        """Return the largest `upper_quartile_gap` [nats] expected of an engine of this dtype.

        batch: the tokens, scored by the trainer.
        """
        rounded = self._scorer.score(batch, replay=False).logp_old
        assert rounded is not None
        gap = float(upper_quartile_gap(batch.replace(logp_rollout=rounded)).max())
        if not math.isfinite(gap):
            return MIN_LIMIT[self._dtype]
        return max(MIN_LIMIT[self._dtype], MARGIN * gap)


async def check_weight_sync(
    pair: EngineAndScorer, rounded: RoundedModel, plain: GeneratedBatch
) -> Check:
    """Push the same weights, other weights and the first weights, and check the engine each time.

    The same weights must change nothing. Other weights must be used, also behind a cached prefix.
    The first weights must give the first log-probabilities again.
    """
    name = "weight sync"
    fix = "load_weights takes over every tensor and discards all cached keys, values and routes"
    try:
        passed, found = await _measure_sync(pair, rounded, plain)
    except (UsageError, TrainingError) as error:
        return Check(name, False, str(error), fix)
    if passed:
        return Check(name, True, f"the same weights move nothing; others are followed, {found}")
    return Check(name, False, found, fix)


async def _measure_sync(
    pair: EngineAndScorer, rounded: RoundedModel, plain: GeneratedBatch
) -> tuple[bool, str]:
    """Return whether the engine follows its weights, and the first fault or what was measured.

    Gaps are of the worst request [nats]: from the perturbed weights just pushed, from the same
    where prefixes were cached before the push, and from the first weights.
    """
    engine, scorer, seeds = pair.engine, pair.scorer, range(len(plain.prompts))
    size = scorer.vocab_size
    await checked_push(scorer, engine, vocab=size)
    canary = await Canary.ask(engine, size)
    # This leaves its prefixes in the cache.
    await generate_all(engine, plain.prompts, plain.sampling, seeds)
    with perturbed_weights(scorer):
        rounded.load_learner_weights()
        await push_weights(scorer, engine)
        before = await generate_all(engine, plain.prompts, plain.sampling, seeds)
        await engine.reset_cache()
        fresh = await generate_all(engine, plain.prompts, plain.sampling, seeds)
        batch = score_generated(scorer, fresh)
        limit, pushed = rounded.limit(batch), _worst_gap(batch)
        cached = _worst_gap(score_generated(scorer, before))
    await push_weights(scorer, engine)
    moved, is_back = await canary.change()
    old = number(_worst_gap(score_generated(scorer, fresh)))
    expected = f"(expected: at most {number(limit)})"
    for right, fault in (
        (
            pushed <= limit,
            f"log-probabilities {number(pushed)} nats from the weights just pushed, {old} from "
            "the ones before",
        ),
        (
            cached <= limit,
            f"{number(cached)} nats off where prefixes were cached before the push, "
            f"{number(pushed)} where not",
        ),
        (is_back, f"the first weights, pushed again, move log-probabilities by {number(moved)}"),
    ):
        if not right:
            return False, f"{fault} {expected}"
    return True, f"cached or not: {number(pushed)} nats off, {old} from the ones before"


def _worst_gap(batch: TokenBatch) -> float:
    return float(upper_quartile_gap(batch).max())


@contextmanager
def perturbed_weights(scorer: PolicyScorer) -> Iterator[None]:
    """Add noise to the weights inside the block, under a new version.

    Afterwards the first weights are back, under a version newer than both.
    """
    before = {name: tensor.detach().clone() for name, tensor in scorer.model.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    scorer.version += 1
    try:
        with torch.no_grad():
            for tensor in scorer.model.parameters():
                if tensor.dim() > 1:
                    noise = torch.randn(tensor.shape, generator=generator).to(tensor)
                    tensor.mul_(1 + PERTURBATION * noise)
        yield
    finally:
        scorer.model.load_state_dict(before)
        scorer.version += 1
