"""How many planted mistakes do the tests see? A measure of a suite, and of two beside each other.

    python benchmarks/mutants.py draw --count 300 --seed 0         # mistakes in src, one a mutant
    python benchmarks/mutants.py cover NAME -- -m "not process"    # which test runs which line
    python benchmarks/mutants.py run NAME                          # try what covers each mutant
    python benchmarks/mutants.py table OLD NEW                     # killed, by kind; what survived

A mutant is one comparison, constant, sign, bound, dropped statement or swapped argument. Lines are
drawn with equal weight; docstrings, messages, annotations and raises are left out. Each mutant is
tried with the tests that cover its line and pass without it, of the 200 quickest, for at most 60 s
of CPU (three times that on the clock). `--tree` names another checkout, whose tests and sources are
used. All is in runs/mutants; `run` goes on where it ended.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import mutant_trials
from json_lines import drop_cut_line, read_lines
from mutant_trials import Passing

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "runs" / "mutants"
MOST_TESTS = 200
RESULTS = ("killed", "survived", "not covered", "undecided", "gone")
OUTSIDE = ("report/", "cli/", "plan/")
"""Folders of texts and pages, which have no aim of their own."""

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
SIGNS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One mistake: at `line` (1-based) of `file`, columns [start, end) of its bytes become `after`.

    text: the whole line or lines before, by which another version of the file is matched.
    """

    file: str
    line: int
    kind: str
    text: str
    start: int
    end: int
    before: str
    after: str

    def find(self, tree: Path) -> tuple[str, int] | None:
        """Return the source of `tree` and the place of the text in it, None if it is gone."""
        path = tree / self.file
        if not path.is_file():
            return None
        source = path.read_text(encoding="utf-8")
        places = [i for i in range(len(source)) if source.startswith(self.text, i)]
        if not places:
            return None
        expected = sum(len(row) + 1 for row in source.split("\n")[: self.line - 1])
        return source, min(places, key=lambda i: abs(i - expected))

    def moved(self, tree: Path) -> Mutant | None:
        """Return the mutant with the line that it has in `tree`."""
        found = self.find(tree)
        return found and replace(self, line=found[0].count("\n", 0, found[1]) + 1)

    def apply(self, tree: Path) -> str | None:
        """Return the changed source of `tree`, None if the line is not in it any more."""
        found = self.find(tree)
        if found is None:
            return None
        source, place = found
        start = place + len(self.text.encode()[: self.start].decode())
        end = place + len(self.text.encode()[: self.end].decode())
        return source[:start] + self.after + source[end:]


# --- drawing --------------------------------------------------------------------------------------


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield (kind, node to replace, its new source) of every mistake that can be made in a node."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            new = ast.Compare(node.left, [COMPARISONS[type(operator)]()], node.comparators)
            yield "comparison", node, f"({ast.unparse(new)})"
        case ast.Constant(value=bool(value)):
            yield "constant", node, str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", node, repr(value + 1 if isinstance(value, int) else 2 * value + 0.5)
        case ast.BinOp(op=operator) if type(operator) in SIGNS:
            new = ast.BinOp(node.left, SIGNS[type(operator)](), node.right)
            yield "sign", node, f"({ast.unparse(new)})"
        case ast.BoolOp(op=operator):
            yield "sign", node, f"({ast.unparse(ast.BoolOp(SIGNS[type(operator)](), node.values))})"
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            yield "sign", node, f"({ast.unparse(operand)})"
        case ast.Slice():
            for bound in (node.lower, node.upper):
                if bound is not None:
                    yield "bound", bound, f"{ast.unparse(bound)} + 1"
        case ast.Subscript(slice=ast.UnaryOp() | ast.BinOp() as index):
            yield "bound", index, f"{ast.unparse(index)} + 1"
        case ast.Call(func=ast.Name(id="range"), args=[*_, last]):
            yield "bound", last, f"{ast.unparse(last)} + 1"
        case ast.Call(args=[first, second, *rest]) if ast.dump(first) != ast.dump(second):
            if not any(isinstance(each, ast.Starred) for each in node.args):
                new = ast.Call(node.func, [second, first, *rest], node.keywords)
                yield "swapped arguments", node, ast.unparse(new)
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Continue() | ast.Break():
            yield "dropped line", node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "dropped line", node, "pass"


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Walk the code that does something: no messages, annotations, decorators, strings."""
    yield node
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from walk(child)


def mutants_of(path: Path, root: Path) -> Iterator[Mutant]:
    """Yield every mutant of a file."""
    source = path.read_text(encoding="utf-8")
    rows = source.split("\n")
    for node in walk(ast.parse(source)):
        for kind, place, after in changes(node):
            text = "\n".join(rows[place.lineno - 1 : place.end_lineno])
            before_last = "\n".join(rows[place.lineno - 1 : place.end_lineno - 1])
            above = len(before_last.encode()) + (place.end_lineno > place.lineno)
            end = above + place.end_col_offset
            before = text.encode()[place.col_offset : end].decode()
            made = Mutant(
                str(path.relative_to(root)),
                place.lineno,
                kind,
                text,
                place.col_offset,
                end,
                before,
                after,
            )
            if before != after:
                yield made


def compiles(source: str | None) -> bool:
    try:
        compile(source or "(", "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def draw(root: Path, count: int, seed: int) -> list[Mutant]:
    """Draw mutants: a line of code, then a kind that it has, then a place."""
    lines: dict[tuple[str, int], list[Mutant]] = {}
    for path in sorted((root / "src" / "onepolicy").rglob("*.py")):
        for mutant in mutants_of(path, root):
            lines.setdefault((mutant.file, mutant.line), []).append(mutant)
    chosen = random.Random(seed)
    drawn = []
    for key in chosen.sample(sorted(lines), len(lines)):
        kind = chosen.choice(sorted({mutant.kind for mutant in lines[key]}))
        mutant = chosen.choice([mutant for mutant in lines[key] if mutant.kind == kind])
        if compiles(mutant.apply(root)):
            drawn.append(mutant)
        if len(drawn) == count:
            break
    return drawn


# --- which test runs which line -------------------------------------------------------------------


def cover(tree: Path, folder: Path, words: list[str]) -> None:
    """Run tests with coverage by test. Leave its data and each test's seconds in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "coveragerc"
    settings.write_text(
        f"[run]\nsource = {tree / 'src' / 'onepolicy'}\ndata_file = {folder / 'coverage'}\n"
        "patch =\n  subprocess\n  fork\n  _exit\nparallel = true\n"
        "context = ${PYTEST_CURRENT_TEST}\n"
    )
    environment = os.environ | {
        "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{ROOT / 'benchmarks'}",
        "OMP_NUM_THREADS": "1",
        "MUTANTS_SECONDS": str(folder / "seconds.json"),
    }
    coverage = ["--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report="]
    command = [sys.executable, "-m", "pytest", "-p", "mutants", *coverage, *words]
    subprocess.run(command, cwd=tree, env=environment)


