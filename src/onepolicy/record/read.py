"""A dump as a stream of checked blocks. A child parses its files (bounded.py)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onepolicy import bounded
from onepolicy.bounded import GIB, Limits, Message
from onepolicy.config import UsageError
from onepolicy.files import leads_into
from onepolicy.record.formats import READERS
from onepolicy.record.probes import is_run_folder, read_run
from onepolicy.record.schema import ROUTES, SUPPORTS, RawBlock, Scored
from onepolicy.record.trainers import VERL_EXPORT
from onepolicy.record.validate import checked_block

MEMORY, MEMORY_PER_BYTE = GIB, 16
"""Bytes of memory for reading a dump, and more for each byte of its largest file."""
SECONDS, CPU_SECONDS, BYTES_PER_SECOND = 60.0, 4.0, 2**18
"""Seconds for reading a dump, of them on a CPU, and the speed at which more bytes add to both.

A disk or a busy machine may take long; parsing a small file does not.
"""
FIX = "; if you trust it, raise --memory-limit or --time-limit"
MEMORY_PER_TOKEN, MEMORY_PER_ROUTE = 256, 24
"""Bytes that checks and statistics take for each token, and each expert or support id, of a block.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class ReadLimits:
    """Limits of reading a dump as the user gave them; None: by the sizes of its files."""

    memory_gib: float | None = None
    seconds: float | None = None

    def of(self, files: list[Path]) -> Limits:
        sizes = [bounded.size_of_data(file) for file in files]
        memory = MEMORY + MEMORY_PER_BYTE * max(sizes, default=0)
        if self.memory_gib is not None:
            memory = int(self.memory_gib * GIB)
        if self.seconds is not None:
            return Limits(memory, self.seconds, FIX, self.seconds)
        more = sum(sizes) / BYTES_PER_SECOND
        return Limits(memory, SECONDS + more, FIX, CPU_SECONDS + more)


BY_SIZE = ReadLimits()


def read_dump(
    path: Path, mapping: Mapping[str, str], limits: ReadLimits = BY_SIZE
) -> Iterator[Scored]:
    """Yield the blocks of a file, of all dump files of a folder, or of a run folder of ours.

    The format follows from the suffix. A block counts its rows over the whole dump. Several files
    without a column step have the steps in their names, if each name has one. Raises UsageError for
    every fault of the content, with file, row (counted within the file) and column.
    """
    if is_run_folder(path):
        yield from read_run(path, mapping)
        return
    files = _dump_files(path)
    steps = _steps_of_names(files)
    rows, number, columns = 0, 0, set[str]()
    for number, block in _blocks(files, mapping, limits):
        file = files[number]
        columns = columns or set(block.columns)
        differing = sorted(columns ^ block.columns.keys())
        if differing:
            raise UsageError(
                f"{file}: column {differing[0]}: in some files of the dump only; all need the same"
            )
        done = (number + block.done) / len(files)
        block = dataclasses.replace(block, first_row=rows, done=done)
        if steps and "step" not in columns:
            of_rows = {"step": np.full(len(block.lengths), steps[number])}
            block = dataclasses.replace(block, columns=block.columns | of_rows, named=True)
        yield block
        rows += len(block.lengths)
    if rows == 0:
        raise UsageError(f"{path}: empty; a dump has at least one row")


def _steps_of_names(files: list[Path]) -> list[int]:
    """Return the step in each file's name; none if a name has none, or of a single file."""
    found = [re.search("step_?([0-9]{1,9})", file.name) for file in files]
    steps = [int(match[1]) for match in found if match]
    if len(steps) < max(2, len(files)):
        return []
    return steps


def _blocks(
    files: list[Path], mapping: Mapping[str, str], limits: ReadLimits
) -> Iterator[tuple[int, Scored]]:
    """Yield the checked blocks of files, each with the number of its file."""
    task, most = "onepolicy.record.formats:read_files", limits.of(files).memory
    for number, message in read_bounded(task, files, limits, mapping=dict(mapping)):
        try:
            raw = RawBlock.from_message(message)
            tokens = len(raw.columns["tokens"].values)
        except (AssertionError, AttributeError, LookupError, TypeError, ValueError):
            raise UsageError(f"{files[number]}: {bounded.NONSENSE}") from None
        lists = (*ROUTES, *SUPPORTS)
        ids = sum(len(raw.columns[name].values) for name in lists if name in raw.columns)
        if tokens * MEMORY_PER_TOKEN + ids * MEMORY_PER_ROUTE > most:
            which, lengths = f"row {raw.first_row}: has", raw.columns["tokens"].lengths
            if lengths is not None and lengths.size > 1:
                which = f"rows {raw.first_row} to {raw.first_row + lengths.size - 1}: have"
            raise UsageError(
                f"{files[number]}: {which} {tokens:,} tokens and {ids:,} ids of experts and "
                "supports, more than any sample of so small a file; if you trust it, raise "
                "--memory-limit"
            )
        block = checked_block(str(files[number]), raw.first_row, raw.columns, raw.done)
        yield number, dataclasses.replace(block, framework=raw.framework, replayed=raw.replayed)


def read_bounded(
    task: str, files: list[Path], limits: ReadLimits = BY_SIZE, **arguments: Any
) -> Iterator[tuple[int, Message]]:
    """Yield the messages of a task that reads files (bounded.py), each with its file's number.

    The task takes the files by their names, and sends a message {"file": number} before it opens
    one. Raises UsageError with the file that passed a limit or ended the child.
    """
    number = 0
    arguments["files"] = [str(file) for file in files]
    try:
        for message in bounded.stream(task, arguments, limits.of(files)):
            if message.arrays:
                yield number, message
            else:
                told = message.info.get("file")
                if not isinstance(told, int) or told not in range(len(files)):
                    raise bounded.StoppedError(bounded.NONSENSE)
                number = told
    except bounded.StoppedError as error:
        raise UsageError(f"{files[number]}: {error}") from None


def _dump_files(path: Path) -> list[Path]:
    suffixes = ", ".join(READERS)
    if path.is_dir():
        files = sorted(
            file for file in path.rglob("*") if file.suffix in READERS and file.is_file()
        )
        if not files:
            raise UsageError(f"{path}: no dump in this folder; a file of one ends in {suffixes}")
        for file in files:
            if not leads_into(path, file):
                raise UsageError(
                    f"{file}: a link out of the dump's folder; name the folder it leads to instead"
                )
        return files
    if path.suffix not in READERS:
        fault = f"unknown kind of dump; the suffix must be one of {suffixes}"
        if path.suffix in (".pkl", ".pickle"):
            fault = (
                "a pickle, which could run any code, is not read; for a batch of verl "
                f"{VERL_EXPORT}"
            )
        raise UsageError(f"{path}: {fault}")
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: is a device or a pipe; copy its content into a file")
    try:
        path.open("rb").close()
    except OSError as error:
        raise UsageError(f"{path}: cannot be opened ({error.strerror})") from None
    return [path]
