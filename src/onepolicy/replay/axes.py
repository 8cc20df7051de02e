"""Conversion of an engine's routes into a trace of the model's MoE layers.

Engines count layers in two ways. vLLM and SGLang return one column per decoder layer, with zeros
for dense layers. TensorRT-LLM and vLLM 0.21 return one column per MoE layer. Mistaking one for the
other would replay every layer's routes one or more layers off.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.types import RoutingTrace, id_dtype

Axis = Literal["all", "moe"]


def trace_from(
    ids: Tensor,  # [T, D or L, K] integer
    *,
    layers: tuple[int, ...],
    depth: int,
    num_experts: int,
    top_k: int | None = None,
    axis: Axis | None = None,
    valid: Tensor | None = None,  # [T] bool
) -> RoutingTrace:
    """Return an engine's routes as a trace of the model's MoE layers.

    Args:
        ids: [T, D, K] or [T, L, K] of any integer dtype, for D decoder layers or L MoE layers.
            A row with a negative id, the engines' mark for "not captured", becomes invalid.
        layers: decoder index of each of the model's MoE layers.
        depth: D, the number of the model's decoder layers.
        num_experts: experts per layer.
        top_k: K of the model, None if it is not known.
        axis: "all" for one column per decoder layer, "moe" for one per MoE layer. None decides by
            the number of columns. That is never ambiguous: where D = L the layers are the same.
        valid: [T] bool, the rows that were captured, or None for all. No other row is read.

    Returns:
        A trace of ids [T, L, K], uint8 or uint16.

    Raises:
        UsageError: the number of columns fits neither axis, or not the named one. Or a row has
            another K, the ids' dtype cannot hold the model's experts, a dense layer has routes, an
            id is out of range, or no row was captured. Or an argument has another type or shape
            than this.
    """
    _check_ids(ids, valid)
    layers = tuple(layers)
    if not layers or not all(0 <= layer < depth for layer in layers):
        raise UsageError(
            f"layers is {layers}, expected the decoder indices of the MoE layers, each in "
            f"0..{depth - 1}"
        )
    _check_top_k(ids, top_k)
    _check_dtype(ids, num_experts)
    axis = _find_axis(ids.shape[1], layers, depth, axis)
    # vLLM returns ids as narrow as a trace stores them. Other ids are compared as int64, because
    # uint16 lacks comparisons.
    narrow = ids.dtype == torch.uint8 == id_dtype(num_experts)
    if not narrow:
        ids = ids.to(torch.int64)
    dense_ids = None  # [T, dense layers, K]
    if axis == "all" and depth != len(layers):
        dense_ids, ids = _split_dense_layers(ids, layers, depth)
    valid = _captured_rows(ids, valid, layers, signed=not narrow)
    if dense_ids is not None:
        _check_dense(dense_ids, valid, layers, depth)
    _check_range(ids, valid, layers, num_experts)
    if not narrow:  # an invalid row may hold an id that the narrow dtype cannot
        ids = torch.where(valid[:, None, None], ids, 0).to(id_dtype(num_experts))
    return RoutingTrace(ids, valid, layers, num_experts)


def _check_ids(ids: Tensor, valid: Tensor | None) -> None:
    if not isinstance(ids, Tensor) or ids.is_nested:
        raise UsageError(
            f"routes are {type(ids).__name__}, expected an integer tensor [T, layers, K]; "
            "what an engine returned, onepolicy.integrations.core.payload.to_trace reads"
        )
    if ids.dim() != 3 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise UsageError(
            f"routes have shape {tuple(ids.shape)} and dtype {ids.dtype}, expected integers "
            "[T, layers, K]"
        )
    if valid is None:
        return
    if not isinstance(valid, Tensor) or valid.is_nested:
        raise UsageError(
            f"valid is {type(valid).__name__}, expected a bool tensor [{len(ids)}], one per row"
        )
    if valid.shape != ids.shape[:1] or valid.dtype != torch.bool:
        raise UsageError(
            f"valid has shape {tuple(valid.shape)} and dtype {valid.dtype}, expected bool "
            f"[{len(ids)}], one per row"
        )


def _check_top_k(ids: Tensor, top_k: int | None) -> None:
    found = ids.shape[2]
    if top_k is None or found == top_k:
        return
    cause = "they are those of another model"
    if found > top_k:
        cause = (
            "a fused shared expert adds a column that is no choice of the router (then give "
            f"ids[..., :{top_k}]), or they are those of another model"
        )
    raise UsageError(
        f"routes have {found} experts per token, but the model routes each token to {top_k}: "
        f"{cause}"
    )


def _check_dtype(ids: Tensor, num_experts: int) -> None:
    """Raise if the ids' dtype is too narrow: ids that it cannot hold have wrapped on the way."""
    largest = torch.iinfo(ids.dtype).max
    if largest >= num_experts - 1:
        return
    wrapped = f"higher ids have wrapped to 0..{largest}"
    if ids.dtype.is_signed:
        wrapped = "higher ids have become negative"
    raise UsageError(
        f"routes are {ids.dtype}, which holds ids up to {largest}, but the model's experts are "
        f"0..{num_experts - 1}: {wrapped}; let the engine, and all between it and here, carry "
        f"{id_dtype(num_experts)} or a wider dtype"
    )


