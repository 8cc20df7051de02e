"""The log of a run: metrics.jsonl, samples.jsonl, and trackers beside them."""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from onepolicy.config import UsageError
from onepolicy.files import replace_atomically
from onepolicy.report.jsonl import METRICS as METRICS_FILE
from onepolicy.report.jsonl import SAMPLES, read_metrics, read_samples

if TYPE_CHECKING:
    from onepolicy.run.trackers import OpenWriter, Writer

Row = dict[str, Any]
SCORED_TWICE = ("mismatch", "routing", "repeat")
"""Areas that a batch scored without replay has too."""


def _read_metrics_toml() -> dict[str, str]:
    areas = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8"))
    found = {f"{area}/{name}": text for area in areas for name, text in areas[area].items()}
    return found | {
        f"counterfactual/{name}": f"{text}; same batch scored without replay"
        for name, text in found.items()
        if name.split("/")[0] in SCORED_TWICE and "staleness" not in name
    }


METRICS = _read_metrics_toml()
"""Name of every column of metrics.jsonl -> its meaning and [unit]."""


def is_known(name: str) -> bool:
    """Return whether METRICS has this name.

    METRICS lists `eval/avg@4` as `eval/avg@k` (layers and turns alike), a gate as GATE, and a tool
    as TOOL.
    """
    name = re.sub(r"^correction/rejected/.+", "correction/rejected/GATE", name)
    name = re.sub(r"^tools/(?!(malformed|unknown)$).+", "tools/TOOL", name)
    return re.sub(r"@\d+$", "@k", name) in METRICS


class RunLog:
    """The open log of a run: `with RunLog(folder) as log: log.write(...)`.

    A line reaches its file in one write call, so a killed process leaves at most one half-written
    last line. To continue after a checkpoint, call `truncate_after` first. `trackers` get the same
    rows (run/trackers.py).
    """

    def __init__(self, folder: Path, trackers: Sequence[OpenWriter] = ()) -> None:
        self._folder, self._trackers = folder, trackers
        self._last_step = _last_step(folder)
        self._open_files = ExitStack()
        self._metrics: FileIO | None = None
        self._samples: FileIO | None = None
        self._writers: list[Writer] = []

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:  # closes the files if a later one cannot be opened
            self._metrics = opened.enter_context(_open_lines(self._folder / METRICS_FILE))
            self._samples = opened.enter_context(_open_lines(self._folder / SAMPLES))
            for open_writer in self._trackers:
                writer = open_writer(self._folder, self._last_step)
                opened.push(partial(_close, writer))
                self._writers.append(writer)
            self._open_files = opened.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open_files.__exit__(kind, error, trace)  # trackers mark a run that failed
        self._metrics = self._samples = None
        self._writers = []

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the row of one step. Steps must increase.

        NaN and infinity become null, because JSON has neither.
        """
        assert self._metrics is not None, "RunLog is used outside its with block"
        assert step > self._last_step, f"step {step} after step {self._last_step}: one row per step"
        unknown = [name for name in metrics if not is_known(name)]
        if unknown:
            raise ValueError(
                f"{', '.join(unknown)}: not in run/metrics.toml; add the name with its meaning "
                "and unit"
            )
        values = {name: float(value) for name, value in metrics.items()}
        _append(self._metrics, {"step": step} | values)
        self._last_step = step
        for writer in self._writers:
            writer.write(step, values)

    def sync_to_disk(self) -> None:
        """Make sure that everything written survives a loss of power."""
        assert self._metrics is not None, "RunLog is used outside its with block"
        assert self._samples is not None
        for file in (self._metrics, self._samples):
            os.fsync(file.fileno())

    def write_sample(self, sample: Mapping[str, Any]) -> None:
        """Write one readable rollout. `truncate_after` needs its `step`."""
        assert self._samples is not None, "RunLog is used outside its with block"
        assert "step" in sample, "a sample names its step"
        _append(self._samples, dict(sample))


def _close(
    writer: Writer,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """Close a tracker at the end of an ExitStack."""
    writer.close(failed=error is not None)


def truncate_after(folder: Path, step: int) -> None:
    """Remove rows and samples of later steps, which a resumed run writes again.

    A half-written last line is removed too. Each file is replaced at once.
    """
    for name, read in ((METRICS_FILE, read_metrics), (SAMPLES, read_samples)):
        path = folder / name
        if not path.exists():
            continue
        kept = [row for row in read(folder) if row["step"] <= step]
        with replace_atomically(path, durable=True) as temporary:
            temporary.write_bytes(b"".join(_line(row) for row in kept))


def _last_step(folder: Path) -> int:
    """Return the step of the last row, or -1."""
    if not (folder / METRICS_FILE).exists():
        return -1
    rows = read_metrics(folder)
    if not rows:
        return -1
    return int(rows[-1]["step"])


def _line(row: Mapping[str, Any]) -> bytes:
    finite = {key: _finite_or_none(value) for key, value in row.items()}
    text = json.dumps(finite, ensure_ascii=False, allow_nan=False)
    # a lone surrogate in a decoded response becomes its own JSON escape
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _finite_or_none(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _append(file: FileIO, row: Mapping[str, Any]) -> None:
    line = _line(row)
    written = file.write(line)
    if written != len(line):
        raise OSError(f"{file.name!r}: wrote {written} of {len(line)} bytes; is the disk full?")


def _open_lines(path: Path) -> FileIO:
    """Open a file of lines to append to. Raises UsageError if its last line is half-written."""
    file = FileIO(path, "ab+")
    if file.tell():
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.close()
            raise UsageError(
                f"{path}: the last line is half-written; resume the run, which cuts it off"
            )
    return file
