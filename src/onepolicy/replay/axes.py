"""Routes of an engine as a trace of this model: which of the engine's layers are the model's MoE layers.

Engines count layers in two ways: vLLM and SGLang return one column per decoder layer, with zeros for dense layers;
TensorRT-LLM and vLLM 0.21 one per MoE layer. Read as the other, every layer is replayed one or more layers off.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.types import RoutingTrace, TraceOrigin, id_dtype

Axis = Literal["all", "moe"]


def trace_from(
    ids: Tensor,  # [T, all decoder layers or MoE layers, K] any integer dtype
    *,
    layers: tuple[int, ...],  # decoder index of each MoE layer of the model
    depth: int,  # its decoder layers
    num_experts: int,
    axis: Axis | None = None,
    valid: Tensor | None = None,  # [T] bool
) -> RoutingTrace:
    """Return the trace of the model's MoE layers. Rows with a negative id, an engine's mark for "not captured", are not
    valid, and nothing of a row that is not valid is read.

    axis None tells the two from the number of columns, which is never ambiguous: where both numbers are the same, so
    are the layers. UsageError if the columns fit neither, not the axis named, if a dense layer has routes, or if no
    row was captured.
    """
    if not isinstance(ids, Tensor):
        raise UsageError(
            f"routes are {type(ids).__name__}, expected an integer tensor [T, layers, K]"
        )
    if ids.dim() != 3 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise UsageError(
            f"routes have shape {tuple(ids.shape)} and dtype {ids.dtype}, expected integers [T, layers, K]"
        )
    if valid is not None and not isinstance(valid, Tensor):
        raise UsageError(
            f"valid is {type(valid).__name__}, expected a bool tensor [{len(ids)}], one per row"
        )
    if valid is not None and (valid.shape != ids.shape[:1] or valid.dtype != torch.bool):
        raise UsageError(
            f"valid has shape {tuple(valid.shape)} and dtype {valid.dtype}, expected bool [{len(ids)}], one per row"
        )
    layers = tuple(layers)
    if not layers or not all(0 <= layer < depth for layer in layers):
        raise UsageError(
            f"layers is {layers}, expected the decoder indices of the MoE layers, each in 0..{depth - 1}"
        )
    counts = {"all": depth, "moe": len(layers)}
    found = next(
        (name for name, count in counts.items() if axis in (None, name) and ids.shape[1] == count),
        None,
    )
    if found is None:
        named = "" if axis is None else f" and axis={axis!r} was named"
        raise UsageError(
            f"routes have {ids.shape[1]} layers{named}, but the model has {depth} decoder layers, {len(layers)} of "
            f"them MoE ({_short(layers)}); prediction heads and draft layers are no part of either"
        )
    narrow = (
        ids.dtype == torch.uint8 == id_dtype(num_experts)
    )  # as vLLM returns them; uint16 lacks comparisons
    ids = ids if narrow else ids.to(torch.int64)
    of_dense = None  # [T, dense layers, K]
    if found == "all" and depth != len(layers):
        if len(set(layers)) != len(layers):
            raise UsageError(
                "a model with two routers in one layer has no axis of one column per decoder layer"
            )
        dense = [layer for layer in range(depth) if layer not in layers]
        of_dense, ids = ids[:, dense], ids[:, list(layers)]
    asked = ids.new_ones(len(ids), dtype=torch.bool) if valid is None else valid.to(ids.device)
    valid = asked if narrow else asked & (ids >= 0).flatten(1).all(1)
    if asked.any() and not valid.any():
        raise UsageError(_nothing_captured(ids[asked], layers))
    if of_dense is not None:
        _check_dense(of_dense, valid, layers, depth)
    beyond = (ids > num_experts - 1) & valid[:, None, None]
    if beyond.any():  # the narrow dtype would wrap it into a valid id
        row, column, _ = beyond.nonzero()[0].tolist()
        raise UsageError(
            f"routes name an expert outside 0..{num_experts - 1} at layer {layers[column]}, row {row}: "
            f"{ids[row, column].tolist()}"
        )
    if not narrow:  # what invalid rows hold is never read
        ids = torch.where(valid[:, None, None], ids, 0).to(id_dtype(num_experts))
    return RoutingTrace(ids, valid, layers, num_experts).with_origin(
        TraceOrigin(f"engine, {found} layers")
    )


def _nothing_captured(ids: Tensor, layers: tuple[int, ...]) -> str:  # ids [n, L, K]
    """What to say of rows that all hold a negative id."""
    missing = (ids < 0).any(-1).all(0)  # [L]
    named = [layer for layer, gone in zip(layers, missing.tolist(), strict=True) if gone]
    if 0 < len(named) < len(layers):
        return (
            f"routes of layer {', '.join(map(str, named))} are -1 in all {len(ids)} rows: the engine did not capture "
            "it (a fused kernel, another pipeline stage), and a row that lacks one layer's routes cannot be replayed"
        )
    return (
        f"routes have a -1 in all {len(ids)} rows: the engine captured nothing (its capture is not active or was not "
        "asked for, or these are another rank's rows); mend that, or give valid=False for rows that the trainer may "
        "route itself"
    )


def _check_dense(
    ids: Tensor, valid: Tensor, layers: tuple[int, ...], depth: int
) -> None:  # [T, dense layers, K], [T]
    """Engines write the same filler into every row of a dense layer; anything else is another layer's routes."""
    rows = valid.nonzero()[:, 0]
    moved = (ids[rows] != ids[rows[:1]]).any(-1)  # [n, dense layers]
    if moved.any():
        place, column = moved.nonzero()[0].tolist()
        row = int(rows[place])
        layer = [layer for layer in range(depth) if layer not in layers][column]
        raise UsageError(
            f"routes have {depth} layers, as many as the decoder, but dense layer {layer} has routes, "
            f"first at row {row}: {ids[row, column].tolist()}; the layer axis is shifted or in another order"
        )


def _short(layers: tuple[int, ...]) -> str:
    if layers == tuple(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]}..{layers[-1]}"
    return ", ".join(map(str, layers))
