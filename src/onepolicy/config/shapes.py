"""The JSON files of a run folder: what each must hold, and one way to read them that names file, place, value and mend.

What has been read here may be trusted by later code. Keys that are not named here are kept as they are.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError

from onepolicy.config.base import UsageError

Row = dict[str, Any]

LARGEST = 10**15
"""Of steps, counts and turn numbers: beyond it floats are no longer exact integers."""
LARGEST_NUMBER = 1e100
"""Of any metric: products and sums over steps stay finite."""
SHOWN = 60  # characters of a wrong value, in messages


Count = Annotated[int, Field(ge=0, le=LARGEST)]
Number = Annotated[float, Field(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)]
Text = InstanceOf[
    str
]  # a decoded response may hold half a surrogate pair, which pydantic's own text may not
Numbers = dict[str, Number | None]


class Shape(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class Point(Shape):
    step: Count
    value: Number


class Parent(Shape):
    run: Text
    step: Count


class Summary(Shape):
    """summary.json (report/words.py says what the keys mean)."""

    steps: Count
    run: Text | None = None
    report: Text | None = None
    parent: Parent | None = None
    replay: Text | None = None
    correction: Text | None = None
    objective: Text | None = None
    score: Text | None = None
    reward_first: Number | None = None
    reward_last: Number | None = None
    reward_window: Count | None = None
    eval_first: Point | None = None
    eval_last: Point | None = None
    eval_best: Point | None = None
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


class About(Shape):
    """run.json."""

    parent: Parent | None
    started: Text = ""
    kl_reference: Text | None = None
    versions: dict[str, Any] = {}
    fingerprint: dict[str, Any] | None = None
    quant: dict[str, Any] | None = None


class State(Shape):
    """state.json of a checkpoint."""

    step: Count
    updates: Count
    skipped: Count = 0
    files: dict[str, Count]
    sha256: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]] = {}
    parent: Parent | None = None


class Engine(Shape):
    dtype: Text | None = None


class Rollout(Shape):
    engine: Engine = Engine()


class Settings(Shape):
    """config.json, as far as the report looks into it; a resume reads all of it (stored.py)."""

    model: dict[str, Any] = {}
    task: dict[str, Any] = {}
    replay: dict[str, Any] = {}
    rollout: Rollout = Rollout()
    correction: dict[str, Any] = {}
    optim: dict[str, Any] = {}


class Sample(Shape):
    """A line of samples.jsonl."""

    step: Count
    problem: int | Text | None = None
    prompt: Text | None = None
    response: Text | None = None
    reward: Number | None = None
    finish: Text | None = None
    mean_logp_rollout: Number | None = None
    mean_logp_trainer: Number | None = None
    fingerprint: Text | None = None


def read_object(path: Path, kind: type[Shape], mend: str) -> Row:
    """The object of a JSON file. UsageError: file, place, value, mend."""
    try:
        if not path.is_file():
            raise UsageError(f"{path}: {'not a file' if path.exists() else 'missing'}; {mend}")
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; {mend}") from None
    return checked(parsed(data, str(path), mend), kind, str(path), mend)


def parsed(data: bytes, where: str, mend: str) -> Any:
    """The value of JSON text."""
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse)
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is 0x{data[error.start]:02x}"
        raise UsageError(f"{where}: not UTF-8 ({byte}), so it is damaged; {mend}") from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # also numbers of thousands of digits, brackets as deep
        raise UsageError(f"{where}: not valid JSON: {error}; {mend}") from None


def checked(value: Any, kind: type[Shape], where: str, mend: str) -> Row:
    """The same value, which is of this shape."""
    if not isinstance(value, dict):
        raise UsageError(f"{where}: {shown(value)} is no JSON object; {mend}")
    try:
        kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise UsageError(f"{where}: lacks {place}; {mend}") from None
        what = first["msg"].removeprefix("Input ")
        raise UsageError(
            f"{where}: {place} is {shown(first['input'])}, but {what}; {mend}"
        ) from None
    return value


def check_metrics(row: Row, where: str, mend: str) -> None:
    """UsageError unless a row of metrics.jsonl has numbers or null under names that can be a metric's."""
    for name, value in row.items():
        if name == "step" or value is None:
            pass
        elif type(value) not in (int, float):
            raise UsageError(f"{where}: {name} is {shown(value)}, not a number or null; {mend}")
        elif not abs(value) <= LARGEST_NUMBER:  # NaN neither
            raise UsageError(f"{where}: {name} is {shown(value)}, which no metric is; {mend}")
        if "@" in name and not name.startswith("tools/") and not re.search("@[0-9]{1,15}$", name):
            raise UsageError(f"{where}: {shown(name)} is no name of a metric; {mend}")


def check_step(row: Row, where: str, mend: str) -> None:
    """UsageError unless the row has the number of a step."""
    if "step" not in row:
        raise UsageError(f"{where}: no integer `step`; {mend}")
    step = row["step"]
    if type(step) is not int:
        raise UsageError(f"{where}: no integer `step`, it is {shown(step)}; {mend}")
    if not 0 <= step <= LARGEST:
        raise UsageError(f"{where}: step is {shown(step)}, which no step is; {mend}")


def shown(value: Any) -> str:
    """A value in a message, cut short."""
    text = (
        repr(value) if not isinstance(value, int) or abs(value) < LARGEST**2 else "a huge integer"
    )
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON number")