def pytest_runtest_logreport(report) -> None:
    """Sum a test's seconds; forget one that does not pass. (This file is a plugin of `cover`.)"""
    if report.outcome == "passed":
        _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration
    else:
        _failed.add(report.nodeid)


def pytest_sessionfinish(session) -> None:
    path = os.environ.get("MUTANTS_SECONDS")
    if path and not hasattr(session.config, "workerinput"):
        kept = {test: s for test, s in _seconds.items() if test not in _failed}
        Path(path).write_text(json.dumps(kept))


_seconds: dict[str, float] = {}
_failed: set[str] = set()


class Coverage:
    """Which tests run a line, the quickest first."""

    def __init__(self, tree: Path, folder: Path):
        from coverage import CoverageData

        self.tree = tree
        self.data = CoverageData(basename=str(folder / "coverage"))
        self.data.read()
        self.seconds = json.loads((folder / "seconds.json").read_text())
        self.files: dict[str, dict[int, list[str]]] = {}

    def tests(self, mutant: Mutant) -> list[str]:
        """Return the tests that run a mutant's line; of a line outside functions, which runs at
        import, those that run any line of its file."""
        moved = mutant.moved(self.tree)
        if moved is None:
            return []
        path, mutant = self.tree / mutant.file, moved
        if mutant.file not in self.files:
            self.files[mutant.file] = self.data.contexts_by_lineno(str(path))
        lines = self.files[mutant.file]
        if in_function(path, mutant):
            contexts = set(lines.get(self.line(path, mutant), ()))
        else:
            contexts = {context for each in lines.values() for context in each}
        names = {name_of(context) for context in contexts} & set(self.seconds)
        return sorted(names, key=lambda name: (self.seconds[name], name))

    def line(self, path: Path, mutant: Mutant) -> int:
        """Return the first line of the statement that the mutant changes: coverage counts there."""
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            simple = isinstance(node, ast.stmt) and not hasattr(node, "body")
            if simple and node.lineno <= mutant.line <= (node.end_lineno or 0):
                return node.lineno
        return mutant.line


def name_of(context: str) -> str:
    """Return the test that a context of coverage names, in this process or in one it started."""
    return context.rpartition("|")[0] or context.rpartition(" (")[0]


def in_function(path: Path, mutant: Mutant) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return any(f.body[0].lineno <= mutant.line <= (f.end_lineno or 0) for f in functions)


# --- trying ---------------------------------------------------------------------------------------


