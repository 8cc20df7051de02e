"""Shapes of a run folder's JSON files, and the function that reads and checks them.

Later code may trust a file that was read here. Keys that are not named here are kept.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError

from onepolicy.bounded import refuse_holes
from onepolicy.errors import UsageError, printable

JsonObject = dict[str, Any]

LARGEST_COUNT = 10**15
"""Largest step, count or turn number. Above it floats are no longer exact integers."""
LARGEST_NUMBER = 1e100
"""Largest metric. Products and sums over steps stay finite."""
SHOWN = 60  # characters of a wrong value, in messages


Count = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Number = Annotated[float, Field(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)]
Text = InstanceOf[str]
"""A decoded response may hold half a surrogate pair, which pydantic's own `str` refuses."""
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Numbers = dict[str, Number | None]


class Shape(BaseModel):
    """A JSON object with some checked keys."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class Row(Shape):
    """A line of a step."""

    step: Count


class Point(Shape):
    """A metric at a step."""

    step: Count
    value: Number


class Parent(Shape):
    """The checkpoint that a fork started from."""

    run: Text
    step: Count


class NothingLearnt(Shape):
    """A run whose rewards taught nothing or little, as its summary tells it."""

    learnt: Text
    verdict: Text
    why: list[Text]
    silent: Count
    steps: Count


class Summary(Shape):
    """summary.json. report/run_summary.py explains the keys."""

    steps: Count
    run: Text | None = None
    report: Text | None = None
    parent: Parent | None = None
    replay: Text | None = None
    correction: Text | None = None
    pressure: Text | None = None
    objective: Text | None = None
    score: Text | None = None
    reward_first: Number | None = None
    reward_last: Number | None = None
    reward_window: Count | None = None
    reward_error: Number | None = None
    eval_first: Point | None = None
    eval_last: Point | None = None
    eval_best: Point | None = None
    eval_answers: Count | None = None
    sampled_first: Point | None = None
    sampled_answers: Count | None = None
    sampled_last: Point | None = None
    crash_step: Count | None = None
    crash_rule: Text | None = None
    tokens_per_second: Number | None = None
    updates_skipped: Number | None = None
    time: Numbers | None = None
    asynchronous: Numbers | None = None
    mismatch: Numbers | None = None
    mismatch_at_probes: Numbers | None = None
    mismatch_without_replay: Numbers | None = None
    probe_steps: list[Count] | None = None
    k3_cuts: list[Number] | None = None
    groups_without_signal: Number | None = None
    nothing_learnt: NothingLearnt | None = None


class FileDigest(Shape):
    """Length and checksum of a file as a run started, or as a checkpoint was saved."""

    bytes: Count
    sha256: Sha256


class RunInfo(Shape):
    """run.json."""

    parent: Parent | None
    id: Text = ""
    started: Text = ""
    kl_reference: Text | None = None
    versions: dict[str, Any] = {}
    fingerprint: dict[str, Any] | None = None
    quant: dict[str, Any] | None = None
    pressure: Text | None = None
    problems: dict[str, FileDigest] = {}


class CheckpointState(Shape):
    """state.json of a checkpoint."""

    step: Count
    updates: Count
    skipped: Count = 0
    files: dict[str, Count]
    sha256: dict[str, Sha256] = {}
    log: dict[str, FileDigest] = {}
    parent: Parent | None = None


class Engine(Shape):
    """rollout.engine of config.json."""

    dtype: Text | None = None


class Rollout(Shape):
    """rollout of config.json."""

    engine: Engine = Engine()


class Settings(Shape):
    """The part of config.json that reports and audits trust. stored_config.py reads all."""

    model: dict[str, Any] = {}
    task: dict[str, Any] = {}
    replay: dict[str, Any] = {}
    rollout: Rollout = Rollout()
    correction: dict[str, Any] = {}
    optim: dict[str, Any] = {}


class Sample(Row):
    """A line of samples.jsonl."""

    problem: int | Text | None = None
    prompt: Text | None = None
    response: Text | None = None
    reward: Number | None = None
    finish: Text | None = None
    mean_logp_rollout: Number | None = None
    mean_logp_trainer: Number | None = None
    fingerprint: Text | None = None


def read_json_object(path: Path, kind: type[Shape], hint: str) -> JsonObject:
    """Return the object of a JSON file.

    hint: ends every message. Raises UsageError with file, place and value if the file is damaged.
    """
    try:
        if not path.is_file():
            problem = "missing"
            if path.exists():
                problem = "not a file"
            raise UsageError(f"{path}: {problem}; {hint}")
        refuse_holes(path, hint)
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; {hint}") from None
    return check_shape(parse_json(data, str(path), hint), kind, str(path), hint)


def parse_json(data: bytes, where: str, hint: str) -> Any:
    """Return the value of a JSON text. Raises UsageError if it is none."""
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse)
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is 0x{data[error.start]:02x}"
        raise UsageError(f"{where}: not UTF-8 ({byte}), so it is damaged; {hint}") from None
    except (ValueError, RecursionError) as error:  # thousands of digits or brackets too
        raise UsageError(f"{where}: not valid JSON: {error}; {hint}") from None


def check_shape(value: Any, kind: type[Shape], where: str, hint: str) -> JsonObject:
    """Return the same value. Raises UsageError if it is not of this shape."""
    if not isinstance(value, dict):
        raise UsageError(f"{where}: {_shown(value)} is no JSON object; {hint}")
    try:
        kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = _one_line(".".join(map(str, first["loc"])))
        if first["type"] == "missing":
            raise UsageError(f"{where}: lacks {place}; {hint}") from None
        rule = first["msg"].removeprefix("Input ")
        raise UsageError(
            f"{where}: {place} is {_shown(first['input'])}, but {rule}; {hint}"
        ) from None
    return value


def check_metrics(row: JsonObject, where: str, hint: str) -> None:
    """Raise UsageError unless a row of metrics.jsonl has numbers or null under names of metrics."""
    for name, value in row.items():
        if name == "step" or value is None:
            pass
        elif type(value) not in (int, float) or not abs(value) <= LARGEST_NUMBER:  # NaN neither
            raise UsageError(
                f"{where}: {_one_line(name)} is {_shown(value)}, which no metric is; {hint}"
            )
        unnumbered = "@" in name and not name.startswith("tools/")
        unnumbered = unnumbered and not re.search("@[0-9]{1,15}$", name)
        if unnumbered or "<" in name:  # plotly makes links of <a> in a legend
            raise UsageError(f"{where}: {_shown(name)} is no name of a metric; {hint}")


def _shown(value: Any) -> str:
    """Return at most about SHOWN characters that show the value."""
    if isinstance(value, int) and abs(value) >= LARGEST_COUNT**2:
        return "a huge integer"
    text = repr(value)
    if len(text) > SHOWN:
        return f"{text[:SHOWN]}..."
    return text


def _one_line(name: str) -> str:
    """Return a stranger's key on one line. Errors keep line breaks, which would forge lines."""
    return printable(name[: 4 * SHOWN])


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON number")
