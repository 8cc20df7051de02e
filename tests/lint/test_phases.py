"""What `make test` selects, what a green phase notes, and how pip's time is told apart."""

import ast
import re
import subprocess
import sys
import tomllib
from itertools import pairwise
from types import SimpleNamespace

import pytest

import phases
from support import gate
from support.paths import ROOT
from support.sources import text_of

OPTIONS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]
MARKERS = {line.partition(":")[0] for line in OPTIONS["ini_options"]["markers"]}


def collected(path, *words):
    """Return the tests that pytest collects from a file, in its order."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--confcutdir", path.parent,
         "-p", "conftest", "-o", "addopts=", "-q", "--collect-only", *words, path],
        cwd=path.parent, env={"PYTHONPATH": str(ROOT / "tests")}, capture_output=True, text=True,
    )  # fmt: skip
    return re.findall(r"^\S*?::(\S+)$", done.stdout, re.MULTILINE)


def item(name, marks=(), **parameters):
    """Make what the selection reads of a pytest item whose parameters are stacked decorators."""
    found = [SimpleNamespace(name=mark, args=()) for mark in marks]
    found += [SimpleNamespace(name="parametrize", args=(argument,)) for argument in parameters]

    def iter_markers(wanted=None):
        return [mark for mark in found if wanted in (None, mark.name)]

    made = _Hashable(nodeid=name, iter_markers=iter_markers)
    if parameters:
        made.callspec = SimpleNamespace(params=parameters)
    return made


class _Hashable(SimpleNamespace):
    __hash__ = object.__hash__


def names(items, families=()):
    return [each.nodeid for each in gate.selected(items, families)]


CASES = """
import pytest
@pytest.mark.parametrize("a", ["p", "q", "r"])
@pytest.mark.parametrize("b", [1, 2])
def test_grid(a, b): pass
@pytest.mark.parametrize(("a", "b"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_rows(a, b): pass
@pytest.fixture(params=["x", "y"])
def fixture(request): return request.param
@pytest.mark.parametrize("a, b", [(1, 1), (1, 2)])
def test_both(fixture, a, b): pass
@pytest.mark.few(2)
@pytest.mark.parametrize("a", [1, 2, 3])
def test_few(a): pass
def test_plain(): pass
"""


@pytest.mark.process
def test_each_value_of_each_parameter_runs_once(tmp_path):
    """A row of several arguments is one value."""
    path = write(tmp_path / "test_it.py", CASES)
    assert len(collected(path)) == 6 + 4 + 4 + 3 + 1
    chosen = collected(path, "--gate")
    assert {name.partition("[")[0]: 0 for name in chosen}.keys() == {
        "test_grid", "test_rows", "test_both", "test_few", "test_plain",
    }  # fmt: skip
    grid = [name for name in chosen if name.startswith("test_grid")]
    assert len(grid) == 3
    assert all(any(value in name for name in grid) for value in ("p", "q", "r", "1-", "2-"))
    assert [name for name in chosen if name.startswith("test_rows")] == [
        f"test_rows[{row}]" for row in ("1-1", "1-2", "2-1", "2-2")
    ]
    assert len([name for name in chosen if name.startswith("test_both")]) == 2
    assert [name for name in chosen if name.startswith("test_few")] == [
        "test_few[1]",
        "test_few[3]",
    ]


def test_marks_decide_what_belongs():
    kept = names([item("a"), item("b", ["process"]), item("c", ["vllm", "smoke"])])
    assert kept == ["a", "b", "c"]
    for mark in ("full", "slow", "gpu", "needs", *gate.COMPONENTS):
        assert names([item("a", [mark])]) == []
    assert names([item("a", ["slow", "smoke"])]) == []
    assert set(gate.COMPONENTS) | {"full", "slow", "gpu", "needs", "smoke", "process"} <= MARKERS


def test_one_family_for_each_way_of_scoring():
    table = tomllib.loads((ROOT / "tests/support/families.toml").read_text(encoding="utf-8"))
    assert all(table[name]["scoring"] == scoring for name, scoring in gate.FAMILIES.items())
    assert len(set(gate.FAMILIES.values())) == len(gate.FAMILIES) == 8
    cases = [item(f"t[{name}]", family=name) for name in [*table, "of_its_own"]]
    chosen = {each.removeprefix("t[").removesuffix("]") for each in names(cases, table)}
    assert chosen == {*gate.FAMILIES, "of_its_own"}


KEYS = {"what", "run", "gate", "needs", "env", "writes", "check", "test", "all"}


def test_every_phase_says_what_it_is_and_names_what_is_there():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    variables = dict(re.findall(r"^(\w+) := (\S+)$", makefile, re.MULTILINE))
    stamps = {f"{path}/.ready" for path in variables.values()} | {
        ".venv/.vllm",
        ".venv-gateway/.programs",
    }
    for name, row in phases.PHASES.items():
        assert row["what"], name
        assert set(row) <= KEYS, name
        assert all((ROOT / path).exists() for path in row.get("writes", ())), name
        assert set(row.get("needs", ())) <= stamps, name
        assert {row.get("check", 1), row.get("test", 1)} <= {1, 2}, name
        for target in ("test", "all"):
            command = phases.command_of(row, target)
            assert "{" not in command, name
            assert set(re.findall(r"[a-z]+", " ".join(re.findall(r"-m '(.*?)'", command)))) <= (
                MARKERS | {"not", "and", "or"}
            ), name
    assert set(phases.read_green()) <= set(phases.PHASES)


def marks_of(node):
    """Return the names in `pytest.mark.NAME` of an expression, an assignment or decorators."""
    return {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "pytest.mark"
    }


def end_to_end_tests():
    """Yield (path in the tree, test, names of its marks), of cases with marks of their own too."""
    for path in sorted((ROOT / "tests" / "e2e").rglob("test_*.py")):
        nodes = ast.parse(text_of(path)).body
        assigned = [node for node in nodes if isinstance(node, ast.Assign)]
        whole = [node for node in assigned if ast.unparse(node.targets[0]) == "pytestmark"]
        of_file = set().union(*map(marks_of, whole))
        for test in (node for node in nodes if getattr(node, "name", "").startswith("test_")):
            calls = [node for mark in test.decorator_list for node in ast.walk(mark)]
            own = [node.value for node in calls if isinstance(node, ast.keyword)]
            cases = set().union(*map(marks_of, own))
            marks = of_file.union(*map(marks_of, test.decorator_list)) - cases
            for more in (set(), *({each} for each in cases)):
                yield path.relative_to(ROOT).as_posix(), test.name, marks | more


def runs(row, path, marks):
    """Return whether a phase of `make test-all` runs a test."""
    command = phases.command_of(row, "all")
    wanted = re.search("-m ('.*?'|slow)", command)
    if wanted and not eval(wanted[1].strip("'"), {name: name in marks for name in MARKERS}):
        return False
    if "$(grep" in command:
        return "mark.process" in text_of(ROOT / path) and "e2e/integrations" not in path
    return any(path.startswith(folder) for folder in re.findall(r" (tests\S*)", command))


def test_every_end_to_end_test_runs_in_a_phase():
    rows = [row for row in phases.PHASES.values() if row.get("all")]
    left_out = [
        (path, test, marks)
        for path, test, marks in end_to_end_tests()
        if "gpu" not in marks and not any(runs(row, path, marks) for row in rows)
    ]
    assert left_out == []


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A repository with one commit, as phases.py sees it."""
    for words in (["init", "-q"], ["config", "user.email", "a@b"], ["config", "user.name", "a"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    (tmp_path / "file").write_text("1")
    commit(tmp_path)
    monkeypatch.setattr(phases, "ROOT", tmp_path)
    monkeypatch.setattr(phases, "GREEN", tmp_path / "green.toml")
    monkeypatch.setattr(phases, "LOGS", tmp_path / ".git" / "logs-of-phases")
    row = {"what": "w", "run": "echo '12 passed in 1 s'", "all": True}
    monkeypatch.setattr(phases, "PHASES", {"one": row, "two": {**row, "run": "exit 3"}})
    monkeypatch.setattr(phases, "make", lambda *targets: None)
    return tmp_path


def commit(folder):
    subprocess.run(["git", "add", "-A"], cwd=folder, check=True)
    subprocess.run(["git", "commit", "-q", "--allow-empty", "-m", "c"], cwd=folder, check=True)


@pytest.mark.process
def test_a_green_phase_is_noted_with_its_commit_and_is_not_run_again(clone, capsys):
    assert phases.everything([]) == 1
    assert "FAILED: two" in capsys.readouterr().out
    [(name, noted)] = phases.read_green().items()
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=clone, capture_output=True, text=True)
    assert (name, noted["commit"], noted["last"]) == (
        "one",
        head.stdout.strip(),
        "12 passed in 1 s",
    )
    commit(clone)  # green.toml itself changes nothing
    assert phases.everything([]) == 1
    assert "green here already" in capsys.readouterr().out
    (clone / "file").write_text("2")
    assert phases.everything(["one"]) == 0
    assert "not noted in green.toml, files differ" in capsys.readouterr().out
    assert phases.read_green() == {"one": noted}
    (clone / "file").write_text("1")
    (clone / "new").write_text("")
    phases.everything([])
    assert "green here already" not in capsys.readouterr().out


@pytest.mark.process
def test_a_phase_under_which_the_tree_moved_is_not_noted(clone, capsys, monkeypatch):
    moving = "echo 2 > file && git commit -qam moved && echo '12 passed in 1 s'"
    monkeypatch.setitem(phases.PHASES, "one", {"what": "w", "run": moving, "all": True})
    assert phases.everything(["one"]) == 0
    assert "not noted in green.toml, files differ" in capsys.readouterr().out
    assert phases.read_green() == {}


@pytest.mark.process
def test_a_phase_that_was_green_long_ago_or_never_is_named(clone, capsys, monkeypatch):
    phases.everything(["one"])
    capsys.readouterr()
    phases.name_old()
    assert capsys.readouterr().out == "tests/green.toml: never green: two\n"
    monkeypatch.setattr(phases, "MOST_COMMITS", 1)
    commit(clone)
    commit(clone)
    phases.name_old()
    assert "one was last green 2 commits ago" in capsys.readouterr().out


def test_downloads_are_told_apart_from_installing():
    log = """\
2026-01-01T00:00:00,000 Created build tracker
2026-01-01T00:00:30,000   Downloading torch
2026-01-01T00:01:00,000 Installing collected packages: torch
2026-01-01T00:01:40,000 Successfully installed torch
2026-01-01T00:01:41,000 Removed build tracker: 'x'
2026-01-01T00:02:00,000 Requirement already satisfied
2026-01-01T00:02:10,000 Removed build tracker: 'y'
"""
    first, second = phases.pip_spans(log)
    seconds = [[(b - a).total_seconds() for a, b in pairwise(s)] for s in (first, second)]
    assert seconds == [[60, 41], [10, 0]]
    assert phases.covered([span[:2] for span in (first, second)]) == 70
    assert phases.covered([(first[0], first[2]), (first[1], second[2])]) == 130


@pytest.mark.process
def test_a_test_that_starts_a_process_must_say_so(tmp_path):
    code = "import subprocess, sys\ndef test():\n    subprocess.run([sys.executable, '-c', ''])\n"
    path = ROOT / "tests" / "lint"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--confcutdir", path.parent,
         "-p", "conftest", write(tmp_path / "test_it.py", code)],
        cwd=tmp_path, env={"PYTHONPATH": str(path.parent)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert "mark it `process`, it starts one" in done.stdout


def write(path, text):
    path.write_text(text)
    return path