def run(tree: Path, folder: Path, mutants: list[Mutant], words: list[str], workers: int) -> None:
    """Try each mutant that has no result yet, in `workers` processes with a copy of the tree each.

    What the tests import from elsewhere is imported once; each trial is a fork.
    """
    results = folder / "results.jsonl"
    drop_cut_line(results)
    done = {row["number"] for row in read_lines(results)}
    coverage = Coverage(tree, folder)
    work = [(n, coverage.tests(mutant)) for n, mutant in enumerate(mutants) if n not in done]
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    for module in ("scipy.stats", "hypothesis", "pytest", "transformers.modeling_utils", "peft"):
        __import__(module)
    children = []
    for worker in range(workers):
        child = os.fork()
        if not child:
            copy = copy_of(tree, folder / f"tree_{worker}")
            passing = Passing(partial(mutant_trials.failing, copy, words=words))
            for number, tests in work[worker::workers]:
                row = attempt(copy, number, mutants[number], tests[:MOST_TESTS], words, passing)
                with results.open("a") as file:
                    file.write(json.dumps(row | {"tests": len(tests)}) + "\n")
                print(number, row["result"], row.get("by", ""), flush=True)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def copy_of(tree: Path, folder: Path) -> Path:
    """Copy what git knows of a tree, and link its venvs."""
    shutil.rmtree(folder, ignore_errors=True)
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=tree, capture_output=True, text=True
    ).stdout
    for name in names.split("\0"):
        if name and (tree / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tree / name, folder / name)
    for venv in tree.glob(".venv*"):
        (folder / venv.name).symlink_to(venv.resolve())
    return folder


def attempt(
    tree: Path,
    number: int,
    mutant: Mutant,
    tests: list[str],
    words: list[str],
    passing: Passing,
) -> dict[str, object]:
    """Plant one mutant, run its tests that pass without it until one fails, take it out again."""
    row: dict[str, object] = {"number": number}
    changed = mutant.apply(tree)
    if changed is None:
        return row | {"result": "gone"}
    if not tests:
        return row | {"result": "not covered"}
    tests = passing.of(tests)
    if not tests:
        return row | {"result": "undecided"}
    path = tree / mutant.file
    original = path.read_text(encoding="utf-8")
    path.write_text(changed, encoding="utf-8")
    shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)
    began = time.monotonic()
    try:
        status = mutant_trials.trial(tree, tests, [*words, "-x"])
    finally:
        path.write_text(original, encoding="utf-8")
        shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)
    row["seconds"] = round(time.monotonic() - began, 1)
    if status == 0:
        return row | {"result": "survived"}
    if status != 1:  # the time was up, or pytest could not run them: no test has failed
        return row | {"result": "undecided"}
    lines = (tree / mutant_trials.LOG).read_text(errors="replace").splitlines()
    said = [line for line in lines if line.startswith(("FAILED", "ERROR", "SUBFAILED"))]
    return row | {"result": "killed", "by": (said or lines[-1:] or [f"status {status}"])[0][:300]}


# --- results --------------------------------------------------------------------------------------


def table(mutants: list[Mutant], names: list[str]) -> None:
    """Print what became of the mutants in each suite, and those that a suite does not see."""
    found = {
        n: {row["number"]: row for row in read_lines(OUT / n / "results.jsonl")} for n in names
    }
    outside = tuple(f"src/onepolicy/{folder}" for folder in OUTSIDE)
    core = {n for n, mutant in enumerate(mutants) if not mutant.file.startswith(outside)}
    for title, chosen in (
        ("all", set(range(len(mutants)))),
        (f"outside {' '.join(OUTSIDE)}", core),
    ):
        print(f"\n{title}\n| suite | {' | '.join(RESULTS)} | killed of decided |")
        print("| --- " * (len(RESULTS) + 2) + "|")
        for name in names:
            counts = Counter(row["result"] for n, row in found[name].items() if n in chosen)
            decided = counts["killed"] + counts["survived"] + counts["not covered"]
            share = 100 * counts["killed"] / max(1, decided)
            cells = " | ".join(str(counts[result]) for result in RESULTS)
            print(f"| {name} | {cells} | {share:.1f}% |")
    print("\nnot killed by", " / ".join(names))
    for number, mutant in enumerate(mutants):
        results = [found[name].get(number, {}).get("result", "-") for name in names]
        if results != ["killed"] * len(names):
            place = f"{mutant.file}:{mutant.line} {mutant.kind}"
            print(f"{number} {' / '.join(results)}: {place}: {mutant.before!r} -> {mutant.after!r}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["draw", "cover", "run", "table"])
    parser.add_argument("names", nargs="*", help="of suites: a folder each in runs/mutants")
    parser.add_argument("--tree", type=Path, default=ROOT, help="a checkout (this one)")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    words = sys.argv[1:]
    own, behind = words, []
    if "--" in words:
        own, behind = words[: words.index("--")], words[words.index("--") + 1 :]
    arguments = parser.parse_args(own)
    listed = OUT / "mutants.json"
    if arguments.action == "draw":
        OUT.mkdir(parents=True, exist_ok=True)
        drawn = draw(arguments.tree, arguments.count, arguments.seed)
        listed.write_text(json.dumps([asdict(mutant) for mutant in drawn], indent=1))
        print(Counter(mutant.kind for mutant in drawn))
        return
    if arguments.action == "cover":
        cover(arguments.tree.resolve(), OUT / arguments.names[0], behind)
        return
    mutants = [Mutant(**row) for row in json.loads(listed.read_text())]
    if arguments.action == "run":
        folder = OUT / arguments.names[0]
        run(arguments.tree.resolve(), folder, mutants, behind, arguments.workers)
    else:
        table(mutants, arguments.names)


if __name__ == "__main__":
    main()
