"""Damaged dumps, task files and turns: each gives a declared error, or a consistent result."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save

from onepolicy.bounded import Limits, StoppedError
from onepolicy.config import UsageError
from onepolicy.config.problems import read_rows
from onepolicy.config.task import CalculatorTool
from onepolicy.envs.multiturn.dialogue import ParsedTurn
from onepolicy.envs.multiturn.tool_formats import tool_format
from onepolicy.envs.tools import build_tools
from onepolicy.interfaces import Problem
from onepolicy.record.read import read_dump
from onepolicy.record.schema import Scored
from onepolicy.report.jsonl import read_jsonl
from support.audit_dumps import check_blocks, rewrite
from support.fuzz import FAST, SLOW, Damage, survives
from support.processes import ends_in_fork, run_task
from support.scripted_engine import HERMES, tokenizer_of

FEW = 100
INPUTS = [pytest.param(FAST // 2, id="fast"), pytest.param(SLOW, id="slow", marks=pytest.mark.slow)]
DUMPS = [pytest.param(FAST // 2, id="fast", marks=pytest.mark.full), INPUTS[1]]
ROUTED = {"route_layers": 1, "route_top_k": 2}
ROWS: list[dict[str, Any]] = [
    {
        "tokens": [5, 6, 7],
        "mask": [False, True, True],
        "logp_rollout": [0.0, -1.0, -2.0],
        "logp_trainer": [0.0, -1.5, -2.0],
        "version": 3,
        "routes_rollout": [0, 1, 1, 2, 2, 3],
        "routes_trainer": [0, 1, 1, 2, 3, 2],
        **ROUTED,
    },
    {
        "tokens": [5, 9],
        "mask": [True, True],
        "logp_rollout": [-0.25, -1.0],
        "logp_trainer": [-0.5, -1.0],
        "version": 4,
        "routes_rollout": [0, 1, -1, -1],
        "routes_trainer": [0, 1, 1, 2],
        **ROUTED,
    },
]
PLAIN = ("tokens", "mask", "logp_rollout", "logp_trainer")


def arrays() -> dict[str, np.ndarray]:
    """Return flat arrays, with `length`."""
    kinds = dict(zip(PLAIN, (np.int64, np.bool_, np.float32, np.float32), strict=True))
    flat = {
        name: np.concatenate([np.array(row[name]) for row in ROWS]).astype(kind)
        for name, kind in kinds.items()
    }
    return flat | {"length": np.array([3, 2])}


def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays().items()}


def foreign_rows() -> list[list[dict[str, Any]]]:
    """Return rows in the layouts of NeMo-RL (lists of one sample) and of SGLang (triples)."""
    plain = [{name: row[name] for name in PLAIN} for row in ROWS]
    wrapped = [{name: [value] for name, value in row.items()} | {"reward": [1.0]} for row in plain]
    triples = [
        row | {"logp_rollout": [[logp, 7, None] for logp in row["logp_rollout"]]} for row in plain
    ]
    return [ROWS, wrapped, triples]


FOREIGN_ROWS = foreign_rows()


def as_jsonl(damage: Damage) -> bytes:
    good = damage.random.choice(FOREIGN_ROWS)
    rows = good
    if damage.random.random() < 0.5:
        rows = damage.tree(good)
    lines = [json.dumps(row).encode() for row in (rows if isinstance(rows, list) else [rows])]
    data = b"\n".join(lines)
    return damage.data(data) if rows is good else data


def as_parquet(*more: str, kind: pa.DataType | None = None) -> bytes:
    """Return the plain columns, and one of each further name. kind: of the log-probabilities."""
    buffer = io.BytesIO()
    values = [pa.array([row[name] for row in ROWS]) for name in PLAIN]
    if kind is not None:
        values[2] = values[2].cast(kind)
    values += [values[1]] * len(more)
    table = pa.table(values, names=[*PLAIN, *more])
    pq.write_table(table, buffer, compression="none", write_statistics=False)
    return buffer.getvalue()


def in_type(kind: pa.DataType, *, name: str = "logp_rollout", **options: Any) -> bytes:
    """Return the plain columns, one of another type, in row groups of one row.

    options: of the writer.
    """
    rows = [row[name] for row in ROWS]
    columns = {name: pa.array([row[name] for row in ROWS]) for name in PLAIN}
    try:
        columns[name] = columns[name].cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        columns[name] = pa.array(_as(kind, rows), kind)
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, row_group_size=1, **options)
    return buffer.getvalue()


def _as(kind: pa.DataType, rows: list[list[Any]]) -> list[Any]:
    """Return the rows as values of the type, null where it has none for numbers."""
    if pa.types.is_struct(kind):
        return [{"a": row} for row in rows]
    if pa.types.is_map(kind):
        return [[(str(place), value) for place, value in enumerate(row)] for row in rows]
    if pa.types.is_fixed_size_list(kind):
        return [row[:2] for row in rows]
    if not pa.types.is_list(kind):
        return [None] * len(rows)
    if pa.types.is_list(kind.value_type):
        return [[row] for row in rows]
    if pa.types.is_struct(kind.value_type):
        return [[{"logp": value} for value in row] for row in rows]
    return [[None] * len(row) for row in rows]


def as_npz() -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays())
    return buffer.getvalue()


def npz(damage: Damage) -> bytes:
    """Return .npz bytes. Half of them have damage inside a member, behind zip's checksums."""
    if damage.random.random() < 0.5:
        return damage.data(NPZ)
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(NPZ)) as good, zipfile.ZipFile(buffer, "w") as bad:
        spoiled = damage.random.choice(good.namelist())
        for name in good.namelist():
            data = good.read(name)
            bad.writestr(name, damage.data(data) if name == spoiled else data)
    return buffer.getvalue()


