"""Measure again what the docs say of speed and memory, and list what moved.

    python benchmarks/all.py                           # everything; goes on where it was stopped
    python benchmarks/all.py --only costs/replay       # one table of docs/data, or one set: costs
    python benchmarks/all.py --list                    # the commands, and what is left out and why
    python benchmarks/all.py --report                  # compare what was measured, run nothing
    python benchmarks/all.py --renew                   # write what was measured into docs/data

benchmarks/all.toml says which commands make which tables of docs/data, and how each cell is read
from what a command prints:

    [[command]]
    run = "python benchmarks/correct.py"
    [command.cells]
    "costs/corrections: cispo-rollout: time / one softmax" = 'a regular expression with one group'

A key names table, row (its first cells, as `fresh & r3`) and columns, as `ratio | low | high`. The
expression has a group for each column. `share * 100` multiplies what was read. `{ratio}` stands for
an expression of [patterns].

Every command adds a line to --out: commit, machine, load, cells, and what it printed. A command
that has a line of this commit is not run again, unless files of the tree have changed since. One
that needs another trainer names its `venv`. A number has moved if it is outside of the
documented interval (the row's low and high, lowest and highest), or without one, if it is off by
more than a tenth. docs/data is changed by --renew alone, with the digits that it has; claims and
machines are yours to mend.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import doc_tables
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".toml")
OUT = ROOT / "runs" / "benchmarks.jsonl"
NEAR = 0.1  # of a number without an interval
CHANGED = ", changed"
"""Behind a commit that the tree differs from."""
BOUNDS = re.compile(r"(quartile, )?(low|high)(est)?$")
"""Names of the columns of an interval."""


@dataclass(frozen=True)
class Cell:
    """A number of the docs, and what was measured."""

    name: str
    documented: float | None
    low: float | None
    high: float | None
    measured: float | None  # None: the output does not have it

    @property
    def moved(self) -> bool:
        if self.measured is None or self.documented is None:
            return True
        if self.low is None or self.high is None:
            return abs(self.measured - self.documented) > NEAR * abs(self.documented)
        return not self.low <= self.measured <= self.high


@dataclass(frozen=True)
class Command:
    """A command, and the expression of each row that it measures."""

    run: str
    cells: dict[str, str]
    venv: str = ".venv"  # with `.venv`, the Python that this script runs in

    @property
    def python(self) -> str:
        return sys.executable if self.venv == ".venv" else str(ROOT / self.venv / "bin/python")

    @property
    def tables(self) -> set[str]:
        return {key.split(": ")[0] for key in self.cells}


def commands() -> list[Command]:
    """Return the commands of all.toml, placeholders of their expressions filled in."""
    found = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    patterns = found["patterns"]

    def filled(expression: str) -> str:
        for name, pattern in patterns.items():
            expression = expression.replace(f"{{{name}}}", pattern)
        return expression

    return [
        Command(**each | {"cells": {key: filled(text) for key, text in each["cells"].items()}})
        for each in found["command"]
    ]


def left_out() -> dict[str, str]:
    """Return the reason of every table, or whole set, that no command of all.toml measures."""
    reasons: dict[str, str] = tomllib.loads(TABLE.read_text(encoding="utf-8"))["left_out"]
    return reasons


def cells(command: Command, output: str) -> Iterator[Cell]:
    """Yield the cells that a command measures, as its output has them."""
    for key, expression in command.cells.items():
        table, rest = key.split(": ", 1)
        row, names = rest.rsplit(": ", 1)
        found = re.search(expression, output, re.MULTILINE)
        texts: tuple[str | Any, ...] = found.groups() if found else ()
        for i, (at, factor) in enumerate(columns(table, names)):
            measured = None
            if i < len(texts):
                measured = number(texts[i]) * factor
            documented, low, high = interval(table, row, at)
            title = doc_tables.other(table)["columns"][at]["name"]
            yield Cell(f"{table}: {row}: {title}", documented, low, high, measured)


def columns(table: str, names: str) -> list[tuple[int, float]]:
    """Return the place of each column of `a | b * 100`, and its factor.

    A name that several columns have means the next one.
    """
    titles = [column["name"] for column in doc_tables.other(table)["columns"]]
    places: list[tuple[int, float]] = []
    after = 0
    for part in names.split(" | "):
        name, _, factor = part.partition(" * ")
        after = titles.index(name, after)
        places.append((after, float(factor or 1)))
        after += 1
    return places


def interval(table: str, row: str, at: int) -> tuple[float | None, float | None, float | None]:
    """Return a documented number, and the interval in the two columns behind it, if it has one."""
    keys = row.split(" & ")
    titles = [column["name"] for column in doc_tables.other(table)["columns"]]
    (own,) = [r for r in doc_tables.values(doc_tables.other(table)) if r[: len(keys)] == keys]
    bounds: list[float | None] = [None, None]
    if not BOUNDS.match(titles[at]) and all(map(BOUNDS.match, [*titles[at + 1 : at + 3], "-"][:2])):
        bounds = [value(cell) for cell in own[at + 1 : at + 3]]
    return value(own[at]), bounds[0], bounds[1]


def value(cell: Any) -> float | None:
    return None if cell is None else float(cell)


def number(text: str) -> float:
    return float(text.replace(",", "").rstrip("%"))


def state() -> dict[str, Any]:
    """Return the commit that is measured, and the machine."""

    def git(*words: str) -> str:
        return subprocess.check_output(["git", *words], cwd=ROOT, text=True).strip()

    commit = git("rev-parse", "--short=10", "HEAD")
    if git("status", "--porcelain", "--untracked-files=no"):
        commit += CHANGED
    return {"commit": commit, "machine": f"{processor()}, {os.cpu_count()} cores"}


def processor() -> str:
    """Return the processor's name as Linux knows it."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text() if info.exists() else "")
    return names[0] if names else "a processor without a name"


