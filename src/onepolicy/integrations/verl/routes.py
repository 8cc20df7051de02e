"""The routes of one verl micro-batch, in the layout of its forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.errors import describe_argument
from onepolicy.integrations.core.layout import contiguous_slice, packed
from onepolicy.integrations.core.payload import missing_routes, to_trace
from onepolicy.replay.padding import pad_routes, unpad_routes
from onepolicy.replay.routers import Routers
from onepolicy.types import RoutingTrace

ROUTES = "routed_experts"
"""verl's field of the rollout's routes, [tokens, layers, K] int16."""
NATIVE_ROUTES = "onepolicy_native_routes"
"""Field of the trainer's own choice in scoring, [tokens, MoE layers, K] int16; -1: not known."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatchRoutes:
    """The traces of a micro-batch's samples.

    Attributes:
        traces: one per sample, of one row less than it has tokens.
        lengths: tokens of each sample.
        trained: whether any response token of the sample counts. verl fills batches up with
            synthetic samples, whose routes are zeros and whose mask is empty.
    """

    traces: list[RoutingTrace]
    lengths: list[int]
    trained: list[bool]

    @property
    def missing(self) -> int:
        """The number of trained samples without a single route."""
        return sum(
            on and not bool(trace.valid.any())
            for trace, on in zip(self.traces, self.trained, strict=True)
        )

    @property
    def rows(self) -> int:
        """The number of rows of the trained samples, with routes or without."""
        counted = zip(self.traces, self.trained, strict=True)
        return sum(len(trace) for trace, on in counted if on)

    def laid_out(
        self, attention_mask: Tensor | None, pad_size: int, *, rank: int = 0, ranks: int = 1
    ) -> RoutingTrace:
        """Return the trace of this rank's forward.

        Args:
            attention_mask: [B, S] of a padded forward; None for a packed one, which ends with
                `pad_size` tokens of padding (bucket and sequence parallelism).
            rank, ranks: of Ulysses sequence parallelism, where every rank feeds an equal run of the
                packed tokens.
        """
        if attention_mask is not None:
            return pad_routes(self.traces, attention_mask.cpu()).to(attention_mask.device)
        whole = packed(self.traces, self.lengths, sum(self.lengths) + pad_size)
        return contiguous_slice(whole, rank, ranks)

    def split(self, native: RoutingTrace, attention_mask: Tensor | None) -> list[RoutingTrace]:
        """Return the rows [tokens] of each sample in the trace of a whole forward."""
        if attention_mask is not None:
            return unpad_routes(native, attention_mask)
        ends = torch.tensor(self.lengths).cumsum(0).tolist()
        return [
            native.rows(end - length, end) for end, length in zip(ends, self.lengths, strict=True)
        ]


def read_routes(routers: Routers, micro_batch: Any) -> MicroBatchRoutes:
    """Return the routes of a verl micro-batch (a TensorDict of nested tensors).

    Raises UsageError if `routed_experts` is not nested like the tokens, or not of this model.
    """
    routes, tokens = micro_batch[ROUTES], micro_batch["input_ids"]
    if not isinstance(routes, Tensor) or not routes.is_nested:
        raise UsageError(
            f"verl: routed_experts is {describe_argument(routes)}, expected a nested tensor with "
            "one row per token, as left_right_2_no_padding makes it"
        )
    lengths = tokens.offsets().diff().tolist()
    trained = _trained_samples(micro_batch, len(lengths))
    traces = []
    for payload, length, counts in zip(routes.unbind(), lengths, trained, strict=True):
        trace = missing_routes(routers, length - 1)
        if counts:
            trace = to_trace(routers, payload, tokens=length, form="verl")
        traces.append(trace)
    return MicroBatchRoutes(traces, lengths, trained)


def _trained_samples(micro_batch: Any, samples: int) -> list[bool]:
    """Return whether each sample has a response token that counts; True where nothing says so."""
    if "response_mask" not in set(micro_batch.keys()):
        return [True] * samples
    mask = micro_batch["response_mask"]
    if mask.is_nested:
        return [bool((row != 0).any()) for row in mask.unbind()]
    counts: list[bool] = (mask != 0).any(1).tolist()
    return counts
