"""Dumps that are framed right and shaped oddly: names that are there twice, odd names of columns
and files, kinds of numbers and shapes that no column has."""

from __future__ import annotations

import io
import json
import struct
import warnings
import zipfile
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from onepolicy.record.schema import COLUMNS
from support.fuzz import JUNK, Damage

MARKUP = "</script><x1>"
"""Text that must not be in a page as it stands."""
TERMINAL = "\x1b[2J\x1b]0;owned\x07"
ODD_NAMES = (
    *("", " ", "mask ", "Mask", "mask.lengths", "tokens.lengths", "length", "__metadata__"),
    *(TERMINAL, "[bold]x[/]", "[/b]", MARKUP, "a\nb", "\u202e", "é", "\ud800", "\0", "x" * 300),
    *("x" * 70_000, "../mask", "/etc/passwd", "mask.npy", "{0}", "%s", "None", "logp_rollout"),
    *COLUMNS,
)
BYTES = "zzbyteszz"
"""A name in whose place junk of the same length is written: no library writes such a name."""
FILE_NAMES = (
    *("dump", "-x", "%s", " ", "..x", "{0}", "[bold]x", "<x1>", "a\nb", TERMINAL, "\udcff\udc80"),
    *("x" * 240, "é" * 100, "\u202e", "~", "a'b\"c", "*", "con:", "s3:__x"),
)
Columns = list[tuple[str, Any]]
"""Names, which may be there twice, and arrays, which are flat. The last is `length`."""
LENGTHS = (3, 2)


def good_columns() -> Columns:
    tokens = np.array([5, 6, 7, 5, 9])
    mask = np.array([False, True, True, True, True])
    rollout = np.array([0.0, -1.0, -2.0, -0.25, -1.0], np.float32)
    trainer = np.array([0.0, -1.5, -2.0, -0.5, -1.0], np.float32)
    named = {"tokens": tokens, "mask": mask, "logp_rollout": rollout, "logp_trainer": trainer}
    return [*named.items(), ("length", np.array(LENGTHS))]


def odd_columns(damage: Damage) -> Columns:
    """Return the columns with one to three of them doubled, added, renamed or shaped otherwise."""
    pick, columns = damage.random, good_columns()
    for _ in range(pick.randint(1, 3)):
        place = pick.randrange(len(columns))
        name, values = columns[place]
        match pick.randrange(5):
            case 0:
                columns.insert(pick.randrange(len(columns) + 1), (name, pick.choice(columns)[1]))
            case 1:
                columns.insert(pick.randrange(len(columns) + 1), (_odd_name(damage), values))
            case 2:
                columns[place] = (_odd_name(damage), values)
            case 3:
                with np.errstate(over="ignore"):
                    columns[place] = (name, _reshaped(damage, values))
            case _:
                pick.shuffle(columns)
    return columns


def _odd_name(damage: Damage) -> str:
    if damage.random.random() < 0.1:
        return BYTES
    return damage.random.choice(ODD_NAMES)


def _reshaped(damage: Damage, values: np.ndarray) -> np.ndarray:
    values = values.ravel()
    forms = (
        *(values[:0], values[:1], values[:-1], values[:0].reshape(0, 3), values.reshape(1, -1)),
        *(values.reshape(-1, 1), np.repeat(values, 2), np.array(values.ravel()[:1].sum())),
        *(values[::-1], np.stack([values, values]), values.reshape(1, 1, -1)),
        *(-values.astype(np.float64), values * 1e30, np.full(values.shape, np.nan)),
    )
    return damage.random.choice(forms)


def _with_junk_names(damage: Damage, data: bytes) -> bytes:
    name = BYTES.encode()
    junk = damage.random.choice((b"\xff\xfe\x00\x1b[2J\x80", b"\xed\xa0\x80zzz\x00\x00\x00"))
    return data.replace(name, junk)


# --- a writer for each format --------------------------------------------------------------------


def jsonl(damage: Damage) -> bytes:
    """Return lines that are joined by hand, because a dict has no key twice."""
    pick, columns = damage.random, odd_columns(damage)
    lines = []
    for row in range(len(LENGTHS)):
        texts = []
        for name, values in columns:
            if name == "length":
                continue
            value: Any = _rows(values)[row]
            if pick.random() < 0.05:
                value = pick.choice((*JUNK, {"a": 1, "b": {"a": [2]}}))
            texts.append(f"{json.dumps(name)}: {_json(value)}")
        if pick.random() < 0.1:
            pick.shuffle(texts)
        if pick.random() < 0.1:  # a key twice, in this row alone
            texts.insert(pick.randrange(len(texts)), pick.choice(texts))
        lines.append("{" + ", ".join(texts) + "}")
    return _with_junk_names(damage, "\n".join(lines).encode(errors="surrogatepass"))


