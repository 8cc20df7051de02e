"""Reader of SGLang 0.5.23's routes: base64 of int32 ids without a header, over all decoder layers.

The shape is known from the model's config, because N tokens have N - 1 rows. A row of -1 was not
captured.
"""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.errors import short_repr

ID_BYTES = 4  # of an expert's id


def route_ids(payload: Any, *, rows: int, depth: int, top_k: int) -> Tensor:
    """Return the ids [rows, depth, top_k] int32 of a reply's `routed_experts`.

    Args:
        payload: base64 text.
        rows: tokens fed, from `routed_experts_start_len` on.
        depth: decoder layers.
        top_k: experts per token.

    Raises:
        UsageError: the payload is not base64 of so many ids, an id is negative but not -1, or no
            row was captured.
    """
    if type(payload) is not str:
        raise UsageError(f"routed_experts is {short_repr(payload)}, expected base64")
    try:
        data = base64.b64decode(payload, validate=True)
    except ValueError as error:  # also characters that are not ASCII
        raise UsageError(f"routed_experts is not base64 ({error})") from error
    size = rows * depth * top_k * ID_BYTES
    if len(data) != size:
        raise UsageError(
            f"routed_experts has {len(data)} bytes; {rows} rows x {depth} decoder layers x {top_k} "
            f"experts in int32 have {size}"
        )
    ids = torch.frombuffer(bytearray(data), dtype=torch.int32).view(rows, depth, top_k)
    if (ids < -1).any() or not (ids >= 0).flatten(1).all(1).any():
        raise UsageError("routed_experts: no row was captured, or a negative id other than -1")
    return ids
