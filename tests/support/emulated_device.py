"""A device for tests on a machine without a GPU. Import it first, in a process of its own.

Its tensors keep their values in host memory, say that they are on `emulated:0`, and are refused
where a GPU's would be: beside tensors of the CPU. Every operator whose result the host must wait
for is counted with the line of onepolicy that asked for it. Kernels, their dtypes and their speed
are the CPU's.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("emulated")
# torch.utils.checkpoint asks every device for it, with autocast off too
torch.emulated.get_amp_supported_dtype = lambda: [torch.bfloat16]  # type: ignore[attr-defined]
DEVICE = torch.device("emulated:0")
HOST = torch.device("cpu")
MAY_TAKE_BOTH = {"copy_", "_to_copy", "_copy_from", "index", "index_put", "index_put_"}
"""Operators that take tensors of two devices, as CUDA's do: copies, and indices on the host."""
SIZE_DEPENDS_ON_VALUES = {
    *("_local_scalar_dense", "_unique2", "bincount", "equal", "is_nonzero", "masked_select"),
    *("nonzero", "repeat_interleave", "unique_consecutive", "unique_dim"),
}
"""Operators that a GPU answers only after the host has waited for it."""
PACKAGE = "onepolicy/"


class OtherDeviceError(RuntimeError):
    """An operator was given tensors of this device and of the CPU."""


class HostReads:
    """Counts of the waits of the host, by (operator, file:line of onepolicy)."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def add(self, operator: str) -> None:
        self.counts[operator, calling_line()] += 1

    def pop_all(self) -> dict[str, int]:
        """Return the counts since the last call, by `file:line operator`."""
        found = {f"{line} {operator}": n for (operator, line), n in self.counts.items()}
        self.counts.clear()
        return found


READS = HostReads()


def calling_line() -> str:
    """Return the innermost line of onepolicy's source on the stack."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        _, found, inside = frame.f_code.co_filename.rpartition(f"/src/{PACKAGE}")
        if found:
            return f"{inside}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


class EmulatedTensor(Tensor):
    """A tensor on DEVICE. `host` has its values."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> EmulatedTensor:
        layout = {"strides": host.stride(), "storage_offset": host.storage_offset()}
        made: EmulatedTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, host.size(), **layout, dtype=host.dtype, device=DEVICE
        )
        made.host = host
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"EmulatedTensor({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = operator._schema.name.removeprefix("aten::")
        kwargs = dict(kwargs or {})
        given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        _refuse_host_tensors(name, given)
        to_host = False
        if kwargs.get("device") is not None:
            to_host = torch.device(kwargs["device"]).type == "cpu"
            kwargs["device"] = HOST
        if to_host or name in SIZE_DEPENDS_ON_VALUES or _has_bool_index(name, args):
            READS.add(name)
        if name == "_copy_from":
            _values(args[1]).copy_(_values(args[0]))
            return args[1]
        result = _compute(operator, name, tree_map(_values, args), tree_map(_values, kwargs))
        if to_host:
            return result
        return _on_device(result, given)

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: EmulatedTensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.host = value.host

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def tolist(self) -> Any:
        READS.add("tolist")
        return self.host.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a tensor of this device has no numpy array; call cpu() first")


def _values(each: Any) -> Any:
    if isinstance(each, EmulatedTensor):
        return each.host
    return each


def _refuse_host_tensors(name: str, given: list[Tensor]) -> None:
    """Raise OtherDeviceError for a tensor of the CPU, unless it has no dimensions."""
    if name in MAY_TAKE_BOTH:
        return
    for tensor in given:
        if not isinstance(tensor, EmulatedTensor) and tensor.dim() and tensor.device == HOST:
            raise OtherDeviceError(
                f"{name} was given a tensor {list(tensor.shape)} of the CPU at {calling_line()}"
            )


def _has_bool_index(name: str, args: Any) -> bool:
    if name != "index":
        return False
    return any(
        isinstance(index, EmulatedTensor) and index.dtype in (torch.bool, torch.uint8)
        for index in args[1]
    )


def _compute(operator: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Call the CPU's kernel. Its histc takes no integers, where CUDA's takes them."""
    if name == "histc" and not args[0].is_floating_point():
        return operator(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
    return operator(*args, **kwargs)


def _on_device(result: Any, given: list[Tensor]) -> Any:
    """Return the result's tensors on DEVICE. A tensor changed in place stays the same object."""
    known = {id(each.host): each for each in given if isinstance(each, EmulatedTensor)}

    def wrap(each: Any) -> Any:
        if not isinstance(each, Tensor) or isinstance(each, EmulatedTensor):
            return each
        found = known.get(id(each))
        if found is None:
            found = EmulatedTensor(each)
        return found

    return tree_map(wrap, result)


def move_model(model: nn.Module) -> nn.Module:
    """Move parameters and buffers to DEVICE. Tied ones stay tied."""
    moved: dict[int, Any] = {}
    for owner in model.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                new = moved.get(id(parameter))
                if new is None:
                    new = nn.Parameter(EmulatedTensor(parameter.detach().clone()))
                moved[id(parameter)] = owner._parameters[name] = new
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = EmulatedTensor(buffer.clone())
    return model


def _empty(size: Any, **settings: Any) -> EmulatedTensor:
    return EmulatedTensor(torch.empty([int(n) for n in size], dtype=settings.get("dtype")))


def _empty_strided(size: Any, stride: Any, **settings: Any) -> EmulatedTensor:
    shape, strides = [int(n) for n in size], [int(n) for n in stride]
    return EmulatedTensor(torch.empty_strided(shape, strides, dtype=settings.get("dtype")))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _values(target).copy_(_values(source))
    return target


def _arange(*bounds: Any, **settings: Any) -> EmulatedTensor:
    """torch's own makes an empty tensor and resizes it, which a wrapper's size does not follow."""
    return EmulatedTensor(torch.arange(*bounds, dtype=settings.get("dtype")))


_KERNELS = torch.library.Library("aten", "IMPL")
for name in ("arange", "arange.start", "arange.start_step"):
    _KERNELS.impl(name, _arange, "PrivateUse1")
_KERNELS.impl("empty.memory_format", _empty, "PrivateUse1")
_KERNELS.impl("empty_strided", _empty_strided, "PrivateUse1")
_KERNELS.impl("_copy_from", _copy_from, "PrivateUse1")


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute scaled_dot_product_attention, which has no kernel for this device, by products."""
    assert not dropout_p
    groups = query.shape[1] // key.shape[1]
    if enable_gqa and groups > 1:
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    scores = query @ key.mT * (scale or query.shape[-1] ** -0.5)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        attn_mask = seen.tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1) @ value


def without_inference_mode(mode: bool = True) -> Any:
    """Return a context in place of torch.inference_mode, which forbids tensors like these."""
    if mode:
        return torch.no_grad()
    return contextlib.nullcontext()


torch.inference_mode = without_inference_mode  # type: ignore[assignment,misc]
torch.nn.functional.scaled_dot_product_attention = attention  # type: ignore[assignment]