def _json(value: Any) -> str:
    try:
        return json.dumps(value)
    except (ValueError, TypeError):
        return "null"


def _rows(values: np.ndarray) -> list[Any]:
    """Return a value for each row: its part of a flat column, however long that is."""
    if values.ndim == 0:
        return [values.tolist()] * len(LENGTHS)
    return [part.tolist() for part in np.array_split(values, LENGTHS[:1])]


def parquet(damage: Damage) -> bytes:
    """Return a table whose columns may have one name, and a type that no column has."""
    pick = damage.random
    arrays, names = [], []
    for name, values in odd_columns(damage):
        rows = _rows(values)
        array = pa.array(rows)
        if pick.random() < 0.15:
            array = _of_type(array, pick.choice(ARROW_TYPES), len(rows))
        arrays.append(array)
        names.append(name.encode(errors="replace").decode())
    options = pick.choice(
        ({}, {"compression": "zstd"}, {"store_schema": False}, {"version": "1.0"})
    )
    table = pa.Table.from_arrays(arrays, names=names)
    if pick.random() < 0.1:
        table = table.replace_schema_metadata({pick.choice(ODD_NAMES[:12]): TERMINAL})
    buffer = io.BytesIO()
    try:
        pq.write_table(table, buffer, row_group_size=pick.choice((1, 2)), **options)
    except (pa.ArrowException, ValueError):  # of a type that Parquet lacks
        pq.write_table(table.select([]), buffer)
    return _with_junk_names(damage, buffer.getvalue())


def _of_type(array: pa.Array, kind: pa.DataType, rows: int) -> pa.Array:
    try:
        return array.cast(kind)
    except (pa.ArrowException, ValueError):
        return pa.nulls(rows, kind)


NUMBER = pa.float64()
ARROW_TYPES = (
    *(pa.list_(pa.float16()), pa.large_list(NUMBER), pa.list_(NUMBER, 2), pa.list_(pa.int8())),
    *(pa.list_(pa.uint64()), pa.list_(pa.bool_()), pa.list_(pa.string()), pa.list_(pa.null())),
    *(pa.list_(pa.list_(NUMBER)), pa.struct([("a", NUMBER)]), pa.map_(pa.string(), NUMBER)),
    *(pa.list_(pa.dictionary(pa.int8(), pa.string())), pa.binary(), pa.string(), pa.null()),
    *(pa.list_(pa.decimal128(9, 3)), pa.list_(pa.timestamp("ns")), pa.list_(pa.duration("s"))),
    *(pa.list_(pa.date32()), pa.list_view(NUMBER), pa.run_end_encoded(pa.int32(), NUMBER)),
    *(pa.binary(4), pa.list_(pa.struct([("logp", NUMBER)])), NUMBER, pa.int64(), pa.bool_()),
)


def npz(damage: Damage) -> bytes:
    """Return members with names and kinds that numpy itself does not write."""
    pick, buffer = damage.random, io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w") as archive:
        warnings.simplefilter("ignore")  # of a name that is there twice
        for name, values in odd_columns(damage):
            for bad in "\ud800\0":  # which zipfile does not write
                name = name.replace(bad, "?")
            member = pick.choice((*[""] * 27, "./", "/", "a/")) + name[:60_000] + ".npy"
            data = io.BytesIO()
            if pick.random() < 0.1:
                values = _in_dtype(values, pick.choice(DTYPES))
            np.save(data, np.asfortranarray(values) if pick.random() < 0.1 else values)
            compression = pick.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
            archive.writestr(member, data.getvalue(), compression)
    return _with_junk_names(damage, buffer.getvalue())


def _in_dtype(values: np.ndarray, kind: str) -> np.ndarray:
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return values.astype(np.dtype(kind))
        except (TypeError, ValueError):
            return np.zeros(values.shape, np.dtype(kind))


