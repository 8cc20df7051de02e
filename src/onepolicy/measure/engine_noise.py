"""The engine's own noise: the same requests with the same seeds again, all together or each by itself.

Where both times the same token was drawn in the same context, the engine has scored one token twice.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onepolicy.build.components import SamplingComponents
from onepolicy.divergence.logprob import mismatch
from onepolicy.divergence.routing import routing_disagreement
from onepolicy.interfaces import NamedWeights, RolloutEngine
from onepolicy.rollout.collect import collect_rollouts
from onepolicy.types import Completion, Group, RoutingTrace, Sample, Sampling, TokenBatch

ALONE = 32


@dataclass(frozen=True, slots=True, eq=False)
class Again:
    before: Tensor  # [T] float32, of the first sampling
    logp: Tensor  # [T] float32, of the second where `same`, else of the first
    same: Tensor  # [T] bool, slots sampled both times in the same context
    share: float  # of the sampled tokens
    metrics: dict[str, float]  # repeat/..., of the slots both have


async def sample(
    parts: SamplingComponents,
    *,
    most: int | None = None,
    advance: Callable[[], None] = lambda: None,
) -> list[Group]:
    """The problems of step 0 with their own seeds, so that every call asks for the same; the first `most` of them.

    advance: called per episode.
    """
    rollout, seed = parts.config.rollout, parts.config.seed
    if most is not None:
        rollout = rollout.model_copy(
            update={"prompts_per_step": min(most, rollout.prompts_per_step)}
        )
    groups, _ = await collect_rollouts(
        parts.engine,
        parts.environment,
        rollout,
        stop=parts.stop,
        step=0,
        seed=seed,
        route_spec=parts.routes,
        top_logprobs=parts.top_logprobs,
        advance=advance,
    )
    return groups


async def sample_again(
    parts: SamplingComponents, first: Sequence[Group], batch: TokenBatch, *, alone: bool
) -> Again:
    """`batch` is `first` packed. alone: one request at a time, nothing cached, instead of all together; of more than
    ALONE sequences only the first ones, because that is slow."""
    await parts.engine.reset_cache()
    parts = dataclasses.replace(parts, top_logprobs=0)
    if alone:
        most = max(1, ALONE // parts.config.rollout.group_size)
        second = await sample(
            dataclasses.replace(parts, engine=OneAtATime(parts.engine)), most=most
        )
    else:
        second = await sample(parts)
    return compare(_samples(first), _samples(second), batch)


def compare(first: Sequence[Sample], second: Sequence[Sample], batch: TokenBatch) -> Again:
    """Of the two samplings, whose first is packed in `batch`: what they share."""
    logp, same = batch.logp_rollout.clone(), torch.zeros(batch.num_slots, dtype=torch.bool)
    traces: tuple[list[RoutingTrace], list[RoutingTrace]] = ([], [])
    for start, a, b in zip(batch.cu_seqlens.tolist(), first, second, strict=False):
        slots = max(0, common_prefix(a.tokens, b.tokens) - 1)
        both = a.trainable[:slots] & b.trainable[:slots]
        here = slice(start, start + slots)
        same[here] = both
        logp[here] = torch.where(both, b.logp_rollout[:slots], logp[here])
        if a.routing is not None and b.routing is not None and slots:
            for own, trace in zip(traces, (a.routing, b.routing), strict=True):
                own.append(trace.rows(0, slots))
    metrics: dict[str, float] = {}
    if same.any():
        found = mismatch(logp, batch.logp_rollout, same)
        metrics = {"repeat/k3": found.k3, "repeat/max_dlogp": found.max_dlogp}
    if traces[0]:
        a_all, b_all = (RoutingTrace.concat(each) for each in traces)
        if (a_all.valid & b_all.valid).any():
            metrics["repeat/routers"] = routing_disagreement(a_all, b_all).routers
    return Again(
        batch.logp_rollout, logp, same, int(same.sum()) / max(1, batch.num_trainable), metrics
    )


def common_prefix(a: Tensor, b: Tensor) -> int:
    """Tokens two paths begin with."""
    size = min(len(a), len(b))
    differ = (a[:size] != b[:size]).nonzero()
    return int(differ[0, 0]) if len(differ) else size


class OneAtATime:
    """An engine that forgets its cache and serves one request before it takes the next."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine, self.caps, self.version, self._turn = (
            engine,
            engine.caps,
            engine.version,
            asyncio.Lock(),
        )

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Completion:
        async with self._turn:
            await self.engine.reset_cache()
            return await self.engine.generate(prompt_ids, sampling, seed=seed)

    async def load_weights(self, weights: NamedWeights, version: int) -> None:
        await self.engine.load_weights(weights, version)

    async def reset_cache(self) -> None:
        await self.engine.reset_cache()


def _samples(groups: Iterable[Group]) -> list[Sample]:
    return [sample for group in groups for sample in group.samples]
