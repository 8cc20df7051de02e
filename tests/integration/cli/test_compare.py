"""`onepolicy compare`: arms are trained, resumed, judged, and refused with a clear message."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from onepolicy.cli import main
from onepolicy.cli.compare import DEFAULT_ARMS, replay_labels
from onepolicy.config import load
from onepolicy.launch.arms import Arm, lock_arms
from onepolicy.launch.plan_arms import plan_arms, plan_jobs
from onepolicy.run.log import read_metrics
from support.adapter_faults import POLICY
from support.small_recipe import write_recipe

SAME_COMMAND = "onepolicy: the same command goes on after the last checkpoints of the runs\n"


@pytest.fixture
def recipe(tmp_path_factory):
    """Write a recipe on a policy of the tree, so that none is made for what trains nothing."""
    own = ("steps = 4", "train = { threads = 1 }", "eval = { every = 2, problems = 4, k = 2 }")
    log = "log = { tensorboard = false, report = false }"
    return write_recipe(POLICY, *own, log, folder=tmp_path_factory.mktemp("recipe"))


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


@pytest.mark.full
@pytest.mark.process
def test_two_arms_a_second_call_and_arms_that_were_stopped(compare, tmp_path):
    """Stopped: one was killed after its last checkpoint, the other before its first."""
    status, out, err = compare()
    assert status == 0
    assert "ean k3 is " in out
    assert " without replay and " in out
    assert "Each arm ran with one seed" in out
    assert "off, seed 0: begun; its output: " in err
    assert "off, seed 0: 2 of 2 steps" in err
    folder = tmp_path / "arms"
    assert (folder / "comparison.html").exists()
    tree = json.loads((folder / "comparison.json").read_text())
    assert [tree["contrasts"][0][name] for name in ("first", "other")] == ["off", "r3"]
    runs = [folder / "off-seed0", folder / "r3-seed0"]
    modes = [json.loads((run / "config.json").read_text())["replay"]["mode"] for run in runs]
    assert modes == ["off", "r3"]
    written = [(run / "metrics.jsonl").stat().st_mtime_ns for run in runs]
    status, _, err = compare()
    assert status == 0
    assert "all 2 runs in " in err
    assert written == [(run / "metrics.jsonl").stat().st_mtime_ns for run in runs]

    before = [read_metrics(run) for run in runs]
    for run in runs:
        (run / "summary.json").unlink()
    shutil.rmtree(runs[1] / "checkpoints")
    status, _, err = compare()
    assert (status, "2 runs of 2 steps, 0 of them finished, 1 at a time" in err) == (0, True), err
    assert read_metrics(runs[0]) == before[0]
    rewards = [
        [row["train/reward"] for row in rows[1:]] for rows in (before[1], read_metrics(runs[1]))
    ]
    assert rewards[0] == rewards[1]
    console = (folder / "r3-seed0-console.txt").read_text()
    assert "it has no checkpoint, so it starts again at step 0" in console


@pytest.mark.process
def test_a_failing_arm_is_named_with_its_last_lines_and_gives_its_exit_status(compare, monkeypatch):
    for ended, expected, words in [
        (3, 1, "ended by exit status 3; the same command goes on"),
        (2, 2, ""),
        (75, 75, ""),
    ]:
        command = ["sh", "-c", f"echo lost it; exit {ended}"]
        monkeypatch.setattr(Arm, "command", lambda arm, recipe, command=command: command)
        status, _, err = compare()
        assert status == expected
        assert f"arm off, seed 0: {words}" in err
        assert "lost it" in err


@pytest.mark.parametrize(
    ("steps", "drawn"),
    [
        ({"off-seed0": 3, "r3-seed0": 2}, True),
        ({"off-seed0": 3}, False),
        ({"off-seed0": 3, "r3-seed0": 3, "off-seed1": 1}, True),
    ],
)
def test_ctrl_c_draws_the_steps_that_arms_have_in_common(
    compare, tmp_path, monkeypatch, steps, drawn
):
    def play(recipe, arms, *more):
        for name, count in steps.items():
            folder = tmp_path / "arms" / name
            folder.mkdir()
            rows = [{"step": step + 1, "train/reward": 0.5} for step in range(count)]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        raise KeyboardInterrupt

    monkeypatch.setattr("onepolicy.cli.compare.play_arms", play)
    monkeypatch.setattr("signal.signal", lambda *a: None)
    status, out, err = compare("--seeds", "0", "1")
    assert status == 130
    picture = tmp_path / "arms" / "comparison.html"
    assert picture.exists() == drawn
    assert (f"picture: {picture}" in out) == drawn
    assert ("off has 3 steps, r3 2" in out) == (steps.get("r3-seed0") == 2)
    assert "off, 1" not in out  # without another arm of its seed
    *_, stopped = err.splitlines()
    assert SAME_COMMAND in err
    assert stopped == "onepolicy: stopped by Ctrl-C"


def test_a_stopped_compare_says_first_how_to_go_on(compare, tmp_path, monkeypatch):
    """The page takes a while, and a second Ctrl-C ends the command at once."""

    drawn = []

    def stopped(*args, **how):
        drawn.append(args)
        raise KeyboardInterrupt

    def play(recipe, arms, *more):
        for name in ("off-seed0", "r3-seed0"):
            (tmp_path / "arms" / name).mkdir()
            row = json.dumps({"step": 1, "train/reward": 0.5})
            (tmp_path / "arms" / name / "metrics.jsonl").write_text(f"{row}\n")
        raise KeyboardInterrupt

    monkeypatch.setattr("onepolicy.cli.compare.play_arms", play)
    monkeypatch.setattr("onepolicy.cli.compare._show", stopped)
    monkeypatch.setattr("signal.signal", lambda *a: None)
    status, _, err = compare("--seeds", "0")
    assert len(drawn) == 1
    assert (status, SAME_COMMAND in err) == (130, True)


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


@pytest.mark.process
def test_runs_end_with_the_command_that_started_them(tmp_path):
    """The command is killed with SIGKILL, so it cannot end them itself."""
    alive = tmp_path / "alive"
    os.mkfifo(alive)
    run = (
        "import runpy, time; from onepolicy import cli\n"
        "def main():\n"
        f"    pipe = open({str(alive)!r}, 'w'); pipe.write('x'); pipe.flush()\n"
        "    time.sleep(600)\n"
        "cli.main = main\n"
        "runpy.run_module('onepolicy.cli.arm_process', run_name='__main__')"
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


REFUSED = [
    ("--arm off replay.mode=of --arm b", "arm off: "),
    ("--arm replay.mode=off --arm b", "'replay.mode=off' is no name"),
    ("--arm a --arm a", "give two arms or more, each with a name of its own"),
    ("--arm a", "give two arms or more"),
    ("--arm [b] --arm b", "'[b]' is no name"),
    ("--arm a --arm b", "a and b have the same settings"),
    ("--arm a seed=3 --arm b", "arm a: seed=3; arms have the same seeds"),
    ("--arm a model.path=/none --arm b", "arm a: model.path: no folder /none"),
    ("--seeds 1 1", "name each seed once"),
    ("seed=1 --seeds 2", "seed=1: contradicts --seeds"),
    ("out=elsewhere", "out=elsewhere: every run has a folder of its own; give --out"),
    ("correction.preset=tis", "has no effect, because every arm sets this itself"),
    ("--jobs 0", "--jobs: 0"),
    ("rollout.engine.kind=vllm-server --jobs 2", "holds the weights of one run"),
    (
        'rollout.engine.kind=vllm-server rollout.engine.url=["http://a:1","http://b:2"] --jobs 2',
        "sample from http://a:1, http://b:2, which holds",
    ),
]


def test_bad_arguments(compare, tmp_path, subtests, capsys):
    for words, message in REFUSED:
        with subtests.test(words):
            status, _, err = compare(*words.split())
            assert status == 2
            assert message in err
            assert not (tmp_path / "arms").exists()
    for words in ("--seeds -1", "--seeds 0 recipe.toml"):
        with subtests.test(words), pytest.raises(SystemExit):
            compare(*words.split())
        said = " ".join(capsys.readouterr().err.split())
        assert "is no seed (0 to 2^63 - 1); give the recipe and settings before --seeds" in said
    assert main(["compare", "--arm", "a", "steps=2", "--arm", "b", "recipe.toml"]) == 2
    assert "compare: give the recipe first" in capsys.readouterr().err


def test_a_folder_of_other_settings_is_refused(compare, recipe, tmp_path):
    """Runs that are finished are only read; their folder is no setting, so it may be moved."""
    for name, *settings in DEFAULT_ARMS:
        folder = tmp_path / "arms" / f"{name}-seed0"
        folder.mkdir(parents=True)
        config = load(recipe, ["steps=2", *settings, f"out={folder}"])
        (folder / "config.json").write_text(config.model_dump_json())
        rows = [{"step": step, "train/reward": 0.5} for step in (1, 2)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "summary.json").write_text(json.dumps({"steps": 2}))
    status, _, err = compare("optim.lr=1e-5")
    assert status == 2
    assert "holds a run with other settings than arm off now has (optim)" in err
    shutil.move(tmp_path / "arms", tmp_path / "moved")
    status, out, err = compare("--out", str(tmp_path / "moved"))
    assert status == 0, err
    assert "No step has a k3 in both arms, off and r3." in out
    assert "0.50 without replay, 0.50 with replay" in out


@pytest.mark.parametrize(
    ("first", "other", "labels"),
    [
        ("replay.mode=off", "replay.mode=r3", ["without replay", "with replay"]),
        ("replay.mode=r3", "replay.mode=off", ["with replay", "without replay"]),
        ("replay.mode=r2", "replay.mode=off", []),  # the rollout's routes are in neither
        ("replay.mode=off", "replay.mode=r3 steps=7", []),  # they differ in something else too
        ("replay.mode=off", "replay.mode=off steps=7", []),
    ],
)
def test_two_arms_that_differ_in_replay_alone_are_called_by_it(recipe, first, other, labels):
    same = ["correction.preset=recompute"]
    pairs = ("a", first), ("b", other)
    configs = {name: load(recipe, [*words.split(), *same]) for name, words in pairs}
    assert list(replay_labels(configs).values()) == labels
    assert replay_labels(configs | {"c": load(recipe, ["steps=9"])}) == {}


@pytest.mark.parametrize("name", ["without_replay", "tis-with-a-name-of-100-characters" + 67 * "x"])
def test_the_table_cuts_nothing_at_80_columns(compare, tmp_path, monkeypatch, name):
    """A long name goes on in the next line; every number stands whole."""
    step = {"train/reward": 0.5, "mismatch/k3": 1.23e-5, "train/grad_norm": 1234.5}
    ends = {"eval/avg@4": 0.25, "eval/greedy": 0.75}
    rows = [ends, *[step | {"step": at} for at in range(1, 401)], ends]
    (tmp_path / "arms").mkdir()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("onepolicy.cli.compare._play", lambda *given: None)
    monkeypatch.setattr("onepolicy.report.contrast.read_metrics", lambda folder: rows)
    status, out, err = compare("--arm", name, "--arm", "b", "correction.preset=tis")
    assert status == 0, err
    table = out[: out.index("run: arm and seed")]
    assert max(map(len, table.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in table
    for word in ("0.50→0.50", "0.25→0.25", "0.75→0.75", "1.23e-5", "0 of 400", "1,234"):
        assert table.count(word) >= 2, word
    head = next(line for line in table.splitlines() if "reward" in line)
    first_column = "".join(line[: head.index("reward")] for line in table.splitlines())
    assert f"{name}," in first_column.replace(" ", "")


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
    monkeypatch.setattr("onepolicy.launch.plan_arms.usable_cores", lambda: 8)

    def jobs(*words):
        return plan_jobs([load(recipe, [*words])], None)

    assert jobs("train.device=cpu") == 8
    assert jobs("train.device=cpu", "train.threads=2") == 4
    assert jobs("train.device=cpu", "train.ranks=3") == 2
    assert jobs("train.device=cpu", "rollout.engine.kind=vllm") == 1
    assert jobs("train.device=cpu", "rollout.engine.kind=vllm-server") == 1
    assert jobs("train.device=cpu", "train.threads=64") == 1
    monkeypatch.setattr("onepolicy.launch.plan_arms.os.path.exists", lambda path: True)
    assert jobs("train.device=auto") == 1
