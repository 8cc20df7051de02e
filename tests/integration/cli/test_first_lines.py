"""Commands print their first lines, and refuse bad input, before they load torch and
transformers."""

import errno
import json
import os
import subprocess
import sys

import pytest

from onepolicy.config import TrainingError, resolve
from onepolicy.config.input_files import check_task_files
from support.paths import ROOT

QUICKSTART = str(ROOT / "recipes" / "quickstart.toml")
GOOD = '{"prompt": "1+1", "answer": "2"}\n'


def run(words, folder, after):
    """Run the command in a process of its own in `folder`, where a policy's place in the cache is a
    folder."""
    code = f"""
import sys
from onepolicy.config.policy import PolicyConfig, cached_policy_path
cached_policy_path(PolicyConfig()).mkdir(parents=True, exist_ok=True)
from onepolicy.cli import main
{after}
"""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
    )


JSONL = ["task.kind=jsonl", "task.path=data.jsonl"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", QUICKSTART, "optim.lrr=1"], "did you mean optim.lr?"),
        (["train", QUICKSTART, "--lr", "1e-4"], "write optim.lr=1e-4"),
        (["train", "nowhere.toml"], "nowhere.toml: no such recipe"),
        (["train", QUICKSTART, "model.path=./nowhere"], "model.path: no folder ./nowhere"),
        (["train", QUICKSTART, "model.path=."], "model.path: . has no config.json"),
        (
            ["train", QUICKSTART, "task.kind=jsonl", "task.path=nowhere"],
            "task.path: nowhere is not a file",
        ),
        (["train", QUICKSTART, *JSONL, "task.held_out=1"], "data.jsonl:2: not JSON"),
        (["train", "--resume", "nowhere"], "nowhere: not a run folder"),
        (
            ["train", "--from", "nowhere/3", "out=new"],
            "nowhere/3: no such checkpoint; give a run folder (it has config.json",
        ),
        (["train", "--from", "run", "out=new", "optim.lrr=1"], "did you mean optim.lr?"),
        (["train", "--from", "run/3", "out=new", "steps=many"], "steps: "),
        (["train", "--from", "run/checkpoints/step_00003", "out=new", "steps=0"], "steps: "),
        (["eval", QUICKSTART, "eval.kk=1"], "did you mean eval.k?"),
        (["eval", QUICKSTART, *JSONL], "task.held_out: 64 lines are held out, but data.jsonl has"),
        (
            ["eval", "runs/nope"],
            "runs/nope: no such run or checkpoint, and no recipe; give a run folder (it has config",
        ),
        (["eval", "run/3"], "run/3: eval takes a run folder; for its checkpoint give run --step 3"),
        (["eval", "run/checkpoints/step_00003"], "for its checkpoint give run --step 3"),
        (["eval", "model"], "model: a model, not a run; give a recipe and model.path=model"),
        (["measure", "--tiny", "optim.lrr=1"], "did you mean optim.lr?"),
        (["measure", "./nowhere"], "model.path: no folder ./nowhere"),
        (["measure", "--tiny", "--prompts", "empty.txt"], "--prompts: empty.txt is empty"),
        (
            ["measure", "--recipe", QUICKSTART, *JSONL],
            "task.held_out: 64 lines are held out, but data.jsonl has",
        ),
        (["make-policy", "stepss=3"], "did you mean steps?"),
        (["make-policy", *JSONL, "task.held_out=1"], "data.jsonl:2: not JSON"),
        (["audit", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
    ],
    ids=lambda x: " ".join(x).replace(QUICKSTART, "R") if isinstance(x, list) else None,
)
def test_mistakes_are_reported_before_torch_loads(tmp_path, words, said):
    (tmp_path / "data.jsonl").write_text(GOOD + "{\n" + GOOD)
    if "64 lines" in said:
        (tmp_path / "data.jsonl").write_text(GOOD * 3)
    (tmp_path / "empty.txt").write_text("\n")
    _make_run(tmp_path / "run")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    after = """
try: status = main()
except SystemExit as end: status = end.code
loaded = {"torch", "transformers"} & set(sys.modules)
assert not loaded, loaded
sys.exit(status)
"""
    done = run(words, tmp_path, after)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def _make_run(path):
    (path / "checkpoints" / "step_00003").mkdir(parents=True)
    config = resolve(
        {"out": "run", "steps": 3, "model": {"path": "tiny"}, "task": {"kind": "chain"}}
    )
    (path / "config.json").write_text(config.model_dump_json())
    (path / "run.json").write_text("{}")


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (["train", QUICKSTART], f"reading {QUICKSTART}"),
        (["train", "--resume", "run"], "reading run"),
        (["train", "--from", "run", "out=new"], "reading run"),
        (["eval", "run"], "reading run"),
        (["measure", "--tiny"], "reading the settings"),
        (["measure", "--recipe", QUICKSTART], f"reading {QUICKSTART}"),
        (["make-policy"], "reading the settings of the policy"),
        (["audit", "dump.jsonl"], "reading dump.jsonl"),
        (["export", "run", "--out", "new"], "reading run"),
    ],
    ids=lambda x: " ".join(x).replace(QUICKSTART, "R") if isinstance(x, list) else None,
)
def test_a_command_prints_before_it_loads_torch(tmp_path, words, first):
    """Without an importable torch, the first lines are all that is printed."""
    _make_run(tmp_path / "run")
    (tmp_path / "dump.jsonl").write_text("{}\n")
    block = "sys.modules['torch'] = sys.modules['transformers'] = None\nmain()"
    done = run(words, tmp_path, block)
    lines = done.stderr.splitlines()
    assert "ModuleNotFoundError" in lines[-1]
    assert lines[0] == f"onepolicy: {first}"
    assert lines[1].startswith("onepolicy: loading torch")


