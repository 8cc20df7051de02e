"""Does an engine follow the weights it is given? And how far from the trainer its dtype alone brings it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from onepolicy.build.components import EngineAndScorer
from onepolicy.config import ModelConfig, TrainingError, UsageError
from onepolicy.engine_check.checks import (
    CheckResult,
    GeneratedBatch,
    generate_all,
    score_generated,
    upper_quartile_gap,
)
from onepolicy.models import fp32_head
from onepolicy.rollout.copies import load_engine_copy
from onepolicy.sync.push import NOISE_MARGIN as NOISE
from onepolicy.sync.push import canary_logp, checked_push, push_weights
from onepolicy.train.rescore import variant
from onepolicy.train.scorer import PolicyScorer
from onepolicy.types import TokenBatch

MIN_LIMIT = {"float32": 5e-4, "bfloat16": 5e-3}
"""`distance` nobody needs to explain [nats]."""
MARGIN = 5.0
"""Times the distance between the trainer and a copy of itself in the engine's dtype, on the same tokens."""
CHANGE = 0.2
"""Relative noise on the matrices of the weights that are pushed to see whether the engine follows."""


class RoundedModel:
    """The trainer's model in the engine's dtype: how far apart that alone brings the two."""

    def __init__(self, scorer: PolicyScorer, model: ModelConfig) -> None:
        rollout = scorer.config.rollout
        self._own, self._dtype = scorer, rollout.engine.dtype
        self._model = load_engine_copy(model, rollout, scorer.device)
        self._copy = variant(scorer, model=self._model, autocast="off")

    def follow(self) -> None:
        """Take the learner's weights."""
        fp32_head.load_weights(self._model, self._own.named_weights())

    def limit(self, batch: TokenBatch) -> float:
        """Largest `distance` of an engine of this dtype from the trainer on the tokens of a scored batch [nats]."""
        rounded = self._copy.score(batch, replay=False).logp_old
        assert rounded is not None
        apart = float(upper_quartile_gap(batch.replace(logp_rollout=rounded)).max())
        return (
            max(MIN_LIMIT[self._dtype], MARGIN * apart)
            if math.isfinite(apart)
            else MIN_LIMIT[self._dtype]
        )


async def check_weight_sync(
    pair: EngineAndScorer, copy: RoundedModel, plain: GeneratedBatch
) -> CheckResult:
    """The same weights move nothing; other weights are followed, also behind a cached prefix; and back again."""
    engine, scorer, numbers = pair.engine, pair.scorer, range(len(plain.prompts))
    size = scorer.vocabulary
    fix = "load_weights takes over every tensor and forgets all cached keys, values and routes"
    try:
        await checked_push(scorer, engine, vocab=size)
        before, again = await canary_logp(engine, size), await canary_logp(engine, size)
        await generate_all(
            engine, plain.prompts, plain.sampling, numbers
        )  # leaves its prefixes cached
        with perturbed_weights(scorer):
            copy.follow()
            await push_weights(scorer, engine)
            cached = await generate_all(engine, plain.prompts, plain.sampling, numbers)
            await engine.reset_cache()
            fresh = await generate_all(engine, plain.prompts, plain.sampling, numbers)
            score = score_generated(scorer, fresh)
            limit, now, behind = (
                copy.limit(score),
                upper_quartile_gap(score).max(),
                upper_quartile_gap(score_generated(scorer, cached)).max(),
            )
        await push_weights(scorer, engine)
        back = await canary_logp(engine, size)
    except (UsageError, TrainingError) as error:
        return CheckResult("weight sync", False, str(error), fix)
    old = upper_quartile_gap(score_generated(scorer, fresh)).max()
    wrong = None
    if not now <= limit:
        wrong = f"log-probabilities {now:.2g} nats from the weights just pushed, {old:.2g} from the ones before"
    elif not behind <= limit:
        wrong = (
            f"{behind:.2g} nats off where prefixes were cached before the push, {now:.2g} where not"
        )
    elif not (back - before).abs().max() <= NOISE * (again - before).abs().max() < math.inf:
        wrong = f"the first weights, pushed again, move log-probabilities by {(back - before).abs().max():.2g}"
    if wrong is not None:
        return CheckResult("weight sync", False, f"{wrong} (expected: at most {limit:.2g})", fix)
    followed = f"{now:.2g} nats off, {old:.2g} from the ones before"
    return CheckResult(
        "weight sync",
        True,
        f"the same weights move nothing; others are followed, cached or not: {followed}",
    )


@contextmanager
def perturbed_weights(scorer: PolicyScorer) -> Iterator[None]:
    """Other weights, and another version, while it is held; a version newer than both afterwards."""
    before = {name: tensor.detach().clone() for name, tensor in scorer.model.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    scorer.version += 1
    try:
        with torch.no_grad():
            for tensor in scorer.model.parameters():
                if tensor.dim() > 1:
                    noise = torch.randn(tensor.shape, generator=generator).to(tensor)
                    tensor.mul_(1 + CHANGE * noise)
        yield
    finally:
        scorer.model.load_state_dict(before)
        scorer.version += 1
