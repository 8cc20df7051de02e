"""Reader of .npy arrays from untrusted sources: a server's reply, a member of a dump."""

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
    """Return the array in `data`, as a read-only view of these bytes.

    The header's shape is compared with the number of bytes before any memory is allocated.

    Raises:
        InvalidNpyError: an archive, a pickle, an array of objects, or a damaged file.
    """
    header = _HEADER.match(data)
    if header is None:
        raise InvalidNpyError("not an .npy file of plain numbers")
    kind, order, sizes = (group.decode() for group in header.groups())
    try:
        dtype = np.dtype(kind)
    except TypeError:
        raise InvalidNpyError(f"an .npy of the unknown kind {kind!r}") from None
    if dtype.hasobject:
        raise InvalidNpyError(f"an .npy of {dtype}, which needs allow_pickle; nothing is unpickled")
    if dtype.kind not in "biuf" or not dtype.isnative:
        raise InvalidNpyError(f"an .npy of {dtype}, not plain numbers")
    shape = tuple(int(size) for size in sizes.split(", ") if size)
    size = math.prod(shape) * dtype.itemsize
    found = len(data) - header.end()
    if found != size:
        raise InvalidNpyError(
            f"an .npy of {found} bytes where shape {shape} of {dtype} needs {size}"
        )
    layout: Literal["F", "C"] = "C"
    if order == "True":
        layout = "F"
    return np.frombuffer(data, dtype, offset=header.end()).reshape(shape, order=layout)
