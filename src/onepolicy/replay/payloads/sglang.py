"""What SGLang 0.5.23 returns as routes: base64 of int32 ids without a header, over all decoder layers.

The shape comes from the model's config and from the law that a path of N tokens has N - 1 rows. A row of -1 was not
captured.
"""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.config.base import shown

ID_BYTES = 4  # of an expert's id


def route_ids(payload: Any, *, rows: int, depth: int, top_k: int) -> Tensor:
    """Return the ids [rows, depth, top_k] int32 of a reply's `routed_experts`.

    rows: fed tokens from `routed_experts_start_len` on; depth: decoder layers. UsageError for anything but so many
    ids, for a negative id other than -1, and if no row was captured.
    """
    if type(payload) is not str:
        raise UsageError(f"routed_experts is {shown(payload)}, expected base64")
    try:
        data = base64.b64decode(payload, validate=True)
    except ValueError as error:  # also characters that are not ASCII
        raise UsageError(f"routed_experts is not base64 ({error})") from error
    size = rows * depth * top_k * ID_BYTES
    if len(data) != size:
        raise UsageError(
            f"routed_experts has {len(data)} bytes; {rows} rows x {depth} decoder layers x {top_k} experts "
            f"in int32 have {size}"
        )
    ids = torch.frombuffer(bytearray(data), dtype=torch.int32).view(rows, depth, top_k)
    if (ids < -1).any() or not (ids >= 0).flatten(1).all(1).any():
        raise UsageError("routed_experts: no row was captured, or a negative id other than -1")
    return ids
