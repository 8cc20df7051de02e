"""The scores of tokens under the weights that sampled them, which may be older than the policy's.

With `rollout.max_staleness` and `numerics = on-policy` a step's tokens are of several versions of
the weights. Each of them is scored by its own version, so that bits can be compared: the engine
computes a path anew after every update, and so does the forward here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from onepolicy.replay.checks import RoutingError
from onepolicy.train.scorer import PolicyScorer
from onepolicy.types import RoutingTrace, TokenBatch

NO_VERSION = -1


class OwnWeights:
    """The policy's weights of the last updates, and scores under them."""

    def __init__(self, scorer: PolicyScorer, most: int) -> None:
        """Keep nothing yet. most: older versions that a token may be of (rollout.max_staleness)."""
        self._scorer, self._most = scorer, most
        self._kept: dict[int, list[Tensor]] = {}  # version -> every parameter

    def keep(self) -> None:
        """Drop the weights that nothing needs any more, and keep a copy of the policy's of now.

        It is called before each update, with `scorer.version` the version that is kept.
        """
        version, weights = self._scorer.version, self._scorer.model.parameters()
        for old in [each for each in self._kept if each <= version - self._most]:
            del self._kept[old]
        self._kept[version] = [weight.detach().clone() for weight in weights]

    def score(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch with `logp_old` and `routing_native` under each slot's own weights.

        A slot's log-probability is of the version that sampled its token, and its experts are of
        the version that returned its route. Nothing is replayed: the forward chooses the experts
        that the engine chose, or the caller finds that it does not. Raises RoutingError for a route
        without a version.
        """
        values = batch.version.masked_fill(~batch.trainable, NO_VERSION)
        routes = _route_versions(batch.routing, batch.num_slots)
        logp, native = torch.zeros(batch.num_slots), None
        for version in sorted({*values.tolist(), *routes.tolist()} - {NO_VERSION}):
            wanted = (values == version) | (routes == version)
            samples = batch.segment[wanted].unique().tolist()
            slots = batch.slots_of(samples)
            with self.weights_of(version):
                scored = self._scorer.score_unchecked(batch.select(samples), replay=False)
            assert scored.logp_old is not None
            of_values, of_routes = values[slots] == version, routes[slots] == version
            logp[slots[of_values]] = scored.logp_old[of_values]
            if scored.routing_native is not None:
                if native is None:
                    native = _empty_trace(scored.routing_native, batch.num_slots)
                native.ids[slots[of_routes]] = scored.routing_native.ids[of_routes]
                native.valid[slots[of_routes]] = True
        return batch.replace(logp_old=logp, routing_native=native)

    @contextmanager
    def weights_of(self, version: int) -> Iterator[None]:
        """Give the policy the weights of a version. Afterwards it has its own tensors again."""
        if version == self._scorer.version:
            yield
            return
        assert version in self._kept, "the run discards tokens that are older than max_staleness"
        parameters = list(self._scorer.model.parameters())
        own = [parameter.data for parameter in parameters]
        try:
            for parameter, kept in zip(parameters, self._kept[version], strict=True):
                parameter.data = kept
            yield
        finally:
            for parameter, weights in zip(parameters, own, strict=True):
                parameter.data = weights


def _route_versions(routing: RoutingTrace | None, slots: int) -> Tensor:
    """Return [T] int32, the version of the weights that chose a slot's experts, or NO_VERSION."""
    versions = torch.full((slots,), NO_VERSION, dtype=torch.int32)
    if routing is None:
        return versions
    for span in routing.spans:
        versions[span.start : span.start + span.length] = span.version
    versions.masked_fill_(~routing.valid, NO_VERSION)
    unknown = routing.valid & (versions == NO_VERSION)
    if unknown.any():
        slot = int(unknown.nonzero()[0, 0])
        raise RoutingError(
            f"the route of slot {slot} does not say which weights chose it, so it cannot be "
            "compared with theirs"
        )
    return versions


def _empty_trace(like: RoutingTrace, slots: int) -> RoutingTrace:
    ids = torch.zeros(slots, *like.ids.shape[1:], dtype=like.ids.dtype)
    valid = torch.zeros(slots, dtype=torch.bool)
    return RoutingTrace(ids, valid, like.layers, like.num_experts)
