"""Damaged inputs for readers, the same ones in every run: input i of a target follows from the two
alone."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

FAST, SLOW = 10**4, 3 * 10**4  # inputs for each target; benchmarks/fuzz.py tries others
HEAVY = 6_000  # of a target that takes 50 ms an input
DEEP = "200 lists, one in the other"
JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, -3, 7, 99, 2**31, 2**63, 2 * 10**8, 10**12, -(10**12)),
    *(10**400, -(10**400)),
    *(0.5, 1.0, -0.5, 1e-4, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
    *("", "1", "stop", "abort", "token_id:3", "token_id:" + "9" * 5000, "é", "\ud800"),
    *("x" * 300, "\x00"),
    *([], {}, [[]], [1], [[1, 2]], [[[1, 2]]], {"a": 1}, [None], DEEP),
)
NUMBERS = (
    *(b"0", b"-1", b"1e999", b"NaN", b"-Infinity", b"99999999999", b"0.5", b"9" * 5000, b"true"),
    *(b"null", b'"1"'),
)
SNIPPETS = (
    *(b"[" * 3000, b'{"a":' * 3000, b"PK\x03\x04", b"\x93NUMPY", b"\x80\x04.", b"\x00" * 64),
    *(b"\xff\xfe", b"\\ud800"),
)


class Damage:
    """Random choices, and the damage that they do to a good input."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)

    def data(self, good: bytes) -> bytes:
        """Return bytes with one to three faults."""
        damaged = bytearray(good)
        for _ in range(self.random.randint(1, 3)):
            self._once(damaged)
        return bytes(damaged)

    def _once(self, data: bytearray) -> None:
        pick = self.random
        start = pick.randrange(len(data) + 1)
        stop = min(len(data), start + pick.randint(1, 16))
        match pick.randrange(8):
            case 0 | 1 if data:
                data[pick.randrange(len(data))] ^= 1 << pick.randrange(8)
            case 2:
                del data[start:]
            case 3:
                del data[start:stop]
            case 4:
                data[start:start] = pick.choice(SNIPPETS)
            case 5:
                data[start:start] = data[start:stop] * pick.randint(1, 4)
            case 6:
                data[start:stop] = pick.randbytes(stop - start)
            case _:
                found = list(re.finditer(rb"-?\d+(?:\.\d+)?", data))
                if found:
                    number = pick.choice(found)
                    data[number.start() : number.end()] = pick.choice(NUMBERS)

    def tree(self, good: Any) -> Any:
        """Return a JSON value with one to three values replaced, left out, moved, doubled or
        spelled otherwise."""
        root = [copy.deepcopy(good)]
        for _ in range(self.random.randint(1, 3)):
            self._one_node(root)
        return root[0]

    def _one_node(self, root: list) -> None:
        places = [place for place in _places(root) if place[0] is not root or len(root) == 1]
        of, key = self.random.choice(places)
        value = of[key]
        match self.random.randrange(8):
            case 0 if of is not root:
                del of[key]
            case 1 if isinstance(of, list) and of is not root:
                of.insert(self.random.randrange(len(of) + 1), copy.deepcopy(value))
            case 2 if isinstance(value, str):
                of[key] = self.data(value.encode(errors="replace")[:400]).decode(errors="replace")
            case 3 if isinstance(value, int | float):
                others = (value + 1, -value, value * 2, str(value), bool(value), -0.25)
                of[key] = self.random.choice(others)
            case 4 if of is root:
                of[key] = None
            case 4:
                of[key] = copy.deepcopy(self.random.choice(places[:40])[0])
            case _:
                of[key] = _fresh(self.random.choice(JUNK))

    def reply(self, good: Any) -> bytes | Any:
        """Return a damaged reply as raw bytes, or as the JSON value of the bytes."""
        if self.random.random() < 0.3:
            return self.data(json.dumps(good).encode())
        return self.tree(good)