def _find_axis(columns: int, layers: tuple[int, ...], depth: int, axis: Axis | None) -> Axis:
    counts: dict[Axis, int] = {"all": depth, "moe": len(layers)}
    for name, count in counts.items():
        if axis in (None, name) and columns == count:
            return name
    named = ""
    if axis is not None:
        named = f" and axis={axis!r} was named"
    raise UsageError(
        f"routes have {columns} layers{named}, but the model has {depth} decoder layers, "
        f"{len(layers)} of them MoE ({_short(layers)}); prediction heads and draft layers are no "
        "part of either"
    )


def _split_dense_layers(ids: Tensor, layers: tuple[int, ...], depth: int) -> tuple[Tensor, Tensor]:
    """Return the columns of the dense layers and those of the MoE layers, of ids [T, D, K]."""
    if len(set(layers)) != len(layers):
        raise UsageError(
            "a model with two routers in one layer has no axis of one column per decoder layer"
        )
    dense = [layer for layer in range(depth) if layer not in layers]
    return ids[:, dense], ids[:, list(layers)]


def _captured_rows(
    ids: Tensor, valid: Tensor | None, layers: tuple[int, ...], *, signed: bool
) -> Tensor:
    """Return [T] bool: the rows of ids [T, L, K] that are valid and have no negative id.

    Raise UsageError if these are none although some rows are valid. signed: ids can be negative.
    """
    given = ids.new_ones(len(ids), dtype=torch.bool)
    if valid is not None:
        given = valid.to(ids.device)
    captured = given
    if signed:
        captured = given & (ids >= 0).flatten(1).all(1)
    if given.any() and not captured.any():
        raise UsageError(_nothing_captured(ids[given], layers))
    return captured


def _nothing_captured(ids: Tensor, layers: tuple[int, ...]) -> str:
    """Return the error's text for rows [n, L, K] that all hold a negative id."""
    is_missing = (ids < 0).any(-1).all(0).tolist()  # [L]
    missing = [layer for layer, gone in zip(layers, is_missing, strict=True) if gone]
    if 0 < len(missing) < len(layers):
        return (
            f"routes of layer {', '.join(map(str, missing))} are -1 in all {len(ids)} rows: the "
            "engine did not capture it (a fused kernel, another pipeline stage), and a row that "
            "lacks one layer's routes cannot be replayed"
        )
    return (
        f"routes have a -1 in all {len(ids)} rows: the engine captured nothing (its capture is not "
        "active or was not asked for, or these are another rank's rows); fix that, or give "
        "valid=False for rows that the trainer may route itself"
    )


def _check_dense(ids: Tensor, valid: Tensor, layers: tuple[int, ...], depth: int) -> None:
    """Raise if a dense layer has routes. ids [T, dense layers, K], valid [T].

    Engines write the same filler into every row of a dense layer. Rows that differ are routes of
    another layer.
    """
    rows = valid.nonzero()[:, 0]
    changed = (ids[rows] != ids[rows[:1]]).any(-1)  # [n, dense layers]
    if not changed.any():
        return
    index, column = changed.nonzero()[0].tolist()
    row = int(rows[index])
    layer = [layer for layer in range(depth) if layer not in layers][column]
    raise UsageError(
        f"routes have {depth} layers, as many as the decoder, but dense layer {layer} has routes, "
        f"first at row {row}: {ids[row, column].tolist()}; the layer axis is shifted or in another "
        "order"
    )


def _check_range(ids: Tensor, valid: Tensor, layers: tuple[int, ...], num_experts: int) -> None:
    """Raise if a valid row of ids [T, L, K] has an id too large: a narrow dtype would wrap it."""
    too_large = (ids > num_experts - 1) & valid[:, None, None]
    if not too_large.any():
        return
    row, column, _ = too_large.nonzero()[0].tolist()
    raise UsageError(
        f"routes name an expert outside 0..{num_experts - 1} at layer {layers[column]}, row {row}: "
        f"{ids[row, column].tolist()}; these are physical ids (of experts that load balancing has "
        "moved or copied), a fused shared expert, or routes of another model"
    )


def _short(layers: tuple[int, ...]) -> str:
    if layers == tuple(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]}..{layers[-1]}"
    return ", ".join(map(str, layers))
