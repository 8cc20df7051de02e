"""The layers and experts of a bound model, and the checks of traces that are given to it."""

from __future__ import annotations

from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.replay import checks
from onepolicy.replay.axes import Axis, trace_from
from onepolicy.replay.checks import RoutingError
from onepolicy.types import RoutingTrace


class BoundRouters:
    """The layers and experts of a bound model, by which traces are read and checked.

    Attributes:
        layers: decoder index of each MoE layer, ascending.
        num_experts: experts per layer.
        top_k: K, experts per token.
        depth: the number of the model's decoder layers.
    """

    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    depth: int

    def trace_from(
        self, ids: Tensor, *, axis: Axis | None = None, valid: Tensor | None = None
    ) -> RoutingTrace:
        """Return an engine's routes as a trace of this model.

        Args:
            ids: [T, decoder layers or MoE layers, K], any integer dtype.
            axis: "all" for one column per decoder layer, "moe" for one per MoE layer, None to
                decide by the number of columns.
            valid: [T] bool, the rows that were captured, or None for all.

        Raises:
            UsageError: as of `axes.trace_from`.
        """
        return trace_from(
            ids,
            layers=self.layers,
            depth=self.depth,
            num_experts=self.num_experts,
            top_k=self.top_k,
            axis=axis,
            valid=valid,
        )

    def check_trace(self, trace: RoutingTrace, layers: tuple[int, ...]) -> None:
        """Raise UsageError or RoutingError unless this is a trace of these layers of the model."""
        if not isinstance(trace, RoutingTrace):
            raise UsageError(
                f"replay: expected a RoutingTrace, got {type(trace).__name__}; tape.trace() gives "
                "that of a recording, trace_from(ids) of the bound routers that of an engine's ids"
            )
        _check_devices(trace)
        _check_row_order(trace)
        checks.check_trace(trace, layers=layers, num_experts=self.num_experts, top_k=self.top_k)


def _check_devices(trace: RoutingTrace) -> None:
    """Raise if the trace's tensors are on several devices, or on meta.

    Any other device is fine: each layer's routes follow its router's scores.
    """
    named = (("ids", trace.ids), ("valid", trace.valid), ("weights", trace.weights))
    devices = {name: str(tensor.device) for name, tensor in named if tensor is not None}
    if len(set(devices.values())) > 1:
        where = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise UsageError(f"replay: the trace has {where}; pass trace.to(device) of one of them")
    if trace.ids.is_meta:
        raise UsageError(
            "replay: the trace is on meta, which holds no routes; pass one with data, on any device"
        )


def _check_row_order(trace: RoutingTrace) -> None:
    """Raise if the rows were recorded step by step, as of a `generate()` of several samples."""
    if not trace.origin.steps:
        return
    first, later = trace.origin.steps[0], trace.origin.steps[1:]
    raise RoutingError(
        "the trace's rows are not those of this forward: they were recorded in "
        f"{1 + len(later)} forwards of {first[0]} samples that continue each other ({first[1]} "
        f"tokens each, then {later[0][1]}), so they lie step by step, and those of one forward "
        "sample by sample. Of a generate() give "
        "op.pad_routes(op.routes_of_generate(tape, sequences, attention_mask), attention_mask); of "
        "other forwards the rows in the order that this one takes them, with trace.at(rows)"
    )