def as_pt(*, legacy: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensors(), buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


NPZ, SAFETENSORS = as_npz(), save(tensors())
PARQUETS = (
    *(as_parquet(), as_parquet("mask"), as_parquet("x", "x"), as_parquet("", "mask.lengths")),
    *(as_parquet("length", "\x1b[2J"), as_parquet(kind=pa.list_(pa.float16()))),
    as_parquet(kind=pa.large_list(pa.float64())),
)
NUMBER = pa.float64()
PARQUETS += tuple(
    in_type(kind)
    for kind in (
        *(pa.list_(pa.decimal128(9, 3)), pa.list_(pa.list_(NUMBER)), pa.list_(pa.null())),
        *(pa.struct([("a", pa.list_(NUMBER))]), pa.map_(pa.string(), NUMBER), pa.binary()),
        *(pa.list_(pa.struct([("logp", NUMBER)])), pa.list_(NUMBER, 2), pa.null()),
        *(pa.list_(pa.timestamp("ns")), pa.list_(pa.dictionary(pa.int8(), pa.string()))),
        *(pa.list_(pa.duration("s")), pa.list_(pa.date32()), pa.large_list(pa.float32())),
    )
)
PARQUETS += tuple(
    in_type(pa.list_(pa.int64()), name="tokens", **options)
    for options in (
        *({"compression": "zstd"}, {"compression": "gzip"}, {"compression": "lz4"}),
        *({"use_dictionary": False}, {"data_page_version": "2.0"}, {"write_page_index": True}),
        *({"store_schema": False}, {"use_byte_stream_split": False, "version": "1.0"}),
    )
)
"""Types that no column has, row groups of one row, and other ways to write them."""
PT = (as_pt(legacy=False), as_pt(legacy=True))


def in_fork_first(task: str, arguments: dict[str, Any], limits: Limits) -> Iterator[Any]:
    """Stand in for `bounded.stream`: in a fork with its limit of CPU time, then here if that is
    whole, or broke otherwise than it may."""
    assert limits.cpu_seconds is not None
    status = ends_in_fork(task, arguments, limits.cpu_seconds)
    if status not in (0, 1):
        raise StoppedError(f"ended with {status}")
    return run_task(task, arguments, limits)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("inputs", [pytest.param(FEW, id="few"), *DUMPS])
@pytest.mark.parametrize(
    "suffix",
    [
        *(".jsonl", ".parquet", ".npz", ".safetensors"),
        pytest.param(".pt", marks=[pytest.mark.process, pytest.mark.full]),
    ],
)
def test_dumps(tmp_path: Path, suffix: str, inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if suffix == ".pt":  # torch searches the text of its error
        monkeypatch.setattr("onepolicy.bounded.stream", in_fork_first)
    make = {
        ".jsonl": as_jsonl,
        ".parquet": lambda damage: damage.data(damage.random.choice(PARQUETS)),
        ".npz": npz,
        ".safetensors": lambda damage: damage.data(SAFETENSORS),
        ".pt": lambda damage: damage.data(damage.random.choice(PT)),
    }[suffix]
    path = tmp_path / f"dump [b]\x1b\udc80{suffix}"

    def read(data: bytes) -> list[Scored]:
        rewrite(path, data)
        return list(read_dump(path, {}))

    survives(f"dump {suffix}", inputs, make, read, check_blocks, UsageError)


@pytest.mark.full
@pytest.mark.parametrize("inputs", INPUTS)
def test_task_lines(tmp_path: Path, inputs: int) -> None:
    good = (
        b'{"prompt": "1+1", "answer": "2"}\n'
        b'{"prompt": "\xc3\xa9", "answer": "\\u00e9", "more": [1]}\n'
    )
    path = tmp_path / "task.jsonl"

    def read(data: bytes) -> list[Problem]:
        rewrite(path, data)
        return read_rows(str(path), "task.path")

    def whole(problems: list[Problem]) -> None:
        assert problems
        for problem in problems:
            assert problem.prompt.strip()
            assert problem.answer.strip()
            (problem.prompt + problem.answer).encode()

    survives("task lines", inputs, lambda damage: damage.data(good), read, whole, UsageError)


@pytest.mark.full
@pytest.mark.parametrize("inputs", INPUTS)
def test_lines_of_a_run(tmp_path: Path, inputs: int) -> None:
    good = b'{"step": 1, "train/reward": 0.5}\n{"step": 2, "train/reward": 1e-3}\n'
    path = tmp_path / "metrics.jsonl"

    def read(data: bytes) -> list[dict[str, Any]]:
        rewrite(path, data)
        return read_jsonl(path)

    def whole(rows: list[dict[str, Any]]) -> None:
        assert all(type(row["step"]) is int for row in rows)

    survives("lines of a run", inputs, lambda damage: damage.data(good), read, whole, UsageError)


class Malformed(Exception):
    """A turn that the parser takes for neither a call nor an answer."""


TURNS = {
    "plain": "I multiply.\nAction: calculator[2 * (3 + 4)]\n",
    "template": "<think>a</think><tool_call>\n"
    '{"name": "calculator", "arguments": {"expression": "2*7"}}</tool_call>',
}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("form", TURNS)
def test_turns(form: str, inputs: int) -> None:
    tools = build_tools([CalculatorTool()])
    if form == "plain":
        turns = tool_format(tokenizer_of(None), tools, "")
    else:
        turns = tool_format(tokenizer_of(HERMES), tools, "")

    def read(data: bytes) -> ParsedTurn:
        turn = turns.parse_turn(data.decode(errors="replace"))
        if turn.malformed:
            assert turn == ParsedTurn(malformed=turn.malformed)
            raise Malformed
        return turn

    def whole(turn: ParsedTurn) -> None:
        assert bool(turn.calls) != (turn.answer is not None)
        for call in turn.calls:
            (call.tool + call.text).encode()

    good = TURNS[form].encode()
    survives(f"turns {form}", inputs, lambda damage: damage.data(good), read, whole, Malformed)