def _fresh(junk: Any) -> Any:
    """Return a copy, because the next damage may be done to it."""
    if junk is not DEEP:
        return copy.deepcopy(junk)
    deep: list = []
    for _ in range(200):  # deepcopy takes two frames for each
        deep = [deep]
    return deep


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of the first 500 values in it."""
    found: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting and len(found) < 500:
        of = waiting.pop()
        keys = list(of) if isinstance(of, dict) else range(len(of))
        for key in keys:
            found.append((of, key))
            if isinstance(of[key], dict | list):
                waiting.append(of[key])
    return found


def survives(
    target: str,
    inputs: int,
    make: Callable[[Damage], Any],
    read: Callable[[Any], Any],
    check: Callable[[Any], None],
    refused: type[Exception],
    *,
    between: tuple[float, float] = (0.0, 1.0),
) -> None:
    """Check that `read` takes every input with a result that `check` accepts, or raises `refused`,
    and that each happens.

    between: least and largest share of inputs that are taken, both excluded.
    """
    if CAMPAIGN in os.environ:
        campaign = Campaign(target, **json.loads(os.environ[CAMPAIGN]))
        campaign.run(make, read, check, refused)
        return
    accepted = 0
    for number in range(inputs):
        accepted += _is_accepted(f"{target} {number}", make, read, check, refused)
    low, high = (share * inputs for share in between)
    assert low < accepted < high, (
        f"{target}: {accepted} of {inputs} inputs were accepted; the damage is no test"
    )


def _is_accepted(
    seed: str,
    make: Callable[[Damage], Any],
    read: Callable[[Any], Any],
    check: Callable[[Any], None],
    refused: type[Exception],
) -> bool:
    given = make(Damage(seed))
    try:
        check(read(given))
    except refused:
        return False
    except Exception as error:
        error.add_note(f"input {seed}: {given!r:.2000}")
        raise
    return True


CAMPAIGN = "ONEPOLICY_FUZZ"
"""The environment variable with which benchmarks/fuzz.py asks every target for other inputs."""
KEPT = 20  # failures of a target
SLOW_S = 5.0  # CPU seconds of an input that count as a failure


class Campaign:
    """Inputs of one seed, which go on where an earlier process stopped, and after failures.

    `out` has a JSON file for each target: the counts, the slowest input, the first failures.
    """

    def __init__(self, target: str, out: str, seed: int, inputs: int) -> None:
        self.target, self.seed, self.inputs = target, seed, inputs
        self.path = Path(out) / (re.sub(r"\W+", "-", target) + ".json")
        self.found: dict[str, Any] = {
            **{"target": target, "seed": seed, "inputs": 0, "accepted": 0, "failed": 0},
            **{"slowest_s": 0.0, "slowest": "", "failures": []},
        }
        if self.path.exists():
            self.found = json.loads(self.path.read_text())
            assert self.found["seed"] == seed, f"{self.path} has another seed"

    def run(self, make: Any, read: Any, check: Any, refused: type[Exception]) -> None:
        """Try so many further inputs."""
        found, saved = self.found, time.monotonic()
        for number in range(found["inputs"], found["inputs"] + self.inputs):
            name = f"{self.seed} {self.target} {number}"
            start = time.process_time()
            try:
                found["accepted"] += _is_accepted(name, make, read, check, refused)
            except Exception as error:
                self._keep(name, error)
            taken = time.process_time() - start
            found["inputs"] += 1
            if taken > found["slowest_s"]:
                found |= {"slowest_s": round(taken, 3), "slowest": name}
            if taken > SLOW_S:
                self._keep(name, TimeoutError(f"{taken:.1f} s"))
            if time.monotonic() - saved > 20:
                self._save()
                saved = time.monotonic()
        self._save()

    def _keep(self, name: str, error: Exception) -> None:
        self.found["failed"] += 1
        if len(self.found["failures"]) < KEPT:
            text = "".join(traceback.format_exception(error)[-4:])
            self.found["failures"].append({"input": name, "error": text[-3000:]})

    def _save(self) -> None:
        written = self.path.with_suffix(".writing")
        written.write_text(json.dumps(self.found, indent=1))
        written.replace(self.path)
