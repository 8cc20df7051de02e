"""Routes for engines that return none: feed the finished samples to a copy of the model in the engine's dtype.

This is not the forward that sampled. Shapes and kernels differ from decoding, so where two experts score nearly the
same the choice may differ from the engine's. Every row says so (`RouteSpan.source = "reprefill"`), such rows are never
mixed with an engine's, and nothing makes them unless `replay.source = "reprefill"` asks for it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from onepolicy.config import UsageError
from onepolicy.interfaces import NamedWeights
from onepolicy.models.fp32_head import load_weights
from onepolicy.train.pack import pack
from onepolicy.train.scorer import PolicyScorer
from onepolicy.types import Group, RouteSpan, RoutingTrace, Sample


class Reprefill:
    def __init__(self, scorer: PolicyScorer, *, tokens: int, weights: bool = False) -> None:
        """scorer: of a copy of the model in the engine's dtype, in eval mode, ready for packed samples.

        tokens: slots of one forward (a longer sample gets one of its own); weights: record combine weights too.
        """
        self._scorer, self._tokens, self._weights = scorer, tokens, weights
        self.version = 0

    def fill(self, groups: list[Group]) -> list[Group]:
        """The same groups, every sample with the routes of its path. UsageError if one has routes already."""
        samples = [sample for group in groups for sample in group.samples]
        for i, sample in enumerate(samples):
            if sample.routing is not None:
                raise UsageError(
                    f"sample {i} has its engine's routes; replay.source=reprefill never replaces or mixes them"
                )
            sampled_by = set(sample.version[sample.trainable].tolist())
            if sampled_by - {self.version}:
                raise UsageError(
                    f"sample {i} was sampled by weights {sorted(sampled_by)}, but the re-prefill holds version "
                    f"{self.version}; routes of other weights are not the rollout's"
                )
        traces = iter([trace for chunk in self._chunks(samples) for trace in self._record(chunk)])
        return [
            dataclasses.replace(
                group,
                samples=tuple(
                    dataclasses.replace(sample, routing=next(traces)) for sample in group.samples
                ),
            )
            for group in groups
        ]

    async def load_weights(self, weights: NamedWeights, version: int) -> None:
        """Take over these tensors, cast to the model's dtype."""
        load_weights(self._scorer.model, weights)
        self.version = version

    def _chunks(self, samples: list[Sample]) -> Iterator[list[Sample]]:
        chunk: list[Sample] = []
        room = 0
        for sample in samples:
            slots = len(sample.tokens) - 1
            if chunk and slots > room:
                yield chunk
                chunk = []
            room = (room if chunk else self._tokens) - slots
            chunk.append(sample)
        if chunk:
            yield chunk

    def _record(self, samples: list[Sample]) -> list[RoutingTrace]:
        graded = tuple(
            dataclasses.replace(sample, outcome=0.0) for sample in samples
        )  # not yet; nobody reads it here
        batch = pack([Group(0, graded)])
        whole = self._scorer.routes(batch.to(self._scorer.device), weights=self._weights).to("cpu")
        bounds = batch.cu_seqlens.tolist()
        return [
            dataclasses.replace(
                whole.rows(start, stop),
                spans=(RouteSpan(0, stop - start, "reprefill", self.version),),
            )
            for start, stop in itertools.pairwise(bounds)
        ]
