"""The layouts in which a caller may hand in what belongs to slots, taken apart and put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from onepolicy.config.base import UsageError
from onepolicy.types import describe_argument

Layout = Tensor | Sequence[Tensor]
"""[T] packed, [B, T] padded on either side, or one [T_i] per sequence."""
REQUIRED_ARGUMENTS = 3
"""How many arguments a caller must have: two sides of log-probabilities and the mask."""


def flatten_arguments(caller: str, given: Mapping[str, Layout | None]) -> dict[str, Tensor | None]:
    """Return each argument as [T], None as it is. The first three are both sides and the mask, all of one shape; the
    others are of that shape too, or flat. Without `segment`, the rows of [B, T] and the items of a list are its
    sequences. UsageError, naming the argument, if one is of another kind, shape or device."""
    names = list(given)
    for place, (name, value) in enumerate(given.items()):
        if value is not None or place < REQUIRED_ARGUMENTS:
            _check_kind(caller, name, value)
    main = given[names[0]]
    assert main is not None
    _check_shapes(caller, given)
    flat = {name: None if value is None else flatten_layout(value) for name, value in given.items()}
    if "segment" in flat and flat["segment"] is None:
        flat["segment"] = sequence_ids(main)
    for name in ("segment", "turn"):
        if (ids := flat.get(name)) is not None and (
            ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool
        ):
            raise UsageError(
                f"{caller}: {name} is {describe_argument(ids)}, expected whole numbers; pass {name}.long()"
            )
    devices = {name: str(value.device) for name, value in flat.items() if value is not None}
    if len(set(devices.values())) > 1:
        where = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise UsageError(f"{caller}: {where}; pass them on one device")
    return flat


def _check_kind(caller: str, name: str, value: object) -> None:
    kinds = "a tensor [T] or [B, T], or a list of one [T_i] per sequence"
    if isinstance(value, Tensor):
        if value.dim() not in (1, 2):
            raise UsageError(f"{caller}: {name} is {describe_argument(value)}, expected {kinds}")
        return
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise UsageError(f"{caller}: {name} is {type(value).__name__}, expected {kinds}")
    if not value:
        raise UsageError(f"{caller}: {name} is an empty list; there is no slot to look at")
    for number, item in enumerate(value):
        if not isinstance(item, Tensor) or item.dim() != 1:
            raise UsageError(
                f"{caller}: item {number} of {name} is {describe_argument(item)}, expected a tensor [T_i]"
            )


def _check_shapes(caller: str, given: Mapping[str, Layout | None]) -> None:
    shapes = {name: _shape(value) for name, value in given.items() if value is not None}
    first, second, mask = list(shapes)[:REQUIRED_ARGUMENTS]
    dtypes = {m.dtype for m in _items(given[mask])}
    if shapes[first] != shapes[second] or shapes[first] != shapes[mask] or dtypes - {torch.bool}:
        kinds = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise UsageError(
            f"{caller}: {first} {shapes[first]}, {second} {shapes[second]} and {mask} {shapes[mask]} {kinds} must have "
            f"one shape, the mask bool ({mask}.bool() makes one of 0 and 1)"
        )
    total = sum(item.numel() for item in _items(given[first]))
    for name, shape in shapes.items():
        if shape != shapes[first] and shape != [total]:
            raise UsageError(f"{caller}: {name} has shape {shape}, {first} {shapes[first]}")


def _items(value: Layout | None) -> Sequence[Tensor]:
    assert value is not None
    return [value] if isinstance(value, Tensor) else value


def _shape(value: Layout) -> list[int] | list[list[int]]:
    return list(value.shape) if isinstance(value, Tensor) else [list(item.shape) for item in value]


def flatten_layout(values: Layout) -> Tensor:
    """Any layout -> [T]."""
    return values.reshape(-1) if isinstance(values, Tensor) else torch.cat(list(values))


def sequence_ids(values: Layout) -> Tensor | None:
    """The sequence of each flat slot, where the layout itself says so: rows of [B, T], items of a list."""
    if not isinstance(values, Tensor):
        lengths = torch.tensor([len(v) for v in values])
        return torch.arange(len(values)).repeat_interleave(lengths).to(values[0].device)
    if values.dim() == 2:
        return torch.arange(len(values), device=values.device).repeat_interleave(values.shape[1])
    return None


def restore_layout(flat: Tensor, like: Layout) -> Layout:
    """[T] -> the layout it came from."""
    if isinstance(like, Tensor):
        return flat.reshape(like.shape)
    return list(flat.split([len(v) for v in like]))


def slot_index(slot: int, like: Layout) -> tuple[int, ...]:
    """Where a flat slot stands in a layout: (t,), (row, t) or (item, t)."""
    if isinstance(like, Tensor):
        return (slot,) if like.dim() == 1 else (slot // like.shape[1], slot % like.shape[1])
    for number, item in enumerate(like):
        if slot < len(item):
            return number, slot
        slot -= len(item)
    raise AssertionError(slot)