def test_too_many_held_out_problems_and_a_missing_corpus(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": f"q{i}", "answer": "a"}) + "\n" for i in range(5))
    )
    tree = {"out": "x", "steps": 1, "model": {"path": "tiny"}}
    task = {"kind": "jsonl", "path": str(data), "held_out": 2}
    check_task_files(resolve(tree | {"task": task}).task, 2)
    with pytest.raises(
        ValueError, match=r"eval\.problems: 3 are asked for, but 2 lines of .* \(task\.held_out\)"
    ):
        check_task_files(resolve(tree | {"task": task}).task, 3)
    tools = [{"kind": "search", "corpus": str(tmp_path / "none.jsonl")}]
    react = {"kind": "react", "problems": task, "tools": tools}
    with pytest.raises(ValueError, match=r"eval\.problems: 3 .* \(task\.problems\.held_out\)"):
        check_task_files(resolve(tree | {"task": react}).task, 3)
    with pytest.raises(
        ValueError, match=r"task\.tools: search cannot read its corpus .*none\.jsonl: no such file"
    ):
        check_task_files(resolve(tree | {"task": react}).task)


@pytest.mark.parametrize("parent", [None, {"run": "runs/a", "step": 7}])
def test_a_full_disk_before_the_first_checkpoint_is_reported(tmp_path, parent, monkeypatch):
    from onepolicy.run import run_folder

    (tmp_path / "run.json").write_text("{}")
    monkeypatch.setattr(run_folder, "read_parent", lambda run: parent)

    def fill():
        with run_folder.convert_write_errors(tmp_path):
            raise OSError(errno.ENOSPC, "No space left on device")

    start = "step 0" if parent is None else "step 7 of runs/a"
    with pytest.raises(
        TrainingError,
        match=rf"--resume .*`, which starts again from {start}: no checkpoint exists yet",
    ):
        fill()
    monkeypatch.setattr(run_folder.checkpoint, "complete_checkpoints", lambda run: [tmp_path])
    with pytest.raises(TrainingError, match=r"--resume \S+`$"):
        fill()


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch, tmp_path):
    from httpx2 import ConnectError

    from onepolicy.config import ModelConfig, UsageError
    from onepolicy.models import hub, load

    asked = []

    def refuse(url, **_):
        asked.append(url)
        raise ConnectError("[Errno -2] Name or service not known")

    monkeypatch.setattr(hub, "get_hf_file_metadata", refuse)
    monkeypatch.setattr(hub, "is_offline_mode", lambda: False)
    with pytest.raises(
        UsageError, match=r"no folder no/such, and https?://\S+ cannot be reached .*Name or service"
    ):
        load.read_config(ModelConfig(path="no/such"))
    assert len(asked) == 1
