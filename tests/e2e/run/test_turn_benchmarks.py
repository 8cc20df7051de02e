"""benchmarks/turn_curves.py and turn_mismatch.py from end to end, with a policy that is hardly
warmed up."""

import json
import sys

import pytest
import turn_curves
import turn_mismatch
import turn_task

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("turns")
    size = {"steps": 8, "layers": 2, "experts": 8, "tokens_per_step": 512}
    small = turn_task.policy_config(path).model_copy(update=size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turn_task, "policy_config", lambda _: small)
        turn_task.make_data(path)
        turn_task.make_policy(path)
    return path


def run(patch, script, *arguments):
    patch.setattr(sys, "argv", [script.__name__, *arguments])
    script.main()


def test_runs_are_paired_judged_and_kept(folder, monkeypatch, capsys):
    arguments = ("--out", str(folder), "--seeds", "0", "--turns", "2", "--control")
    run(monkeypatch, turn_curves, *arguments)
    runs = sorted(path.parent for path in folder.glob("*/eval.json"))
    arms = ("off-reordered", "off-tis", "off", "r3")
    assert [path.name for path in runs] == [f"{arm}-turns2-seed0" for arm in arms]
    first = [json.loads((path / "metrics.jsonl").read_text().splitlines()[0]) for path in runs]
    # the arms begin with the same rollouts
    assert len({row["train/response_length"] for row in first}) == 1
    configs = [json.loads((path / "config.json").read_text()) for path in runs]
    assert [config["replay"]["mode"] for config in configs] == ["off", "off", "off", "r3"]
    assert {config["task"]["max_turns"] for config in configs} == {2}

    written = {path: path.stat().st_mtime_ns for path in folder.glob("*seed0/*")}
    capsys.readouterr()
    run(monkeypatch, turn_curves, *arguments, "--figures", str(folder / "figures"))
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert "| off + tis - off |" in capsys.readouterr().out
    figures = {path.name for path in (folder / "figures").iterdir()}
    assert figures == {"turns_reward.json", "turns_k3.json"}


def test_scripted_episodes_have_all_their_turns(folder, monkeypatch, capsys):
    asked = ("--out", str(folder), "--turns", "3", "--episodes", "2", "--short")
    run(monkeypatch, turn_mismatch, *asked)
    shown = capsys.readouterr().out
    assert "2 episodes of 3 turns" in shown
    assert shown.count("\n| 3 |") == 2
