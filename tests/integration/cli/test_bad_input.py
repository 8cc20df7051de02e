"""Bad input: one clear message, exit status 2, nothing overwritten, and before weights are loaded
where it matters. What is refused before torch is loaded is in test_first_lines.py."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from onepolicy.cli import main
from onepolicy.config import UsageError
from onepolicy.rollout import copies
from onepolicy.tiny.model import make_tokenizer
from onepolicy.train import optim
from support.models import make


@pytest.fixture
def fails(recipe, tmp_path, capsys):
    """Return fails("a.b=c", ...), which runs train, asserts exit status 2 and one message, and
    returns the message. No run folder is left."""

    def run(*overrides, out=None, arguments=None):
        folder = out or tmp_path / "out"
        capsys.readouterr()  # of what the test made before
        code = main(arguments or ["train", str(recipe), f"out={folder}", *overrides])
        message = capsys.readouterr().err
        assert code == 2
        assert message.startswith("onepolicy: ")
        assert "Traceback" not in message
        assert out or not folder.exists()
        return message

    return run


@pytest.fixture
def no_weights(monkeypatch):
    """Fail the test if it loads weights."""
    monkeypatch.setattr(
        copies, "load_model", lambda *a, **k: pytest.fail("weights were loaded before the check")
    )


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    """Make a finished run of 2 steps."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert main(["train", str(recipe), f"out={out}", "steps=2", "eval.every=0"]) == 0
    return out


