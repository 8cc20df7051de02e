"""Commands print their first lines, and refuse bad input, before they load torch and
transformers."""

import errno

import pytest

from onepolicy.config import TrainingError, resolve
from onepolicy.config.input_files import check_task_files
from support.cli_commands import run_commands
from support.paths import ROOT

QUICKSTART = str(ROOT / "recipes" / "quickstart.toml")
GOOD = '{"prompt": "1+1", "answer": "2"}\n'
POLICY_IS_THERE = """
from onepolicy.config.policy import PolicyConfig, cached_policy_path
cached_policy_path(PolicyConfig()).mkdir(parents=True, exist_ok=True)
"""
NO_TORCH = f"{POLICY_IS_THERE}\nsys.modules['torch'] = sys.modules['transformers'] = None"
BAD = "task.kind=jsonl task.path=bad.jsonl task.held_out=1"
SHORT = "task.kind=jsonl task.path=short.jsonl"
HELD_OUT = "task.held_out: 64 lines are held out, but short.jsonl has"
MISTAKES = [
    ("train R optim.lrr=1", "optim.lrr: unknown setting (value 1); did you mean optim.lr?"),
    ("train R --lr 1e-4", "write optim.lr=1e-4"),
    ("train nowhere.toml", "nowhere.toml: no such recipe"),
    ("train R model.path=./nowhere", "model.path: no folder ./nowhere"),
    ("train R model.path=.", "model.path: . has no config.json"),
    ("train R task.kind=jsonl task.path=nowhere", "task.path: nowhere is not a file"),
    (f"train R {BAD}", "bad.jsonl:2: not JSON"),
    ("train --resume nowhere", "nowhere: not a run folder"),
    ("train --from nowhere/3 out=new", "nowhere/3: no such checkpoint; give a run folder (it has"),
    ("train --from run out=new optim.lrr=1", "did you mean optim.lr?"),
    ("train --from run/3 out=new steps=many", "steps: "),
    ("train --from run/checkpoints/step_00003 out=new steps=0", "steps: "),
    ("train R out=model", "model is not empty; choose another folder, or continue it with `onepol"),
    ("eval R eval.kk=1", "did you mean eval.k?"),
    (f"eval R {SHORT}", HELD_OUT),
    ("eval runs/nope", "runs/nope: no such run or checkpoint, and no recipe; give a run folder"),
    ("eval run/3", "run/3: eval takes a run folder; for its checkpoint give run --step 3"),
    ("eval run/checkpoints/step_00003", "for its checkpoint give run --step 3"),
    ("eval model", "model: a model, not a run; give a recipe and model.path=model"),
    ("measure --tiny optim.lrr=1", "did you mean optim.lr?"),
    ("measure ./nowhere", "model.path: no folder ./nowhere"),
    ("measure --tiny --prompts empty.txt", "--prompts: empty.txt is empty"),
    (f"measure --recipe R {SHORT}", HELD_OUT),
    ("make-policy stepss=3", "did you mean steps?"),
    (f"make-policy {BAD}", "bad.jsonl:2: not JSON"),
    ("audit nowhere.jsonl", "nowhere.jsonl: no such file"),
]
FIRST_LINES = [
    ("train R", f"reading {QUICKSTART}"),
    ("train --resume run", "reading run"),
    ("train --from run out=new", "reading run"),
    ("eval run", "reading run"),
    ("measure --tiny", "reading the settings"),
    ("measure --recipe R", f"reading {QUICKSTART}"),
    ("make-policy", "reading the settings of the policy"),
    ("audit dump.jsonl", "reading dump.jsonl"),
    ("export run --out new", "reading run"),
]