def measure(command: Command, here: dict[str, Any]) -> dict[str, Any]:
    """Run a command and return its line."""
    words = shlex.split(command.run)
    words[:1] = {"python": [command.python], "pytest": [command.python, "-m", "pytest"]}[words[0]]
    begun, load = time.time(), os.getloadavg()[0]
    ours = os.environ | {"PYTHONPATH": str(ROOT / "src")}  # other venvs have not installed it
    done = subprocess.run(words, cwd=ROOT, env=ours, capture_output=True, text=True, check=False)
    line = {"command": command.run, **here, "load": [round(load, 1), round(os.getloadavg()[0], 1)]}
    line |= {"seconds": round(time.time() - begun), "status": done.returncode}
    if not done.returncode:
        line["cells"] = [asdict(cell) for cell in cells(command, done.stdout)]
    return line | {"stdout": done.stdout, "stderr": done.stderr[-2000:]}


def lines_of(out: Path) -> dict[str, dict[str, Any]]:
    """Return the last line of every command."""
    if not out.exists():
        return {}
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    return {row["command"]: row for row in rows}


def report(chosen: list[Command], out: Path) -> Table:
    """Return the numbers that moved, or were not found, and say how many were compared and which
    commands failed at their last try."""
    done, compared = lines_of(out), 0
    failed = [each.run for each in chosen if done.get(each.run, {}).get("status")]
    table = Table(caption="\n".join(f"failed: {run}" for run in failed) or None)
    for name in ("number", "documented", "interval", "measured", "commit", "machine"):
        table.add_column(name, overflow="fold")
    for command in chosen:
        line = done.get(command.run)
        if line is None or line["status"]:
            continue
        for cell in cells(command, line["stdout"]):
            if BOUNDS.match(cell.name.rpartition(": ")[2]):
                continue
            compared += 1
            if cell.moved:
                between = "" if cell.low is None else f"{cell.low:g} to {cell.high:g}"
                shown = ["" if x is None else f"{x:g}" for x in (cell.documented, cell.measured)]
                table.add_row(
                    cell.name, shown[0], between, shown[1], line["commit"], line["machine"]
                )
    table.title = f"{table.row_count} of {compared} numbers moved, or were not printed"
    return table


