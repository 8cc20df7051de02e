"""Routes for engines that return none: a second forward over the finished samples records them.

The forward is that of a copy of the model in the engine's dtype. It is not the forward that
sampled: shapes and kernels differ from decoding. So where two experts score nearly the same, the
choice may differ from the engine's. Every row of routes is marked (`RouteSpan.source =
"reprefill"`), and such rows are never mixed with an engine's. They are made only if
`replay.source = "reprefill"`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import torch

from onepolicy.config import HFEngineConfig, UsageError
from onepolicy.interfaces import EngineCaps, NamedWeights
from onepolicy.models.fp32_head import load_weights
from onepolicy.models.quant.quantise import use_scales
from onepolicy.train.forward import tempered_logits
from onepolicy.train.pack import pack
from onepolicy.train.scorer import PolicyScorer
from onepolicy.types import Group, RouteSpan, RoutingTrace, Sample, TokenBatch


class Reprefill:
    """A recorder of routes for finished samples, and a target of weight updates."""

    def __init__(self, scorer: PolicyScorer, *, tokens: int, weights: bool = False) -> None:
        """Build the recorder.

        scorer: of a copy of the model in the engine's dtype, in eval mode, ready for packed
        samples. tokens: slots of one forward; a longer sample has a forward of its own. weights:
        record combine weights too.
        """
        self._scorer, self._tokens, self._weights = scorer, tokens, weights
        engine = scorer.config.rollout.engine
        weights_dtype: str | None = None
        if not isinstance(engine, HFEngineConfig):  # these quantise rounded weights
            weights_dtype = engine.dtype
        self.caps = EngineCaps(True, tokens, weights, weights_dtype=weights_dtype)
        self.version = 0

    def fill(self, groups: list[Group]) -> list[Group]:
        """Return the groups with routes in every sample.

        Raises UsageError if a sample has routes already, or was sampled by other weights.
        """
        samples = [sample for group in groups for sample in group.samples]
        for i, sample in enumerate(samples):
            self._check_sample(i, sample)
        traces = iter([trace for chunk in self._chunks(samples) for trace in self._record(chunk)])
        return [_with_routes(group, [next(traces) for _ in group.samples]) for group in groups]

    def _check_sample(self, index: int, sample: Sample) -> None:
        if sample.routing is not None:
            raise UsageError(
                f"sample {index} has its engine's routes; replay.source=reprefill never replaces "
                "or mixes them"
            )
        versions = set(sample.version[sample.trainable].tolist())
        if versions - {self.version}:
            raise UsageError(
                f"sample {index} was sampled by weights {sorted(versions)}, but the re-prefill "
                f"holds version {self.version}; routes of other weights are not the rollout's"
            )

    async def load_weights(self, weights: NamedWeights, version: int) -> None:
        """Load these tensors, cast to the model's dtype."""
        load_weights(self._scorer.model, weights)
        self.version = version

    def use_scales(self, scales: dict[str, float]) -> None:
        """Take over the calibrated scales of the engine's static activations."""
        use_scales(self._scorer.model, scales)

    def _chunks(self, samples: list[Sample]) -> Iterator[list[Sample]]:
        """Yield the samples of each forward, in order."""
        chunk: list[Sample] = []
        free_slots = 0
        for sample in samples:
            slots = len(sample.tokens) - 1
            if chunk and slots > free_slots:
                yield chunk
                chunk = []
            if not chunk:
                free_slots = self._tokens
            free_slots -= slots
            chunk.append(sample)
        if chunk:
            yield chunk

    def _record(self, samples: list[Sample]) -> list[RoutingTrace]:
        # `pack` asks for outcomes, which these samples do not have yet. Nothing here reads them.
        graded = tuple(dataclasses.replace(sample, outcome=0.0) for sample in samples)
        batch = pack([Group(0, graded)])
        on_device = batch.to(self._scorer.device)
        trace = self._record_batch(on_device).to("cpu")
        bounds = batch.cu_seqlens.tolist()
        return [self._mark(trace.rows(*rows)) for rows in itertools.pairwise(bounds)]

    @torch.no_grad()
    def _record_batch(self, batch: TokenBatch) -> RoutingTrace:
        """Return the experts that every slot of a batch on the model's device is routed to."""
        assert self._scorer.routers is not None
        first_slot = torch.zeros(1, dtype=torch.int64, device=self._scorer.device)  # not read
        with self._scorer.routers.record(weights=self._weights) as recorder:
            tempered_logits(self._scorer.model, batch, first_slot)
        return recorder.trace()

    def _mark(self, trace: RoutingTrace) -> RoutingTrace:
        """Mark all rows as recorded by a re-prefill."""
        span = RouteSpan(0, len(trace), "reprefill", self.version)
        return dataclasses.replace(trace, spans=(span,))


def _with_routes(group: Group, traces: list[RoutingTrace]) -> Group:
    samples = tuple(
        dataclasses.replace(sample, routing=trace)
        for sample, trace in zip(group.samples, traces, strict=True)
    )
    return dataclasses.replace(group, samples=samples)