def run_all(rows, folder, before):
    """Run the commands in a folder with a run, a model and data. R is the quickstart's recipe."""
    (folder / "run" / "checkpoints" / "step_00003").mkdir(parents=True)
    tree = {"out": "run", "steps": 3, "model": {"path": "tiny"}, "task": {"kind": "chain"}}
    (folder / "run" / "config.json").write_text(resolve(tree).model_dump_json())
    (folder / "run" / "run.json").write_text("{}")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "bad.jsonl").write_text(GOOD + "{\n" + GOOD)
    (folder / "short.jsonl").write_text(GOOD * 3)
    (folder / "empty.txt").write_text("\n")
    (folder / "dump.jsonl").write_text("{}\n")
    commands = [words.replace(" R", f" {QUICKSTART}").split() for words, _ in rows]
    return zip(rows, run_commands(commands, folder, before=before), strict=True)


@pytest.mark.process
def test_mistakes_are_reported_before_torch_loads(tmp_path, subtests):
    for (words, message), found in run_all(MISTAKES, tmp_path, POLICY_IS_THERE):
        with subtests.test(words):
            assert (found.status, found.loaded) == (2, []), found
            assert message in found.err


@pytest.mark.process
def test_a_command_prints_before_it_loads_torch(tmp_path, subtests):
    """Without an importable torch, the first lines are all that is printed."""
    for (words, first), found in run_all(FIRST_LINES, tmp_path, NO_TORCH):
        with subtests.test(words):
            assert found.status == "ModuleNotFoundError"
            lines = found.err.splitlines()
            assert lines[0] == f"onepolicy: {first}"
            assert lines[1].startswith("onepolicy: loading torch")


def test_too_many_held_out_problems_and_a_missing_corpus(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(GOOD.replace("1+1", f"1+{i}") for i in range(5)))
    task = {"kind": "jsonl", "path": str(data), "held_out": 2}
    tools = [{"kind": "search", "corpus": str(tmp_path / "none.jsonl")}]
    react = {"kind": "react", "problems": task, "tools": tools}
    plain, react = (
        resolve({"out": "x", "steps": 1, "model": {"path": "tiny"}, "task": each}).task
        for each in (task, react)
    )
    check_task_files(plain, 2)
    few = r"eval\.problems: 3 are asked for, but 2 lines of .* \(task\.held_out\)"
    for task, problems, words in [
        (plain, (3,), few),
        (react, (3,), r"eval\.problems: 3 .* \(task\.problems\.held_out\)"),
        (react, (), r"task\.tools: search cannot read its corpus .*none\.jsonl: no such file"),
    ]:
        with pytest.raises(ValueError, match=words):
            check_task_files(task, *problems)


@pytest.mark.parametrize(
    ("parent", "start"), [(None, "step 0"), ({"run": "runs/a", "step": 7}, "step 7 of runs/a")]
)
def test_a_full_disk_before_the_first_checkpoint_is_reported(tmp_path, parent, start, monkeypatch):
    from onepolicy.run import run_folder

    (tmp_path / "run.json").write_text("{}")
    monkeypatch.setattr(run_folder, "read_parent", lambda run: parent)

    def fill():
        with run_folder.convert_write_errors(tmp_path):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(TrainingError, match=rf"--resume .*`, which starts again from {start}: no "):
        fill()
    monkeypatch.setattr(run_folder.checkpoint, "complete_checkpoints", lambda run: [tmp_path])
    with pytest.raises(TrainingError, match=r"--resume \S+`$"):
        fill()


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch):
    from httpx2 import ConnectError

    from onepolicy.config import ModelConfig, UsageError
    from onepolicy.models import load

    asked = []

    def refuse(url, **_):
        asked.append(url)
        raise ConnectError("[Errno -2] Name or service not known")

    monkeypatch.setattr(load, "get_hf_file_metadata", refuse)
    monkeypatch.setattr(load, "is_offline_mode", lambda: False)
    words = r"no folder no/such, and https?://\S+ cannot be reached .*Name or service"
    with pytest.raises(UsageError, match=words):
        load.read_config(ModelConfig(path="no/such"))
    (url,) = asked
    assert url.endswith("/no/such/resolve/main/config.json")