DTYPES = (
    *("<f2", ">f4", ">i8", "<f8", "<f16", "<c8", "<c16", "<U3", "S4", "V4", "<M8[s]", "<m8[D]"),
    *("?", "i1", "u1", "u8", "i4,f4", "O"),
)


def safetensors(damage: Damage) -> bytes:
    """Return a header that is written by hand: kinds without numpy's name, odd places, a key
    twice."""
    pick, entries, data = damage.random, [], b""
    for name, values in odd_columns(damage):
        kind = STORED.get(values.dtype.str, "F64")
        raw = values.astype(np.float64).tobytes() if kind == "F64" else values.tobytes()
        shape = list(values.shape)
        if pick.random() < 0.08:
            kind = pick.choice(KINDS)
            raw = raw[: max(0, len(raw) * BITS.get(kind, 8) // (8 * max(1, values.itemsize)))]
        if pick.random() < 0.04:
            shape = pick.choice(([], [0], [5, 1], [1, 5], [2**40, 0], [2**62, 4], [-1]))
        start = len(data) + pick.choice((*[0] * 40, 1, -1))
        about = {"dtype": kind, "shape": shape, "data_offsets": [start, start + len(raw)]}
        if pick.random() < 0.03:
            about[pick.choice(ODD_NAMES[:20])] = pick.choice(JUNK[:20])
        entries.append(f"{json.dumps(name)}: {_json(about)}")
        data += raw
    if pick.random() < 0.2:
        entries.append(f'"__metadata__": {_json(pick.choice(METADATA))}')
    text = "{" + ", ".join(entries) + "}" + " " * pick.randrange(9)
    header = _with_junk_names(damage, text.encode(errors="surrogatepass"))
    return struct.pack("<Q", len(header)) + header + data


STORED = {"<i8": "I64", "<f4": "F32", "|b1": "BOOL"}
BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
KINDS = (
    *("F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "F8_E4M3", "F8_E5M2", "F8_E5M2FNUZ", "BF16", "F16"),
    *("F32", "F64", "I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64", "BOOL", "C64", "x", ""),
)
METADATA = ({}, {"a": "b"}, {"a": 1}, {"\x1b[2J": "x"}, [], None, {"fingerprint": "{"}, "x")


def pt(damage: Damage) -> bytes:
    """Return a dict of tensors of kinds and views that a dump has not, of other keys and values."""
    pick = damage.random
    named: dict[Any, Any] = {}
    for name, values in odd_columns(damage):
        key: Any = name
        if key in named:  # as long as the first, whose name it gets below
            key = key[:-1] + "~"
        elif pick.random() < 0.05:
            key = pick.choice((b"mask", 3, None, ("mask",), 1.5, True))
        value: Any = torch.from_numpy(np.ascontiguousarray(values).copy().reshape(values.shape))
        if pick.random() < 0.2:
            with suppress(RuntimeError, IndexError, TypeError):  # no such view of these numbers
                value = pick.choice(VIEWS)(value)
        named[key] = value
    whole = pick.choice((named, named, named, named, list(named), [named], {"samples": [named]}))
    buffer = io.BytesIO()
    torch.save(whole, buffer, _use_new_zipfile_serialization=pick.random() < 0.7)
    data = buffer.getvalue()
    for name in COLUMNS:
        data = data.replace(name[:-1].encode() + b"~", name.encode())
    return _with_junk_names(damage, data)


def _quantised(value: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(value.float().nan_to_num(), 0.1, 0, torch.qint8)


VIEWS = (
    *(torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.to_sparse, torch.nn.Buffer),
    *(lambda value: value.to(torch.float8_e4m3fn), lambda value: value.to(torch.complex64)),
    *(lambda value: value.to(torch.uint16), lambda value: value.to("meta"), torch.Tensor.tolist),
    *(lambda value: value.expand(3, *value.shape), lambda value: value.reshape(-1)[::2]),
    *(lambda value: value.float().requires_grad_(), lambda value: {"a": value}, _quantised),
    *(lambda value: torch.nn.Parameter(value.float()), lambda value: value.view(torch.uint8)),
    *(lambda value: torch.nested.nested_tensor([value.float(), value.float()]), str),
    *(lambda value: value.to(torch.complex64).conj(), lambda value: value.cfloat().conj().imag),
)
MAKERS = {
    ".jsonl": jsonl,
    ".parquet": parquet,
    ".npz": npz,
    ".safetensors": safetensors,
    ".pt": pt,
}
