"""`onepolicy compare`: arms are trained, resumed, judged, and refused with a clear message."""

import json

import pytest

from onepolicy.cli import main
from onepolicy.launch.arms import Arm
from onepolicy.run.log import read_metrics


@pytest.fixture
def compare(recipe, tmp_path, capsys):
    """Return compare("--arm", ...), which runs the command, and its status, stdout and stderr."""

    def run(*words):
        capsys.readouterr()
        out = str(tmp_path / "arms")
        status = main(["compare", str(recipe), "steps=2", "--out", out, "--jobs", "1", *words])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run


def test_two_arms_and_a_second_call(compare, tmp_path):
    status, out, err = compare()
    assert status == 0
    assert "k3 is " in out
    assert "One seed an arm" in out
    assert "off, seed 0: 2 steps" in err
    folder = tmp_path / "arms"
    assert (folder / "comparison.html").exists()
    tree = json.loads((folder / "comparison.json").read_text())
    first, other = (tree["contrasts"][0][name] for name in ("first", "other"))
    assert (first, other) == ("off", "r3")
    replayed = {
        name: json.loads((folder / name / "config.json").read_text())["replay"]["mode"]
        for name in ("off-seed0", "r3-seed0")
    }
    assert replayed == {"off-seed0": "off", "r3-seed0": "r3"}
    written = {path: path.stat().st_mtime_ns for path in folder.glob("*/metrics.jsonl")}
    assert compare()[0] == 0
    assert written == {path: path.stat().st_mtime_ns for path in folder.glob("*/metrics.jsonl")}


def test_a_failing_arm_is_named_with_its_last_lines(compare, monkeypatch):
    monkeypatch.setattr(Arm, "command", lambda arm, recipe: ["sh", "-c", "echo lost it; exit 3"])
    status, _, err = compare()
    assert status == 1
    assert "arm off ended with status 3" in err
    assert "lost it" in err


def test_a_stopped_arm_is_resumed(compare, tmp_path):
    arms = "--arm", "one", "replay.mode=off", "--arm", "two", "replay.mode=r3"
    compare(*arms)
    folder = tmp_path / "arms" / "one-seed0"
    (folder / "summary.json").unlink()  # as if the run had been killed after its last checkpoint
    before = read_metrics(folder)
    assert compare(*arms)[0] == 0
    assert (folder / "summary.json").exists()
    assert read_metrics(folder) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--arm", "off", "replay.mode=of", "--arm", "b"), "arm off: "),
        (("--arm", "replay.mode=off", "--arm", "b"), "'replay.mode=off' is no name"),
        (("--arm", "a", "--arm", "a"), "give two arms or more, each with a name of its own"),
        (("--arm", "a"), "give two arms or more"),
        (("--seeds", "1", "1"), "name each seed once"),
        (("--jobs", "0"), "--jobs: 0"),
    ],
)
def test_bad_arguments(compare, tmp_path, words, message):
    status, _, err = compare(*words)
    assert status == 2
    assert message in err
    assert not (tmp_path / "arms").exists()


def test_a_folder_of_other_settings_is_refused(compare):
    compare()
    status, _, err = compare("optim.lr=1e-5")
    assert status == 2
    assert "holds a run with other settings than arm off now has" in err
