#!/usr/bin/env python3
"""Run the phases of phases.toml. Needs Python's standard library alone.

python tests/phases.py check             lint, types, unit tests: under a minute
python tests/phases.py test              what a newcomer and CI run: every property once
python tests/phases.py all [NAME ...]    everything, or these phases; goes on where it ended
python tests/phases.py old               name the phases that were last green too long ago

A phase of `all` that ends well on a commit without changes writes itself into green.toml.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:
    found = sys.version.split()[0]
    sys.exit(f"Python 3.11+ needed, this is {found}; name one: make PYTHON=python3.11 ...")

ROOT = Path(__file__).resolve().parents[1]
PHASES: dict[str, dict[str, Any]] = tomllib.loads(
    (ROOT / "tests" / "phases.toml").read_text(encoding="utf-8")
)
GREEN = ROOT / "tests" / "green.toml"
LOGS = ROOT / "runs" / "phases"
MOST_COMMITS = 200
"""A phase that was last green longer ago is named by `make check`."""
CORES = min(os.cpu_count() or 1, 8)
OTHERS = (
    *("gpu", "vllm", "sglang", "ray", "trl", "verl", "megatron"),
    *("gateway", "envs", "oracle", "release"),
)
PLAIN = " and ".join(f"not {marker}" for marker in OTHERS)
SETTINGS = {"OMP_NUM_THREADS": "1", "PYTHONPATH": "src", "PYTHONDONTWRITEBYTECODE": ""}
"""Of the environment; what is empty is taken out. Without bytecode, as images have it, every
process compiles our sources anew and every worker rewrites the tests' asserts."""
RERUN = "--reruns 1 -rR"
"""For tests that start processes alone: one more try, printed and counted."""


def command_of(phase: dict[str, Any], target: str) -> str:
    """Return the shell command that a phase is for this target."""
    line = phase["run"] if target == "all" else phase.get("gate", phase["run"])
    for name, value in {"workers": str(CORES), "plain": PLAIN, "rerun": RERUN}.items():
        line = line.replace(f"{{{name}}}", value)
    return line


class Phase:
    """One phase as it runs, in a process group of its own. What it prints is in `log`."""

    def __init__(self, name: str, target: str):
        self.name, self.target, self.row = name, target, PHASES[name]
        self.seconds, self.status = 0.0, -1
        self.log = LOGS / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Run it to its end, or until `end`."""
        environment = os.environ | SETTINGS
        environment |= self.row.get("env", {})
        self.log.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                command_of(self.row, self.target),
                shell=True,
                cwd=ROOT,
                env={name: value for name, value in environment.items() if value},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self.status = self.process.wait()
        self.seconds = time.monotonic() - began

    def end(self) -> None:
        """End it and everything that it started."""
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def summary(self) -> str:
        """Return one line: its name, seconds, and what it counted."""
        lines = [line for line in self.text().splitlines() if line.strip()]
        last = lines[-1].strip("= ") if lines else ""
        return f"  {self.name:<10} {self.seconds:5.0f} s  {last}"


def make(*targets: str) -> None:
    """Let make bring what phases need; end where that fails."""
    if subprocess.run(["make", "-s", "-j2", *targets], cwd=ROOT).returncode:
        sys.exit(f"phases: make {' '.join(targets)} failed")


def needs(names: list[str]) -> list[str]:
    """Return the venvs of these phases, the one that the others borrow from first."""
    more = sorted({need for name in names for need in PHASES[name].get("needs", ())})
    return [".venv/.dev", *more]


def side_by_side(target: str) -> int:
    """Run the phases of a target in its two lanes. Print each one's result as it ends, and the
    whole output of one that fails. Return the exit status."""
    names = [name for name, row in PHASES.items() if target in row]
    phases = {
        lane: [Phase(n, target) for n in names if PHASES[n][target] == lane] for lane in (1, 2)
    }
    began, printing = time.monotonic(), threading.Lock()

    stopped = threading.Event()

    def run(lane: list[Phase]) -> None:
        for phase in lane:
            if stopped.is_set():
                return
            phase.run()
            with printing:
                print(phase.text() if phase.status else phase.summary(), flush=True)

    threads = [threading.Thread(target=run, args=[lane], daemon=True) for lane in phases.values()]
    everything = [phase for lane in phases.values() for phase in lane]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        stopped.set()
        for phase in everything:
            phase.end()
    failed = [phase.name for phase in everything if phase.status]
    print(f"{target}: {time.monotonic() - began:.0f} s", end=", ")
    print(f"FAILED: {', '.join(failed)}" if failed else f"{len(everything)} phases, all green")
    return int(bool(failed))


# --- seconds of the set-up ------------------------------------------------------------------------


def set_up(target: str) -> None:
    """Make the venvs of a target's phases. Print the seconds of downloads and of installing."""
    began, started = time.monotonic(), datetime.datetime.now()
    if target == "test":
        make("system")
    system = time.monotonic() - began
    venvs = needs([name for name, row in PHASES.items() if target in row])
    make(venvs[0])
    if venvs[1:]:
        make(*venvs[1:])
    spans = [span for log in ROOT.glob(".venv*/pip.log") for span in pip_spans(log.read_text())]
    spans = [span for span in spans if span[0] >= started]
    downloads = covered([(begin, ready) for begin, ready, _ in spans])
    print(
        f"set-up: {time.monotonic() - began:.0f} s, of which system programs {system:.0f} s, "
        f"downloads {downloads:.0f} s, the rest is installing",
        flush=True,
    )