@pytest.fixture
def run(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


SETTINGS = [
    ("correction.preset=off correction.cap=2", ["correction", "cap"]),
    ("rollout.engine.max_len=4096", ["max_len: 4096 is more than the model's context of 128"]),
    *((f"train.device={name}", [f"train.device: '{name}'"]) for name in ("meta", "cuda:99", "no")),
]


def test_settings(fails, no_weights, subtests):
    for settings, words in SETTINGS:
        with subtests.test(settings):
            message = fails(*settings.split())
            assert [word for word in words if word not in message] == [], message


GOOD = '{"prompt": "1+2=", "answer": "3"}\n'
LONG = [json.dumps({"prompt": "1+" * n + "1=", "answer": "3"}) for n in (1, 2, 3, 200)]
DATA = [
    (GOOD + '{"prompt": "1+1=", "answer": "2"', ["PATH:2", "JSON"]),
    (GOOD + '{"prompt": "1+1="}', ["PATH:2", "answer"]),
    (GOOD + '{"prompt": 5, "answer": "2"}', ["PATH:2", "prompt", "5"]),
    (GOOD + '{"prompt": "1\\ud800", "answer": "3"}\n', ["PATH:2: field 'prompt'"]),
    ("", ["PATH"]),
    ("\n".join(LONG), ["402", "128"]),  # longer than the context
]


def test_data(fails, no_weights, tmp_path, subtests):
    path = tmp_path / "data.jsonl"
    for number, (text, words) in enumerate(DATA):
        path.write_text(text)
        with subtests.test(number):
            settings = ["task.kind=jsonl", f"task.path={path}", "task.held_out=1"]
            message = fails(*settings, "eval.problems=1")
            words = [word.replace("PATH", str(path)) for word in words]
            assert [word for word in words if word not in message] == [], message


REFUSED = [
    ("train --from TMP", "out="),
    ("train --resume TMP optim.lr=1", "only steps=N"),
    ("train --resume TMP steps=0", "only steps=N"),
    ("train", "give a recipe"),
    ("train TMP out=TMP/out", "TMP: a folder, not a recipe"),
    ("make-policy --out POLICY", "already exists"),
    ("export POLICY --out POLICY/config.json/new", "config.json is a file, not a folder"),
    ("plan TMP/pipe.toml --cluster 1xcpu --json TMP/pipe", "a pipe, which the file would replace"),
    ("plan TMP/pipe.toml --cluster 1xcpu --json TMP/link", "pipe, which the file would replace"),
    ("make-policy head_dym=3", "head_dym: unknown setting (value 3); did you mean head_dim?"),
    ("make-policy top_k=8 experts=4", "top_k: 8 is more than experts=4"),
]


def test_commands(fails, recipe, policy, tmp_path, subtests):
    os.mkfifo(tmp_path / "pipe")
    shutil.copy(recipe, tmp_path / "pipe.toml")
    (tmp_path / "link").symlink_to(tmp_path / "pipe.toml")  # as /dev/stdout may lead to a file
    for words, expected in REFUSED:
        filled = words.replace("TMP", str(tmp_path)).replace("POLICY", str(policy))
        with subtests.test(words):
            assert expected.replace("TMP", str(tmp_path)) in fails(arguments=filled.split())


def test_a_policy_too_short_for_its_warm_up(fails, tmp_path):
    short = fails(arguments=["make-policy", "--out", str(tmp_path / "short"), "max_len=128"])
    short = short.splitlines()[-1]
    words = "max_len: 128, half of it for the response: problem 0: the right response"
    assert short.startswith(f"onepolicy: {words}")
    assert "rollout." not in short
    assert short.rstrip().endswith("raise it")


def test_tiny_policy_not_made_yet(fails, no_weights, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert "onepolicy make-policy" in fails("model.path=tiny")


def test_dense_model_with_replay(fails, no_weights, tmp_path):
    make("qwen3_dense").save_pretrained(tmp_path / "dense")
    make_tokenizer("0123456789+-*=;#").save_pretrained(tmp_path / "dense")
    message = fails(f"model.path={tmp_path / 'dense'}", "replay.mode=r3")
    assert "qwen3" in message
    assert "replay.mode=off" in message


def test_output_folder_not_empty(fails, no_weights, tmp_path):
    out = tmp_path / "full"
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    message = fails(out=out)
    assert str(out) in message
    assert "--resume" in message
    assert [p.name for p in out.iterdir()] == ["precious.txt"]


def test_half_written_checkpoint(fails, run, tmp_path):
    weights = run / "checkpoints" / "step_00002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    before = (run / "metrics.jsonl").read_text()
    message = fails(out=run, arguments=["train", "--resume", str(run), "steps=4"])
    assert "model.safetensors: half written" in message
    assert (run / "metrics.jsonl").read_text() == before
    fork = ["train", "--from", f"{run}/2", f"out={tmp_path / 'fork'}", "steps=4"]
    assert "half written" in fails(arguments=fork)


def test_weights_of_a_checkpoint_cannot_be_overridden(fails, whole, tmp_path):
    fork = ["train", "--from", str(whole), f"out={tmp_path / 'out'}", "steps=2"]
    for command in (fork, ["eval", str(whole)]):
        message = fails(arguments=[*command, "model.path=elsewhere"])
        assert "model.path=elsewhere: has no effect" in message


@pytest.mark.few(1)
@pytest.mark.parametrize("existed", [False, True])
def test_a_fork_that_is_refused_leaves_its_folder_as_it_was(
    fails, whole, tmp_path, monkeypatch, existed
):
    """Here the engine's check refuses it, which runs after the run folder was made."""

    async def refuse(*_, **__):
        raise UsageError("the engine holds other weights")

    monkeypatch.setattr("onepolicy.run.loop.require_correct_logprobs", refuse)
    out = tmp_path / "fork"
    if existed:
        out.mkdir()
    fork = ["train", "--from", f"{whole}/2", f"out={out}", "steps=4"]
    assert "the engine holds other weights" in fails(arguments=fork, out=out)
    assert [path.name for path in tmp_path.iterdir()] == ["fork"] * existed
    assert list(tmp_path.glob("fork/*")) == []


def test_damaged_run_files(fails, run, subtests):
    for name, text, words in [
        ("run.json", "{}", "lacks parent; copy it from a run of the same kind, or start anew"),
        ("config.json", "", "is damaged and no JSON"),
        ("samples.jsonl", '{"prompt": "x"}\n', "lacks step"),
    ]:
        before = (run / name).read_text()
        (run / name).write_text(text)
        with subtests.test(name):
            message = fails(arguments=["train", "--resume", str(run), "steps=3"], out=run)
            assert f"{name}:" in message
            assert words in message
        (run / name).write_text(before)


def test_weights_that_are_missing_cut_off_or_of_another_shape(fails, policy, tmp_path):
    broken = shutil.copytree(policy, tmp_path / "broken")
    path = broken / "model.safetensors"
    weights = load_file(path)
    weights.pop("lm_head.weight")
    save_file(weights, path, metadata={"format": "pt"})
    assert "lacks weights, first lm_head.weight" in fails(f"model.path={broken}")
    data = (policy / path.name).read_bytes()
    for size in (1000, len(data) - 100):
        path.write_bytes(data[:size])
        assert f"model.path: cannot read the weights of '{broken}'" in fails(f"model.path={broken}")
    path.write_bytes(data)
    edit_json(broken / "config.json", vocab_size=64)
    message = fails(f"model.path={broken}")
    assert "lm_head.weight" in message
    assert "has shape [32, 64], but its config.json makes it [64, 64]" in message


def test_config_and_tokenizer(fails, no_weights, policy, tmp_path):
    broken = shutil.copytree(policy, tmp_path / "broken")
    edit_json(broken / "config.json", hidden_size="wide")
    assert f"model.path: cannot read the config of '{broken}'" in fails(f"model.path={broken}")
    shutil.copy(policy / "config.json", broken)
    (broken / "tokenizer.json").write_text("{}")
    assert f"model.path: cannot read the tokenizer of '{broken}'" in fails(f"model.path={broken}")
    for path in broken.glob("tokenizer*"):
        path.unlink()
    assert f"model.path: {broken} has no tokenizer files" in fails(f"model.path={broken}")
    for largest in (96, 32):  # 0 to 2 are special tokens; 31 would do
        make_tokenizer("".join(map(chr, range(33, 31 + largest)))).save_pretrained(broken)
        message = fails(f"model.path={broken}")
        assert f"has token ids up to {largest}, but the model's vocab_size is 32" in message


def test_a_run_that_cannot_continue_exits_with_1(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(optim, "_norm", lambda *a, **k: torch.tensor(torch.nan))
    assert main(["train", str(recipe), f"out={tmp_path / 'out'}", "steps=1"]) == 1
    message = "onepolicy: gradient norm is nan in step 1; this update was not made"
    assert message in capsys.readouterr().err
