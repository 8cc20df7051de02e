"""`onepolicy compare`: arms are trained, resumed, judged, and refused with a clear message."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from onepolicy.cli import main
from onepolicy.cli.compare import DEFAULT_ARMS
from onepolicy.cli.plan_arms import plan_arms, plan_jobs
from onepolicy.config import load
from onepolicy.launch.arms import Arm, lock_arms
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
    assert "off, seed 0: begun; its output: " in err
    assert "off, seed 0: 2 of 2 steps" in err
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
    status, _, err = compare()
    assert status == 0
    assert "all 2 runs in " in err
    assert written == {path: path.stat().st_mtime_ns for path in folder.glob("*/metrics.jsonl")}


def test_a_failing_arm_is_named_with_its_last_lines(compare, monkeypatch):
    monkeypatch.setattr(Arm, "command", lambda arm, recipe: ["sh", "-c", "echo lost it; exit 3"])
    status, _, err = compare()
    assert status == 1
    assert "arm off, seed 0: ended by exit status 3; the same command goes on" in err
    assert "lost it" in err


@pytest.mark.parametrize("status", [2, 75])
def test_the_exit_status_is_that_of_the_arm(compare, monkeypatch, status):
    monkeypatch.setattr(Arm, "command", lambda arm, recipe: ["sh", "-c", f"exit {status}"])
    assert compare()[0] == status


def test_stopped_arms_are_resumed(compare, tmp_path):
    """One was killed after its last checkpoint, the other before its first."""
    arms = "--arm", "one", "replay.mode=off", "--arm", "two", "replay.mode=r3"
    compare(*arms)
    one, two = (tmp_path / "arms" / f"{name}-seed0" for name in ("one", "two"))
    before = read_metrics(one), read_metrics(two)
    for folder in (one, two):
        (folder / "summary.json").unlink()
    shutil.rmtree(two / "checkpoints")
    status, _, err = compare(*arms)
    assert (status, "2 runs of 2 steps, 0 of them finished, 1 at a time" in err) == (0, True), err
    assert read_metrics(one) == before[0]
    again = read_metrics(two)
    assert [row["train/reward"] for row in again[1:]] == [
        row["train/reward"] for row in before[1][1:]
    ]
    assert (
        "it has no checkpoint, so it starts again at step 0"
        in (tmp_path / "arms" / "two-seed0-console.txt").read_text()
    )


def test_two_commands_do_not_share_a_folder(compare, tmp_path):
    with lock_arms(tmp_path / "arms"):
        status, _, err = compare()
    assert status == 2
    assert "another `onepolicy compare` is at work in this folder" in err


def test_missing_packages_of_the_picture_are_named_before_training(compare, tmp_path, monkeypatch):
    monkeypatch.setattr("onepolicy.cli.compare.find_spec", lambda name: None)
    status, _, err = compare("--png")
    assert status == 2
    assert "plotly, jinja2, kaleido; pip install 'onepolicy[report]'" in err
    assert not (tmp_path / "arms").exists()


def test_a_folder_that_is_no_run_is_refused_before_anything_starts(compare, tmp_path):
    other = tmp_path / "arms" / "r3-seed0"
    other.mkdir(parents=True)
    (other / "notes.txt").write_text("mine")
    status, _, err = compare()
    assert status == 2
    assert "r3-seed0 is not empty" in err
    assert not (tmp_path / "arms" / "off-seed0-console.txt").exists()


def test_runs_end_with_the_command_that_started_them(tmp_path):
    """The command is killed with SIGKILL, so it cannot end them itself."""
    alive = tmp_path / "alive"
    os.mkfifo(alive)
    run = (
        "from onepolicy.cli.arm_process import end_with_stdin\n"
        "end_with_stdin()\n"
        f"pipe = open({str(alive)!r}, 'w'); pipe.write('x'); pipe.flush()\n"
        "import time; time.sleep(600)"
    )
    command = (
        "import sys; from pathlib import Path\n"
        "from onepolicy.launch.arms import Arm, play_arms\n"
        f"Arm.command = lambda arm, recipe: [sys.executable, '-c', {run!r}]\n"
        f"play_arms(Path('r'), [Arm('a', 0, (), 1, Path({str(tmp_path / 'a')!r}))], 1)"
    )
    process = subprocess.Popen([sys.executable, "-c", command])
    with alive.open() as pipe:
        assert pipe.read(1) == "x"
        process.kill()
        assert pipe.read() == ""  # the run, which alone writes to the pipe, has ended
    process.wait()
    assert "the command that started this run has ended" in (tmp_path / "a-console.txt").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--arm", "off", "replay.mode=of", "--arm", "b"), "arm off: "),
        (("--arm", "replay.mode=off", "--arm", "b"), "'replay.mode=off' is no name"),
        (("--arm", "a", "--arm", "a"), "give two arms or more, each with a name of its own"),
        (("--arm", "a"), "give two arms or more"),
        (("--arm", "[b]", "--arm", "b"), "'[b]' is no name"),
        (("--arm", "a", "--arm", "b"), "a and b have the same settings"),
        (("--arm", "a", "seed=3", "--arm", "b"), "arm a: seed=3; arms have the same seeds"),
        (("--arm", "a", "model.path=/none", "--arm", "b"), "arm a: model.path: no folder /none"),
        (("--seeds", "1", "1"), "name each seed once"),
        (("seed=1", "--seeds", "2"), "seed=1: contradicts --seeds"),
        (("out=elsewhere",), "out=elsewhere: every run has a folder of its own; give --out"),
        (("correction.preset=tis",), "has no effect, because every arm sets this itself"),
        (("--jobs", "0"), "--jobs: 0"),
        (("rollout.engine.kind=vllm-server", "--jobs", "2"), "holds the weights of one run"),
    ],
)
def test_bad_arguments(compare, tmp_path, words, message):
    status, _, err = compare(*words)
    assert status == 2
    assert message in err
    assert not (tmp_path / "arms").exists()


def test_a_folder_of_other_settings_is_refused(compare, recipe, tmp_path):
    """Runs that are finished are only read; their folder is no setting, so it may be moved."""
    for name, *settings in DEFAULT_ARMS:
        folder = tmp_path / "arms" / f"{name}-seed0"
        folder.mkdir(parents=True)
        config = load(recipe, ["steps=2", *settings, f"out={folder}"])
        (folder / "config.json").write_text(config.model_dump_json())
        rows = [{"step": step, "train/reward": 0.5} for step in (1, 2)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "summary.json").write_text("{}")
    status, _, err = compare("optim.lr=1e-5")
    assert status == 2
    assert "holds a run with other settings than arm off now has (optim)" in err
    shutil.move(tmp_path / "arms", tmp_path / "moved")
    status, out, _ = compare("--out", str(tmp_path / "moved"))
    assert status == 0
    assert "No step has a k3 in both off and r3." in out
    assert "0.50 in off, 0.50 in r3" in out


@pytest.mark.parametrize("words", [("--seeds", "-1"), ("--seeds", "0", "recipe.toml")])
def test_words_that_are_no_seeds(compare, capsys, words):
    with pytest.raises(SystemExit):
        compare(*words)
    assert "is no seed" in capsys.readouterr().err


def test_a_recipe_behind_the_arms(capsys):
    assert main(["compare", "--arm", "a", "steps=2", "--arm", "b", "recipe.toml"]) == 2
    assert "compare: give the recipe first" in capsys.readouterr().err


def test_steps_and_jobs_are_those_of_the_arms(recipe):
    named = {"a": ["steps=2"], "b": ["train.threads=2"]}
    arms = plan_arms(str(recipe), [], named, [3, 4])
    assert [(arm.name, arm.config.seed, arm.config.steps) for arm in arms] == [
        ("a", 3, 2),
        ("b", 3, 4),
        ("a", 4, 2),
        ("b", 4, 4),
    ]


def test_default_number_of_jobs(recipe, monkeypatch):
    monkeypatch.setattr("onepolicy.cli.plan_arms._cores", lambda: 8)

    def jobs(*words):
        return plan_jobs([load(recipe, [*words])], None)

    assert jobs("train.device=cpu") == 8
    assert jobs("train.device=cpu", "train.threads=2") == 4
    assert jobs("train.device=cpu", "train.ranks=3") == 2
    assert jobs("train.device=cpu", "rollout.engine.kind=vllm") == 1
    assert jobs("train.device=cpu", "rollout.engine.kind=vllm-server") == 1
    assert jobs("train.device=cpu", "train.threads=64") == 1
    monkeypatch.setattr("onepolicy.cli.plan_arms.os.path.exists", lambda path: True)
    assert jobs("train.device=auto") == 1