def renew(chosen: list[Command], out: Path) -> int:
    """Write the last measured numbers into docs/data, and return how many cells changed."""
    done, changed = lines_of(out), 0
    for command in chosen:
        line = done.get(command.run)
        if line is None or line["status"]:
            continue
        for key in command.cells:
            table, rest = key.split(": ", 1)
            row, names = rest.rsplit(": ", 1)
            found = list(cells(replace(command, cells={key: command.cells[key]}), line["stdout"]))
            path = doc_tables.DATA / f"{table.partition('/')[0]}.json"
            for (at, _), cell in zip(columns(table, names), found, strict=True):
                if cell.measured is not None:
                    before = path.read_text(encoding="utf-8")
                    after = with_cell(before, table, row.split(" & "), at, cell.measured)
                    path.write_text(after, encoding="utf-8")
                    changed += before != after
    return changed


def with_cell(text: str, table: str, keys: list[str], at: int, measured: float) -> str:
    """Return a file of docs/data with another number in a row, rounded as the one before."""
    begin = text.index(f'"id": "{table.partition("/")[2]}"')
    end_of_table = text.index("\n}", begin)
    for found in re.finditer(r"^ +(\[.*\]),?$", text[begin:end_of_table], re.MULTILINE):
        spans, place, decode = [], 1, json.JSONDecoder().raw_decode
        row = found[1]
        while row[place - 1] != "]":
            _, end = decode(row, place)
            spans.append((place, end))
            place = end + 1 + row[end + 1 :].startswith(" ")
        cells_of_row = json.loads(row, parse_float=str, parse_int=str)
        if cells_of_row[: len(keys)] == keys:
            first, last = (begin + found.start(1) + bound for bound in spans[at])
            return f"{text[:first]}{rounded(measured, text[first:last])}{text[last:]}"
    raise KeyError(f"{table}: no row {' & '.join(keys)}")


def rounded(measured: float, before: str) -> str:
    """Return a number with the digits of the one before; a cell that is none stays."""
    if before == "null":
        return f"{measured:g}"
    if before.startswith(("{", '"')):
        return before
    digits, exponent, _ = before.partition("e")
    form = f".{len(digits.partition('.')[2])}{exponent or 'f'}"
    return re.sub(r"e([+-])0(\d)$", r"e\1\2", f"{measured:{form}}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], help="tables SET/ID or sets of docs/data")
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    parser.add_argument("--report", action="store_true", help="compare --out's, run nothing")
    parser.add_argument(
        "--renew", action="store_true", help="write --out's into docs/data, run nothing"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="file that lines are added to")
    args = parser.parse_args()
    chosen = [
        each
        for each in commands()
        if not args.only or {*args.only} & {*each.tables, *(t.split("/")[0] for t in each.tables)}
    ]
    if not chosen:
        parser.error(f"--only: no command measures {' '.join(args.only)}")
    if args.list:
        for each in chosen:
            print(f"{each.run}\n    {', '.join(sorted(each.tables))}")
        for name, reason in left_out().items():
            print(f"left out: {name}: {reason}")
        return
    if args.renew:
        print(f"{renew(chosen, args.out)} numbers of docs/data changed")
        return
    here, console = state(), Console(width=160)
    for each in () if args.report else chosen:
        if not Path(each.python).exists():
            sys.exit(f"{each.run}: no {each.python}: make {each.venv}/.ready")
    for each in () if args.report else chosen:
        line = lines_of(args.out).get(each.run, {})
        known = line.get("status") == 0 and line["commit"] == here["commit"]
        if known and not here["commit"].endswith(CHANGED):
            continue
        console.print(each.run, markup=False)
        line = measure(each, here)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a", encoding="utf-8") as file:
            print(json.dumps(line), file=file)
        if line["status"]:
            console.print(f"  exit status {line['status']}: {line['stderr']}", markup=False)
    console.print(report(chosen, args.out))


if __name__ == "__main__":
    main()
