"""The layouts of per-slot arguments, each flattened to [T] and restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from onepolicy.arguments import Kind, require_one_device, require_tensor
from onepolicy.errors import UsageError, describe_argument

Layout = Tensor | Sequence[Tensor]
"""[T] packed, [B, T] padded on either side, or one [T_i] per sequence."""
IDS = ("segment", "turn", "tokens", "tokens_rollout", "version", "group")
"""Arguments that are whole numbers. The mask is bool, the others are numbers of any kind."""
REQUIRED_ARGUMENTS = 3
"""Arguments that every caller must give: two sides of log-probabilities and the mask."""


def flatten_arguments(caller: str, given: Mapping[str, Layout | None]) -> dict[str, Tensor | None]:
    """Return each argument as [T], and None as it is.

    The first three arguments are both sides and the mask, all of one shape. The others have that
    shape too, or are flat. If `segment` is None, each row of [B, T] and each item of a list is a
    sequence. Raises UsageError that names the argument if its kind, shape or device is wrong.
    """
    names = list(given)
    for position, (name, value) in enumerate(given.items()):
        if value is not None or position < REQUIRED_ARGUMENTS:
            _check_kind(caller, name, value)
    main = given[names[0]]
    assert main is not None
    _check_shapes(caller, given)
    flat: dict[str, Tensor | None] = dict.fromkeys(names)
    flat |= {name: flatten_layout(value) for name, value in given.items() if value is not None}
    if "segment" in flat and flat["segment"] is None:
        flat["segment"] = sequence_ids(main)
    require_one_device(caller, flat)
    return flat


def _check_kind(caller: str, name: str, value: object) -> None:
    kinds = "a tensor [T] or [B, T], or a list of one [T_i] per sequence"
    kind: Kind | None = "numbers"
    if name in IDS:
        kind = "whole numbers"
    elif name == "mask":
        kind = None  # _check_shapes says what it must be
    if isinstance(value, Tensor):
        require_tensor(caller, name, value, kind)
        if value.dim() not in (1, 2):
            raise UsageError(f"{caller}: {name} is {describe_argument(value)}, expected {kinds}")
        return
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise UsageError(f"{caller}: {name} is {type(value).__name__}, expected {kinds}")
    if not value:
        raise UsageError(f"{caller}: {name} is an empty list; there is no slot to look at")
    for number, item in enumerate(value):
        if not isinstance(item, Tensor) or item.is_nested or item.dim() != 1:
            raise UsageError(
                f"{caller}: item {number} of {name} is {describe_argument(item)}, expected a "
                "tensor [T_i]"
            )
        require_tensor(caller, f"item {number} of {name}", item, kind)


def _check_shapes(caller: str, given: Mapping[str, Layout | None]) -> None:
    shapes = {name: _shape(value) for name, value in given.items() if value is not None}
    first, second, mask = list(shapes)[:REQUIRED_ARGUMENTS]
    dtypes = {m.dtype for m in _items(given[mask])}
    if shapes[first] != shapes[second] or shapes[first] != shapes[mask] or dtypes - {torch.bool}:
        kinds = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise UsageError(
            f"{caller}: {first} {shapes[first]}, {second} {shapes[second]} and {mask} "
            f"{shapes[mask]} {kinds} must have one shape, the mask bool ({mask}.bool() makes one "
            "of 0 and 1)"
        )
    total = sum(item.numel() for item in _items(given[first]))
    for name, shape in shapes.items():
        if shape != shapes[first] and shape != [total]:
            raise UsageError(f"{caller}: {name} has shape {shape}, {first} {shapes[first]}")


def _items(value: Layout | None) -> Sequence[Tensor]:
    assert value is not None
    if isinstance(value, Tensor):
        return [value]
    return value


def _shape(value: Layout) -> list[int] | list[list[int]]:
    if isinstance(value, Tensor):
        return list(value.shape)
    return [list(item.shape) for item in value]


def flatten_layout(values: Layout) -> Tensor:
    """Return the slots of any layout as [T]."""
    if isinstance(values, Tensor):
        return values.reshape(-1)
    return torch.cat(list(values))


def sequence_ids(values: Layout) -> Tensor | None:
    """Return the sequence [T] int64 of each flat slot, or None for [T], which has no sequences.

    Each row of [B, T] and each item of a list is a sequence.
    """
    if not isinstance(values, Tensor):
        lengths = torch.tensor([len(v) for v in values])
        return torch.arange(len(values)).repeat_interleave(lengths).to(values[0].device)
    if values.dim() == 2:
        return torch.arange(len(values), device=values.device).repeat_interleave(values.shape[1])
    return None


def restore_layout(flat: Tensor, like: Layout) -> Layout:
    """Return the slots [T] in the layout of `like`."""
    if isinstance(like, Tensor):
        return flat.reshape(like.shape)
    return list(flat.split([len(v) for v in like]))


def slot_index(slot: int, like: Layout) -> list[int]:
    """Return the index of a flat slot in a layout: [t], [row, t] or [item, t]."""
    if isinstance(like, Tensor):
        if like.dim() == 1:
            return [slot]
        return [slot // like.shape[1], slot % like.shape[1]]
    for number, item in enumerate(like):
        if slot < len(item):
            return [number, slot]
        slot -= len(item)
    raise AssertionError(slot)
