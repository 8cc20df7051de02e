"""Routes for engines that return none: feed the finished samples to a copy of the model in the engine's dtype.

This is not the forward that sampled. Shapes and kernels differ from decoding, so where two experts score nearly the
same the choice may differ from the engine's. Every row says so (`RouteSpan.source = "reprefill"`), such rows are never
mixed with an engine's, and nothing makes them unless `replay.source = "reprefill"` asks for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from onepolicy.config import UsageError
from onepolicy.interfaces import Weights
from onepolicy.models.fp32_head import load_weights
from onepolicy.models.packed_attention import Packing
from onepolicy.replay.routers import bind_routers
from onepolicy.types import Group, RouteSpan, RoutingTrace, Sample


class Reprefill:
    """Takes over `model`, which `prepare_for_training` has made ready for packed samples."""

    def __init__(self, model: PreTrainedModel, *, tokens: int, weights: bool = False) -> None:
        """tokens: slots of one forward (a longer sample gets one of its own); weights: record combine weights too."""
        self.model, self.version = model.eval(), 0
        self._routers, self._tokens, self._weights = bind_routers(model), tokens, weights
        self._device = next(model.parameters()).device

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
                group, samples=tuple(dataclasses.replace(sample, routing=next(traces)) for sample in group.samples)
            )
            for group in groups
        ]

    async def load_weights(self, weights: Weights, version: int) -> None:
        """Take over these tensors, cast to the model's dtype."""
        load_weights(self.model, weights)
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

    @torch.no_grad()
    def _record(self, samples: list[Sample]) -> list[RoutingTrace]:
        lengths = [len(sample.tokens) - 1 for sample in samples]
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        with self._routers.record(weights=self._weights) as tape:
            self.model(
                input_ids=torch.cat([sample.tokens[:-1] for sample in samples]).long()[None].to(self._device),
                position_ids=torch.cat([torch.arange(n) for n in lengths])[None].to(self._device),
                use_cache=False,
                logits_to_keep=1,
                packing=Packing.of(bounds, self._device),
            )
        whole = tape.trace().to("cpu")
        return [
            dataclasses.replace(whole.rows(start, start + n), spans=(RouteSpan(0, n, "reprefill", self.version),))
            for start, n in zip(bounds.tolist(), lengths, strict=False)
        ]
