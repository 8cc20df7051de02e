"""Route payloads as traces, in every form in which an engine or a trainer carries them.

| form | payload | rows without a route |
|---|---|---|
| vllm | array [rows, layers, K], or base64 of an .npy file | all zeros (vLLM up to 0.30) |
| vllm-0.31 | the same | none |
| sglang | base64 of int32 without a header | -1 |
| verl | tensor [rows, layers, K] int16 | all zeros |
| prime-rl | an object with `data` (bytes), `shape` and `dtype` | all zeros |
| miles | array or lists [rows, layers, K] | -1 |
| slime, skyrl | array or lists [rows, layers, K] | rows after the last token that was fed |

Every form ends in `Routers.trace_from`, so both layer axes are accepted (one column per decoder
layer, or per MoE layer). A missing row becomes invalid, never expert 0. slime and SkyRL fill rows
with the experts 0, 1, .. K-1, which are legal routes, so only the number of tokens tells them
apart. With K = 1 an all-zero row is a legal route too, and the same holds.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.errors import short_repr
from onepolicy.integrations.core.layout import fit
from onepolicy.npy import InvalidNpyError, parse_npy
from onepolicy.replay.bound import BoundRouters
from onepolicy.replay.misalignment import why_surplus
from onepolicy.types import RoutingTrace, id_dtype

PLAIN_DTYPES = ("uint8", "int8", "uint16", "int16", "int32", "int64")


@dataclass(frozen=True, slots=True)
class PayloadForm:
    """The reader of one form, and its mark for a row without a route."""

    read: Callable[[Any, BoundRouters], Tensor]
    """Return [rows, layers, K] integers of a payload."""
    missing: Literal["zeros", "negative", "length"]


def to_trace(
    routers: BoundRouters,
    payload: Any,
    *,
    tokens: int,
    form: str,
    surplus: Literal["error", "cut"] = "error",
) -> RoutingTrace:
    """Return a payload of one sample as a trace of its `tokens - 1` slots.

    A row of the last token is not read: an engine never feeds that token, and some trainers fill
    it in. Slots after the last row, such as those of a tool's reply at the end, are invalid: the
    trainer routes them itself. A payload of None gives no valid row.

    Args:
        routers: the trainer's routers.
        payload: in the given form, or None for a sample without routes.
        tokens: tokens of the sample, prompt included.
        form: a name of `FORMS`.
        surplus: what to do with more captured rows than tokens. "error": nobody knows which of
            them are the sample's. "cut": the first ones are, because you truncated the response.

    Raises:
        UsageError: the form is not known, or the payload does not have it; it has surplus rows; or
            as of `replay.axes.trace_from`.
    """
    if surplus not in ("error", "cut"):
        raise UsageError(f'to_trace: surplus is {surplus!r}, expected "error" or "cut"')
    if form not in FORMS:
        raise UsageError(
            f"to_trace: no payload has the form {form!r}; there are {', '.join(FORMS)}"
        )
    if tokens < 1:
        raise UsageError(f"to_trace: tokens is {tokens}; a sample has at least one token")
    if payload is None:
        return missing_routes(routers, tokens - 1)
    ids = FORMS[form].read(payload, routers)
    if ids.dim() != 3 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise UsageError(
            f"to_trace: the {form} payload has shape {list(ids.shape)} and dtype {ids.dtype}, "
            "expected integers [rows, layers, K]"
        )
    if surplus == "error":
        _check_surplus(ids, tokens, form)
    ids = ids[: tokens - 1]
    if not len(ids):
        return missing_routes(routers, tokens - 1)
    captured = None
    if FORMS[form].missing == "zeros" and routers.top_k > 1:
        captured = (ids != 0).flatten(1).any(1)
    return fit(routers.trace_from(ids, valid=captured), tokens - 1)


def _check_surplus(ids: Tensor, tokens: int, form: str) -> None:
    """Raise UsageError if ids [rows, layers, K] have more rows than tokens, not counting filler."""
    beyond = ids[tokens:].to(torch.int64)
    filler = torch.arange(ids.shape[2])
    if FORMS[form].missing == "zeros":
        filler = torch.zeros_like(filler)
    if ((beyond == filler) | (beyond < 0)).all():
        return
    raise UsageError(
        f"to_trace: the {form} payload has {len(ids)} rows, but {tokens} tokens have {tokens - 1}"
        f"{why_surplus(ids, tokens - 1)}. If the response was truncated, so that the first rows "
        'are the right ones, cut the routes with it, or give to_trace surplus="cut"'
    )


def missing_routes(routers: BoundRouters, rows: int) -> RoutingTrace:
    """Return a trace of `rows` invalid rows, which the model routes itself."""
    shape = rows, len(routers.layers), routers.top_k
    ids = torch.zeros(shape, dtype=id_dtype(routers.num_experts))
    valid = torch.zeros(rows, dtype=torch.bool)
    return RoutingTrace(ids, valid, routers.layers, routers.num_experts)


def _read_array(payload: Any, routers: BoundRouters) -> Tensor:
    if isinstance(payload, Tensor):
        return payload.cpu()
    try:
        array = np.asarray(payload)
    except ValueError as error:  # lists of different lengths
        raise UsageError(f"to_trace: the routes are no array [rows, layers, K] ({error})") from None
    if array.dtype.name not in PLAIN_DTYPES:
        raise UsageError(
            f"to_trace: the routes are {array.dtype} {list(array.shape)}, expected integers "
            "[rows, layers, K]"
        )
    return torch.from_numpy(np.array(array))  # torch needs writable memory


def _read_vllm(payload: Any, routers: BoundRouters) -> Tensor:
    if not isinstance(payload, str):
        return _read_array(payload, routers)
    try:
        return _read_array(parse_npy(_decoded(payload)), routers)
    except InvalidNpyError as error:
        raise UsageError(f"to_trace: routed_experts: {error}") from None


def _read_sglang(payload: Any, routers: BoundRouters) -> Tensor:
    if not isinstance(payload, str):
        return _read_array(payload, routers)
    data = _decoded(payload)
    row = routers.depth * routers.top_k
    if len(data) % (4 * row):
        raise UsageError(
            f"to_trace: routed_experts has {len(data)} bytes, which are no whole rows of "
            f"{routers.depth} decoder layers x {routers.top_k} experts in int32"
        )
    ids = torch.frombuffer(bytearray(data), dtype=torch.int32)
    return ids.view(-1, routers.depth, routers.top_k)


def _read_bytes(payload: Any, routers: BoundRouters) -> Tensor:
    fields = payload
    if not isinstance(payload, Mapping):
        fields = {name: getattr(payload, name, None) for name in ("data", "shape", "dtype")}
    data, shape, dtype = (fields.get(name) for name in ("data", "shape", "dtype"))
    if not isinstance(data, bytes) or str(dtype) not in PLAIN_DTYPES or not _is_shape(shape):
        raise UsageError(
            f"to_trace: routed_experts is {short_repr(payload)}, expected data (bytes), shape "
            f"[rows, layers, K] and dtype (one of {', '.join(PLAIN_DTYPES)})"
        )
    array = np.frombuffer(data, str(dtype))
    if array.size != np.prod(shape):
        raise UsageError(
            f"to_trace: routed_experts has {array.size} ids of {dtype}, but its shape is "
            f"{list(shape)}"
        )
    return _read_array(array.reshape(shape), routers)


def _is_shape(shape: Any) -> bool:
    if not isinstance(shape, list | tuple) or len(shape) != 3:
        return False
    return all(isinstance(size, int) and size >= 0 for size in shape)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:  # also characters that are not ASCII
        raise UsageError(f"to_trace: routed_experts is not base64 ({error})") from None


FORMS = {
    "vllm": PayloadForm(_read_vllm, "zeros"),
    "vllm-0.31": PayloadForm(_read_vllm, "length"),
    "sglang": PayloadForm(_read_sglang, "negative"),
    "verl": PayloadForm(_read_array, "zeros"),
    "prime-rl": PayloadForm(_read_bytes, "zeros"),
    "miles": PayloadForm(_read_array, "negative"),
    "slime": PayloadForm(_read_array, "length"),
    "skyrl": PayloadForm(_read_array, "length"),
}
