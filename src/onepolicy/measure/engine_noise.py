"""Noise of the engine: the same requests with the same seeds, sampled again together or alone.

If both samplings draw the same token in the same context, the engine has scored one token twice.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from onepolicy.build.components import SamplingComponents
from onepolicy.divergence.logprob import mismatch
from onepolicy.divergence.routing import routing_disagreement
from onepolicy.interfaces import NamedWeights, RolloutEngine
from onepolicy.rollout.collect import collect_rollouts
from onepolicy.types import Completion, Group, RoutingTrace, Sample, Sampling, TokenBatch

ALONE = 32
"""Most sequences that are sampled one at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class Resampled:
    """Two samplings of the same requests, compared."""

    before: Tensor  # [T] float32, log-probabilities of the first sampling
    logp: Tensor  # [T] float32, of the second where `same`, else of the first
    same: Tensor  # [T] bool, slots with the same token in the same context both times
    played: Tensor  # [T] bool, sampled tokens of the samples that were sampled again
    share: float  # of `same` among `played`
    metrics: dict[str, float]  # repeat/..., over the slots that both samplings have


async def sample(
    parts: SamplingComponents,
    *,
    most: int | None = None,
    advance: Callable[[], None] = lambda: None,
) -> list[Group]:
    """Sample the problems of step 0 with fixed seeds, so that every call makes the same requests.

    most: take only the first problems. advance: called for every episode.
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
        parts.sampling,
        step=0,
        seed=seed,
        route_spec=parts.route_spec,
        advance=advance,
    )
    return groups


async def sample_again(
    parts: SamplingComponents, first: Sequence[Group], batch: TokenBatch, *, alone: bool
) -> Resampled:
    """Sample the requests of `first` again and compare. `batch` is `first` packed.

    alone: send one request at a time with an empty cache, for at most ALONE sequences, because that
    is slow; else all together.
    """
    await parts.engine.reset_cache()
    plain = dataclasses.replace(parts.sampling, top_logprobs=0)
    parts = dataclasses.replace(parts, sampling=plain)
    if alone:
        most = max(1, ALONE // parts.config.rollout.group_size)
        second = await sample(
            dataclasses.replace(parts, engine=OneAtATime(parts.engine)), most=most
        )
    else:
        second = await sample(parts)
    return compare(first, second, batch)


def compare(first: Sequence[Group], second: Sequence[Group], batch: TokenBatch) -> Resampled:
    """Compare two samplings; `batch` is the first one packed.

    Either may lack episodes, or have others of their samples, so samples are paired by their names.
    """
    logp = batch.logp_rollout.clone()
    same, played = (torch.zeros(batch.num_slots, dtype=torch.bool) for _ in range(2))
    traces: tuple[list[RoutingTrace], list[RoutingTrace]] = ([], [])
    again = dict(_named_samples(second))
    bounds = batch.cu_seqlens.tolist()
    for (start, stop), (name, a) in zip(pairwise(bounds), _named_samples(first), strict=True):
        if name not in again:
            continue
        b = again[name]
        played[start:stop] = a.trainable
        slots = max(0, common_prefix(a.tokens, b.tokens) - 1)
        both = a.trainable[:slots] & b.trainable[:slots]
        place = slice(start, start + slots)
        same[place] = both
        logp[place] = torch.where(both, b.logp_rollout[:slots], logp[place])
        if a.routing is not None and b.routing is not None and slots:
            for common, trace in zip(traces, (a.routing, b.routing), strict=True):
                common.append(trace.rows(0, slots))
    metrics: dict[str, float] = {}
    if same.any():
        found = mismatch(logp, batch.logp_rollout, same, nonfinite="raise")
        metrics = {"repeat/k3": found.k3, "repeat/max_dlogp": found.max_dlogp}
    if traces[0]:
        a_all, b_all = (RoutingTrace.concat(each) for each in traces)
        if (a_all.valid & b_all.valid).any():
            metrics["repeat/routers"] = routing_disagreement(a_all, b_all).routers
    share = int(same.sum()) / max(1, int(played.sum()))
    return Resampled(batch.logp_rollout, logp, same, played, share, metrics)


def common_prefix(a: Tensor, b: Tensor) -> int:
    """Return the number of tokens that both sequences begin with."""
    size = min(len(a), len(b))
    differ = (a[:size] != b[:size]).nonzero()
    if not len(differ):
        return size
    return int(differ[0, 0])


class OneAtATime:
    """An engine that serves one request at a time and resets its cache before each."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine, self.caps, self.version = engine, engine.caps, engine.version
        self._one_request = asyncio.Lock()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Completion:
        """Wait for earlier requests, reset the cache and serve this request."""
        async with self._one_request:
            await self.engine.reset_cache()
            return await self.engine.generate(prompt_ids, sampling, seed=seed)

    async def load_weights(self, weights: NamedWeights, version: int) -> None:
        await self.engine.load_weights(weights, version)

    async def reset_cache(self) -> None:
        await self.engine.reset_cache()


def _named_samples(groups: Iterable[Group]) -> Iterator[tuple[tuple[int, int, int], Sample]]:
    """Iterate over the samples, each with its problem, episode and number in the episode."""
    for group in groups:
        numbers: Counter[int] = Counter()
        for episode, sample in zip(group.episodes, group.samples, strict=True):
            yield (group.problem_id, episode, numbers[episode]), sample
            numbers[episode] += 1