TIME = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d),\d+ (.*)$", re.MULTILINE)


def pip_spans(log: str) -> Iterator[tuple[datetime.datetime, datetime.datetime, datetime.datetime]]:
    """Yield (begin, everything downloaded, end) of each call of pip in its log."""
    begin = ready = last = None
    for stamp, text in TIME.findall(log):
        now = datetime.datetime.fromisoformat(stamp)
        if begin is None:
            begin = now
        if text.startswith("Installing collected packages"):
            ready = now
        if text.startswith("Remote version of pip") or text.startswith("Removed build tracker"):
            if begin is not None:
                yield begin, ready or now, now
            begin = ready = None
        last = now
    if begin is not None and last is not None:
        yield begin, ready or last, last


def covered(spans: list[tuple[datetime.datetime, datetime.datetime]]) -> float:
    """Return the seconds that lie in any of these spans."""
    total, reached = 0.0, datetime.datetime.min
    for begin, end in sorted(spans):
        begin = max(begin, reached)
        if end > begin:
            total += (end - begin).total_seconds()
            reached = end
    return total


# --- everything, and when it was last green -------------------------------------------------------


def everything(names: list[str]) -> int:
    """Run these phases, or all that are not green yet on what the tree holds. Return the status."""
    failed = []
    for name in names or [name for name, row in PHASES.items() if row.get("all")]:
        if not names and is_green_here(name):
            print(f"  {name:<10} green here already", flush=True)
            continue
        make(*needs([name]))
        phase, commit = Phase(name, "all"), head()
        try:
            phase.run()
        finally:
            phase.end()
        if phase.status:
            failed.append(name)
        print(phase.text() if phase.status else phase.summary(), flush=True)
        if not phase.status:
            note_green(phase, commit)
    print(f"FAILED: {', '.join(failed)}" if failed else "all green")
    return int(bool(failed))


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)


def head() -> str:
    return git("rev-parse", "HEAD").stdout.strip()


def but_written() -> list[str]:
    """Return git's words for every file but green.toml and those that phases write."""
    written = [GREEN.relative_to(ROOT).as_posix()]
    written += [path for row in PHASES.values() for path in row.get("writes", ())]
    return ["--", ".", *(f":!{path}" for path in written)]


def read_green() -> dict[str, dict[str, Any]]:
    return tomllib.loads(GREEN.read_text(encoding="utf-8")) if GREEN.exists() else {}


def changes(commit: str) -> str:
    """Return the files that differ from a commit, new ones too, but for those that phases write."""
    differ = git("diff", "--name-only", commit, *but_written())
    if not commit or differ.returncode:
        return f"no commit {commit!r} in this clone"
    return differ.stdout + git("ls-files", "--others", "--exclude-standard", *but_written()).stdout


def is_green_here(name: str) -> bool:
    """Return whether nothing but what phases write has changed since the phase was green."""
    return not changes(read_green().get(name, {}).get("commit", ""))


def note_green(phase: Phase, commit: str) -> None:
    """Write day, seconds and last line of a phase into green.toml, and the commit that it began
    with, unless files differ from it."""
    changed = changes(commit)
    if changed:
        print(f"  {phase.name}: not noted in green.toml, files differ from {commit}:\n{changed}")
        return
    table = read_green() | {
        phase.name: {
            "commit": commit,
            "day": datetime.date.today().isoformat(),
            "seconds": round(phase.seconds),
            "last": phase.summary().split(" s  ", 1)[-1],
        }
    }
    text = "# When each phase of `make test-all` was last green; tests/phases.py writes it.\n"
    for name in sorted(table, key=list(PHASES).index):
        text += f"\n[{name}]\n"
        for field, value in table[name].items():
            shown = value if isinstance(value, int) else '"' + value.replace('"', "'") + '"'
            text += f"{field} = {shown}\n"
    GREEN.write_text(text, encoding="utf-8")


def name_old() -> None:
    """Print the phases that were last green more than MOST_COMMITS commits ago, or never."""
    green = read_green()
    phases = [name for name, row in PHASES.items() if row.get("all")]
    if never := [name for name in phases if name not in green]:
        print(f"tests/green.toml: never green: {', '.join(never)}")
    for name in (name for name in phases if name in green):
        count = git("rev-list", "--count", f"{green[name]['commit']}..HEAD").stdout.strip()
        if not count:
            print(f"tests/green.toml: the commit of {name} is not in this clone")
        elif int(count) > MOST_COMMITS:
            print(f"tests/green.toml: {name} was last green {count} commits ago; make test-{name}")


def main(words: list[str]) -> int:
    """Run what the words ask for. Return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", choices=["check", "test", "all", "old"])
    parser.add_argument("phases", nargs="*", metavar="NAME", help=", ".join(PHASES))
    arguments = parser.parse_args(words)
    if unknown := set(arguments.phases) - set(PHASES):
        parser.error(f"no such phase: {', '.join(sorted(unknown))}; there are {', '.join(PHASES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if arguments.target == "old":
        name_old()
        return 0
    if arguments.target == "all":
        return everything(arguments.phases)
    set_up(arguments.target)
    status = side_by_side(arguments.target)
    if arguments.target == "check":
        name_old()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
