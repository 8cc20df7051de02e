"""Arrays of numbers in the .npy format, from somebody who is not trusted: a reply of a server, a member of a dump."""

from __future__ import annotations

import math
import re
from typing import Literal

import numpy as np

_HEADER = re.compile(
    rb"\x93NUMPY[\x01-\x03]\x00.{2,4}?"
    rb"\{'descr': '([<>|=]?[biufcOSUVmM]\d{0,2})', 'fortran_order': (True|False), "
    rb"'shape': \(((?:\d{1,18}, ){0,8}\d{0,18}),?\), \} {0,255}\n",
    re.DOTALL,
)
"""The beginning of an .npy file, as numpy.save writes it in every version of the format."""


class InvalidNpyError(ValueError):
    """Bytes that are no .npy file of plain numbers."""


def parse_npy(data: bytes) -> np.ndarray:
    """Return the array in `data`, which it shares. NotNpy for archives, pickles, objects and damage.

    The header's shape is compared with the number of bytes before anything is made of it.
    """
    header = _HEADER.match(data)
    if header is None:
        raise InvalidNpyError("not an .npy file of plain numbers")
    kind, order, sizes = (group.decode() for group in header.groups())
    try:
        dtype = np.dtype(kind)
    except TypeError:
        raise InvalidNpyError(f"an .npy of the unknown kind {kind!r}") from None
    if dtype.kind not in "biuf" or not dtype.isnative:
        reason = (
            "which needs allow_pickle; nothing is unpickled"
            if dtype.hasobject
            else "not plain numbers"
        )
        raise InvalidNpyError(f"an .npy of {dtype}, {reason}")
    shape = tuple(int(size) for size in sizes.split(", ") if size)
    size = math.prod(shape) * dtype.itemsize
    if len(data) - header.end() != size:
        raise InvalidNpyError(
            f"an .npy of {len(data) - header.end()} bytes where shape {shape} of {dtype} needs {size}"
        )
    layout: Literal["F", "C"] = "F" if order == "True" else "C"
    return np.frombuffer(data, dtype, offset=header.end()).reshape(shape, order=layout)
