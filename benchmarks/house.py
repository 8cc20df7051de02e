"""Measure the code's shape: files, lines, raises, imports, small files, files of one step, circles.

python benchmarks/house.py            # the static counts, in a second
python benchmarks/house.py --steps    # also the files that one local step runs (a minute)
python benchmarks/house.py --source ../before/src    # the static counts of another tree
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src"
PACKAGE = ROOT / "onepolicy"
SMALL = 90  # lines: a file that one other imports joins it
INDENTED_IMPORT = re.compile(r"^ +(from|import) onepolicy\b", re.MULTILINE)


def modules() -> dict[str, Path]:
    """Return every module of the package and its file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, known: dict[str, Path], *, lazy: bool) -> set[str]:
    """Return the package's modules that a file imports. lazy: also inside functions and under
    TYPE_CHECKING."""
    found: set[str] = set()
    for node in _nodes(ast.parse(path.read_text()), lazy):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module for name in names]
        found |= {name for name in names if name in known}
    return found


def _nodes(tree: ast.AST, lazy: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not lazy and (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or typing_only):
            continue
        yield node
        yield from _nodes(node, lazy)


def circle(graph: dict[str, set[str]]) -> str:
    """Return a circle of modules that import each other, or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " -> ".join(error.args[1])
    return "none"


def rooms(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the graph of the top folders."""

    def room(name: str) -> str:
        return ".".join(name.split(".")[:2])

    found: dict[str, set[str]] = {room(name): set() for name in graph}
    for name, others in graph.items():
        found[room(name)] |= {room(other) for other in others} - {room(name), "onepolicy"}
    return found


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def code_lines(text: str) -> int:
    """Count the lines that are no docstring, comment or blank."""
    left_out = {
        number
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in left_out
        for number, line in enumerate(text.splitlines(), start=1)
    )


def bases(node: ast.ClassDef) -> set[str]:
    """Return the names of a class's bases."""
    return {ast.unparse(base).partition("[")[0] for base in node.bases}


def one_importer(graph: dict[str, set[str]], known: dict[str, Path]) -> list[str]:
    """Return the modules, packages apart, that exactly one module of the package imports."""
    counts = Counter(name for others in graph.values() for name in others)
    return [name for name in known if counts[name] == 1 and known[name].name != "__init__.py"]


TRACE = """
import sys, threading
import onepolicy.run.loop, onepolicy.run.step
executed = set()  # files of the functions that steps call
callers = set()  # frames that wait for a step: to go on is an event of theirs, and no call of it
def watch(frame, event, argument):
    if event == "call" and frame not in callers:
        executed.add(frame.f_code.co_filename)
plain_step = onepolicy.run.step.StepRunner.rl_step
async def traced_step(*arguments, **named):
    frame = sys._getframe()
    while frame is not None:
        callers.add(frame)
        frame = frame.f_back
    sys.setprofile(watch); threading.setprofile(watch)
    try:
        return await plain_step(*arguments, **named)
    finally:
        sys.setprofile(None); threading.setprofile(None)
onepolicy.run.step.StepRunner.rl_step = traced_step
"""
"""Code of a process that trains afterwards: `executed` then has the files that its steps ran."""


def step_files(settings: list[str]) -> list[Path]:
    """Return the package's files in which one step of the quickstart calls a function."""
    run = (
        "from onepolicy.cli import main\n"
        "if main(sys.argv[1:]) == 0: print('FILES', *sorted(executed))"
    )
    policy = ["model.path=benchmarks/evidence/policies/one-of-8", "task.ops=4"]
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["train", "recipes/quickstart.toml", f"out={folder}/run", "steps=2"]
        done = subprocess.run(
            [sys.executable, "-c", f"{TRACE}\n{run}", *arguments, *policy, *settings],
            cwd=ROOT.parent,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
    found = [line for line in done.stdout.splitlines() if line.startswith("FILES")]
    if not found:
        raise SystemExit(done.stdout + done.stderr)
    return own_files(found[0].split()[1:])


def own_files(names: list[str]) -> list[Path]:
    """Return the files of the package among these."""
    return [Path(name) for name in names if name.startswith(f"{PACKAGE}/")]


def imports_inside_functions(known: dict[str, Path]) -> int:
    """Count the statements inside functions that import modules of the package."""
    count = 0
    for path in known.values():
        text = path.read_text()
        if not INDENTED_IMPORT.search(text):  # most files: these need not be parsed
            continue
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        tree = ast.parse(text)
        inside = {
            statement
            for function in ast.walk(tree)
            if isinstance(function, functions)
            for statement in ast.walk(function)
            if isinstance(statement, ast.Import | ast.ImportFrom)
        }
        count += sum(_is_own(statement) for statement in inside)
    return count


def _is_own(statement: ast.AST) -> bool:
    if isinstance(statement, ast.ImportFrom):
        names = [statement.module or ""]
    else:
        assert isinstance(statement, ast.Import)
        names = [alias.name for alias in statement.names]
    return any(name.split(".")[0] == "onepolicy" for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", action="store_true", help="trace one step with and without replay"
    )
    parser.add_argument("--source", type=Path, help="folder of another tree's package")
    arguments = parser.parse_args()
    if arguments.source is not None:
        global ROOT, PACKAGE
        ROOT, PACKAGE = arguments.source.resolve(), arguments.source.resolve() / "onepolicy"
    known = modules()
    every = {name: imported(path, known, lazy=True) for name, path in known.items()}
    print(f"files {len(known)}, lines {lines(list(known.values())):,}")
    print(f"own imports inside functions: {imports_inside_functions(known)}")
    texts = [path.read_text() for path in known.values()]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    raises, code = sum(isinstance(node, ast.Raise) for node in nodes), sum(map(code_lines, texts))
    print(f"raises: {raises:,} in {code:,} lines of code, {1000 * raises / code:.1f} in 1,000")
    protocols = sum(isinstance(node, ast.ClassDef) and "Protocol" in bases(node) for node in nodes)
    print(f"protocols: {protocols}")
    single = one_importer(every, known)
    small = [name for name in single if lines([known[name]]) <= SMALL]
    print(f"files with one importer: {len(single)}, {len(small)} of them of at most {SMALL} lines:")
    print("   ", ", ".join(name.removeprefix("onepolicy.") for name in small))
    print(f"folder circle: {circle(rooms(every))}")
    print(f"file circle, TYPE_CHECKING and lazy imports included: {circle(every)}")
    if arguments.steps:
        for name, settings in (
            ("one plain local step", []),
            ("the same without replay", ["replay.mode=off"]),
        ):
            used = step_files(["log.counterfactual_every=0", "eval.every=0", *settings])
            print(f"{name}: {len(used)} files, {lines(used):,} lines")
            for count, path in sorted(((lines([path]), path) for path in used), reverse=True):
                print(f"    {count} {path.relative_to(PACKAGE)}")


if __name__ == "__main__":
    main()
