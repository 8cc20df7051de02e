"""Shared by the registered studies: the lines that count, the line of a run, and its process."""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from json_lines import Line, locked, read_lines
from safetensors import SafetensorError

from onepolicy.config import TrainingError, UsageError
from onepolicy.report.jsonl import METRICS, read_metrics

ROOT = Path(__file__).resolve().parents[2]
CODE = ("src", "benchmarks/*.py", "benchmarks/*.toml")
AGAIN = "play registered seeds into other --results, to reproduce them"
PR_SET_PDEATHSIG = 1  # of prctl
Job = TypeVar("Job")


def finished(path: Path, names: Sequence[str]) -> list[Line]:
    """Return the lines of a file. Raises UsageError if a run is there twice.

    names: the fields that name a run.
    """
    lines = read_lines(path)
    counts = Counter(name_of(line, names) for line in lines)
    for name, count in counts.items():
        if count > 1:
            raise UsageError(f"{path}: the run {name} is there {count} times; keep one line of it")
    return lines


def name_of(line: Line, names: Sequence[str]) -> str:
    return " ".join(str(line[name]) for name in names)


def refuse_other(path: Path, line: Line, digest: str, names: Sequence[str]) -> None:
    """Raise UsageError if a line was made by another plan, recipe or policy than that of now."""
    found = line.get("digest", "none")
    if found != digest:
        raise UsageError(
            f"{path}: the run {name_of(line, names)} was made by another plan, recipe or policy "
            f"(digest {found}, now {digest}); take its line out, or give --results another file"
        )


def refuse_pilots(
    parser: argparse.ArgumentParser,
    study: str,
    seeds: Sequence[int] | None,
    planned: Sequence[int],
    *,
    registered: bool,
) -> None:
    """End with an error if the study would get a pilot's seed, or a pilot one of the study's.

    planned: the study's first and last seed. registered: the results are the study's own.
    """
    own = range(planned[0], planned[1] + 1)
    if registered:
        for seed in seeds or ():
            if seed not in own:
                parser.error(f"{study} has no seed {seed}; give a pilot --results FILE of its own")
    elif not seeds or any(seed in own for seed in seeds):
        parser.error(
            f"{study}: seeds {own[0]} to {own[-1]} are registered; give a pilot --seeds of its "
            "own, or --again to play the registered ones again"
        )


@functools.cache
def commit() -> str:
    """Return the commit of the code that runs, with a mark if its files are changed.

    A process asks once, as it begins, because the tree may move on below a study.
    """
    head = _git("rev-parse", "--short", "HEAD")
    if _git("status", "--porcelain", "--untracked-files=no", "--", *CODE):
        return f"{head}-dirty"
    return head


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def digest_of(plan: Any, recipe: Path, policy: Path) -> str:
    """Return a digest of a run's plan, its recipe, and its policy's weights."""
    found = blake2b(json.dumps(plan, sort_keys=True).encode(), digest_size=8)
    found.update(recipe.read_bytes())
    found.update(_weights(policy))
    return found.hexdigest()


@functools.cache
def _weights(policy: Path) -> bytes:
    found = blake2b(digest_size=8)
    for path in sorted(policy.glob("*.safetensors")):
        found.update(path.read_bytes())
    return found.digest()


def trained(line: Line, folder: Path, train: Callable[[], object]) -> list[Line]:
    """Train one run into its folder, anew. Write into its line how it ended, return its metrics.

    A run that fails has an `error`. Errors that say nothing about it are raised, so that it gets no
    line: faults of the machine, and before the first step all but a TrainingError.
    """
    with locked(folder.with_name(f"{folder.name}.lock"), "wait for it, or give another --out"):
        shutil.rmtree(folder, ignore_errors=True)  # a run that was stopped
        begun = time.monotonic()
        line["error"] = None
        try:
            train()
        except Exception as error:
            says_something = isinstance(error, TrainingError) or steps_of(metrics_of(folder))
            if is_fault(error) or not says_something:
                raise
            line["error"] = f"{type(error).__name__}: {error}"
        line["seconds"] = round(time.monotonic() - begun)
        return metrics_of(folder)


def is_fault(error: Exception) -> bool:
    """Return whether the machine ended a run: no room on the disk, no memory, no sandbox."""
    causes = (error, error.__cause__)
    broken = any(isinstance(each, OSError | MemoryError | SafetensorError) for each in causes)
    return broken or "no group has" in str(error)  # no episode could be played (rollout/collect.py)


def metrics_of(folder: Path) -> list[Line]:
    """Return the metrics of a run, none if it has not begun."""
    if not (folder / METRICS).exists():
        return []
    return read_metrics(folder)


def steps_of(rows: Sequence[Line]) -> list[Line]:
    return [row for row in rows if "train/reward" in row]


def blocks_of(steps: Sequence[Line], count: int) -> list[Sequence[Line]]:
    """Return equal blocks of a run's steps, all of them; of fewer steps than blocks one each."""
    total = max(len(steps), count)
    cuts = [total * at // count for at in range(count + 1)]
    return [steps[begin:end] for begin, end in pairwise(cuts)]


def played(play: Callable[[Job], Line], jobs: Sequence[Job], workers: int) -> Iterator[Line]:
    """Yield the lines of all jobs as they end. Raises the first error of a run without a line.

    Then no other run begins, and those that have begun give theirs first. Each run has a process of
    its own, which ends with this one: after several runs in one, Python's executor may wait for
    ever (cpython issue 115634).
    """
    waiting, running, fault = list(jobs), set[Future[Line]](), None
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        workers, context, initializer=_begin, initargs=(os.getpid(),), max_tasks_per_child=1
    ) as pool:
        while waiting or running:
            while waiting and len(running) < workers:
                running.add(pool.submit(play, waiting.pop(0)))
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                error = future.exception()
                if error is None:
                    yield future.result()
                else:
                    fault = fault or error
                    waiting.clear()
    if fault is not None:
        raise fault


def _begin(parent: int) -> None:
    """Let this worker end with the script, however that is ended, and note the code's commit."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)
    commit()
