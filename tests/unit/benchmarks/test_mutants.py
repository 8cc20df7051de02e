"""benchmarks/mutants.py makes the mistakes that it says, where it says, and none in texts."""

import json

import mutant_trials
import mutants
import pytest

SOURCE = '''"""A docstring with 1 < 2."""
LIMIT = 3


def half(values: "list[int]", most=4) -> int:
    """Return 5."""
    if len(values) < most and not values[0]:
        raise ValueError(f"{values} has {1 + 1}", 6)
    kept = values[1:LIMIT]
    for index in range(LIMIT):
        kept.append(max(index, -7))
    self.count = len(kept) * 2
    return kept[-1] // LIMIT
'''
MISTAKES = {
    ("comparison", "len(values) < most", "(len(values) <= most)"),
    ("constant", "3", "4"),
    ("constant", "4", "5"),
    ("constant", "0", "1"),
    ("constant", "1", "2"),
    ("constant", "2", "3"),
    ("constant", "7", "8"),
    (
        "sign",
        "len(values) < most and not values[0]",
        "(len(values) < most or not values[0])",
    ),
    ("sign", "not values[0]", "(values[0])"),
    ("sign", "-7", "(7)"),
    ("sign", "-1", "(1)"),
    ("sign", "len(kept) * 2", "(len(kept) / 2)"),
    ("sign", "kept[-1] // LIMIT", "(kept[-1] * LIMIT)"),
    ("bound", "1", "1 + 1"),
    ("bound", "LIMIT", "LIMIT + 1"),
    ("bound", "-1", "-1 + 1"),
    ("swapped arguments", "max(index, -7)", "max(-7, index)"),
    ("dropped line", "kept.append(max(index, -7))", "pass"),
    ("dropped line", "self.count = len(kept) * 2", "pass"),
}


@pytest.fixture
def tree(tmp_path):
    path = tmp_path / "src" / "onepolicy" / "half.py"
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE)
    return tmp_path


def test_every_mistake_and_no_other(tree):
    made = list(mutants.mutants_of(tree / "src" / "onepolicy" / "half.py", tree))
    assert {(m.kind, m.before, m.after) for m in made} == MISTAKES
    for mutant in made:
        changed = mutant.apply(tree)
        lines = zip(SOURCE.splitlines(), changed.splitlines(), strict=True)
        [(number, line)] = [(n, new) for n, (old, new) in enumerate(lines, 1) if old != new]
        assert number == mutant.line
        assert mutant.after in line
        assert mutants.compiles(changed)


def test_a_mutant_is_found_in_a_file_that_has_moved_lines(tree):
    path = tree / "src" / "onepolicy" / "half.py"
    mutant = next(m for m in mutants.mutants_of(path, tree) if m.kind == "comparison")
    path.write_text("import os\n\n" + SOURCE)
    assert "if (len(values) <= most) and not values[0]:" in mutant.apply(tree)
    path.write_text(SOURCE.replace("len(values) < most", "most > len(values)"))
    assert mutant.apply(tree) is None


def test_a_draw_is_a_function_of_its_seed(tree):
    assert mutants.draw(tree, 5, seed=1) == mutants.draw(tree, 5, seed=1)
    assert mutants.draw(tree, 5, seed=1) != mutants.draw(tree, 5, seed=2)
    lines = [mutant.line for mutant in mutants.draw(tree, 99, seed=0)]
    assert lines
    assert len(lines) == len(set(lines))  # one a line


def test_what_covers_a_line(tree, tmp_path):
    from coverage import CoverageData

    path = tree / "src" / "onepolicy" / "half.py"
    data = CoverageData(basename=str(tmp_path / "coverage"))
    for context, lines in {
        "": [1, 2, 5],
        "t.py::slow|run": [7, 9],
        "t.py::quick[a|b]|setup": [7],
        "t.py::child (call)": [12],
        "t.py::red|run": [7],
    }.items():
        data.set_context(context)
        data.add_lines({str(path): lines})
    data.write()
    seconds = {"t.py::slow": 2.0, "t.py::quick[a|b]": 0.1, "t.py::child": 1.0}
    (tmp_path / "seconds.json").write_text(json.dumps(seconds))
    found = mutants.Coverage(tree, tmp_path)
    every = {m.line: found.tests(m) for m in mutants.mutants_of(path, tree)}
    assert every[7] == ["t.py::quick[a|b]", "t.py::slow"]
    assert every[12] == ["t.py::child"]
    assert every[11] == []
    assert every[2] == ["t.py::quick[a|b]", "t.py::child", "t.py::slow"]  # runs at import


def test_a_mutant_is_found_where_its_line_has_moved(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n\ny = 2\nx = 1\n")
    mutant = mutants.Mutant("a.py", 5, "constant", "x = 1", 4, 5, "1", "2")
    assert mutant.moved(tmp_path).line == 4  # the nearest of two
    assert mutants.Mutant("a.py", 1, "constant", "z = 1", 4, 5, "1", "2").moved(tmp_path) is None
    assert mutants.Mutant("b.py", 1, "constant", "x = 1", 4, 5, "1", "2").moved(tmp_path) is None


def test_a_test_that_fails_without_the_mutant_does_not_kill_it(tree, monkeypatch):
    """A test of three fails in the copy as it is; it is tried once. Other ends are no kill."""
    mutant = next(mutants.mutants_of(tree / "src" / "onepolicy" / "half.py", tree))
    statuses, trials = iter([1, 0, 1, 4, None]), []

    def trial(tree, tests, words, *plugins):
        trials.append(tests)
        for plugin in plugins:
            plugin.path.write_text("t.py::red\n")
        (tree / mutant_trials.LOG).write_text("FAILED t.py::b - it saw\n")
        return next(statuses)

    monkeypatch.setattr(mutant_trials, "trial", trial)
    passing = mutant_trials.Passing(lambda tests: mutant_trials.failing(tree, tests, []))

    def result(*tests):
        return mutants.attempt(tree, 0, mutant, list(tests), [], passing)["result"]

    assert result("t.py::a", "t.py::red", "t.py::b") == "survived"
    assert result("t.py::red") == "undecided"
    found = [result("t.py::b", "t.py::red") for _ in range(3)]
    assert found == ["killed", "undecided", "undecided"]
    assert trials[:2] == [["t.py::a", "t.py::red", "t.py::b"], ["t.py::a", "t.py::b"]]
    assert trials[2:] == [["t.py::b"]] * 3
    assert mutants.read_lines(tree / "none.jsonl") == []
