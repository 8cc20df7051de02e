"""Bad input: one clear message, exit status 2, nothing overwritten, and before weights are loaded
where it matters."""

import json
import shutil

import pytest
import torch

from onepolicy.cli import main
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


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_unknown_key(fails, no_weights):
    assert "optim.lrr: unknown setting (value 1); did you mean optim.lr?" in fails("optim.lrr=1")


def test_value_of_the_wrong_variant(fails, no_weights):
    message = fails("correction.preset=off", "correction.cap=2")
    assert "correction" in message
    assert "cap" in message


def test_missing_model_folder(fails, no_weights, tmp_path):
    assert f"model.path: no folder {tmp_path / 'nothing'}" in fails(
        f"model.path={tmp_path / 'nothing'}"
    )
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in fails(f"model.path={tmp_path / 'empty'}")


def test_tiny_policy_not_made_yet(fails, no_weights, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert "onepolicy make-policy" in fails("model.path=tiny")


def test_dense_model_with_replay(fails, no_weights, tmp_path):
    make("qwen3_dense").save_pretrained(tmp_path / "dense")
    make_tokenizer("0123456789+-*=;#").save_pretrained(tmp_path / "dense")
    message = fails(f"model.path={tmp_path / 'dense'}", "replay.mode=r3")
    assert "qwen3" in message
    assert "replay.mode=off" in message


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "1+1=", "answer": "2"', ["2", "JSON"]),
        ('{"prompt": "1+1="}', ["2", "answer"]),
        ('{"prompt": 5, "answer": "2"}', ["2", "prompt", "5"]),
    ],
)
def test_jsonl_with_a_bad_line(fails, no_weights, tmp_path, line, words):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "1+2=", "answer": "3"}\n' + line + "\n")
    message = fails("task.kind=jsonl", f"task.path={path}", "task.held_out=1")
    assert str(path) in message
    for word in words:
        assert word in message


def test_empty_data_set(fails, no_weights, tmp_path):
    (tmp_path / "data.jsonl").write_text("")
    assert "data.jsonl" in fails("task.kind=jsonl", f"task.path={tmp_path / 'data.jsonl'}")
    assert "nothing.jsonl" in fails("task.kind=jsonl", f"task.path={tmp_path / 'nothing.jsonl'}")


def test_prompt_longer_than_the_context(fails, no_weights, tmp_path):
    path = tmp_path / "data.jsonl"
    lines = [{"prompt": "1+" * n + "1=", "answer": "3"} for n in (1, 2, 3, 200)]
    path.write_text("\n".join(map(json.dumps, lines)))
    message = fails("task.kind=jsonl", f"task.path={path}", "task.held_out=2", "eval.problems=2")
    assert "402" in message
    assert "128" in message


def test_max_len_beyond_the_context(fails, no_weights):
    assert "rollout.engine.max_len: 4096 is more than the model's context of 128" in fails(
        "rollout.engine.max_len=4096"
    )


def test_unknown_gym_data_set(fails, no_weights):
    assert "chain_sum" in fails("task.kind=gym", "task.name=chain_sun")


def test_output_folder_not_empty(fails, no_weights, tmp_path):
    out = tmp_path / "full"
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    message = fails(out=out)
    assert str(out) in message
    assert "--resume" in message
    assert [p.name for p in out.iterdir()] == ["precious.txt"]


def test_half_written_checkpoint(fails, train, tmp_path):
    run = train("run", "steps=2", "eval.every=0")
    newest = run / "checkpoints" / "step_00002"
    whole = newest / "model.safetensors"
    whole.write_bytes(whole.read_bytes()[:1000])
    before = (run / "metrics.jsonl").read_text()
    message = fails(out=run, arguments=["train", "--resume", str(run), "steps=4"])
    assert "model.safetensors: half written" in message
    assert (run / "metrics.jsonl").read_text() == before
    fork = ["train", "--from", f"{run}/2", f"out={tmp_path / 'fork'}", "steps=4"]
    assert "half written" in fails(arguments=fork)


def test_resume_and_fork_of_nothing(fails, tmp_path):
    assert "not a run folder" in fails(arguments=["train", "--resume", str(tmp_path / "none")])
    assert "no such checkpoint; give a run folder" in fails(
        arguments=["train", "--from", str(tmp_path / "none"), f"out={tmp_path / 'x'}"]
    )
    assert "out=" in fails(arguments=["train", "--from", str(tmp_path / "none")])
    assert "only steps=N" in fails(arguments=["train", "--resume", str(tmp_path), "optim.lr=1"])
    assert "only steps=N" in fails(arguments=["train", "--resume", str(tmp_path), "steps=0"])
    assert "give a recipe" in fails(arguments=["train"])


def test_weights_of_a_checkpoint_cannot_be_overridden(fails, train, tmp_path):
    run = train("run", "steps=1", "eval.every=0")
    fork = [
        "train",
        "--from",
        str(run),
        f"out={tmp_path / 'out'}",
        "steps=2",
        "model.path=elsewhere",
    ]
    assert "model.path=elsewhere: has no effect" in fails(arguments=fork)
    assert "model.path=elsewhere: has no effect" in fails(
        arguments=["eval", str(run), "model.path=elsewhere"]
    )


def test_damaged_run_files(fails, train):
    run = train("run", "steps=1", "eval.every=0")
    about = (run / "run.json").read_text()
    (run / "run.json").write_text("{}")
    resume = ["train", "--resume", str(run), "steps=2"]
    assert "run.json: lacks parent; copy it from a run of the same kind, or start anew" in fails(
        arguments=resume, out=run
    )
    (run / "run.json").write_text(about)
    (run / "config.json").write_text("")
    assert "config.json: not the settings of a run" in fails(arguments=resume, out=run)


def test_model_without_all_its_weights(fails, policy, tmp_path):
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(policy, broken)
    weights = load_file(broken / "model.safetensors")
    weights.pop("lm_head.weight")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    assert "lacks weights, first lm_head.weight" in fails(f"model.path={broken}")


def test_truncated_weights(fails, policy, tmp_path):
    broken = shutil.copytree(policy, tmp_path / "broken")
    whole = broken / "model.safetensors"
    for size in (1000, whole.stat().st_size - 100):
        whole.write_bytes((policy / "model.safetensors").read_bytes()[:size])
        assert f"model.path: cannot read the weights of '{broken}'" in fails(f"model.path={broken}")


def test_weights_of_another_shape(fails, policy, tmp_path):
    broken = shutil.copytree(policy, tmp_path / "broken")
    edit_json(broken / "config.json", vocab_size=64)
    message = fails(f"model.path={broken}")
    assert "lm_head.weight" in message
    assert "has shape [32, 64], but its config.json makes it [64, 64]" in message


def test_config_of_the_wrong_type(fails, no_weights, policy, tmp_path):
    broken = shutil.copytree(policy, tmp_path / "broken")
    edit_json(broken / "config.json", hidden_size="wide")
    assert f"model.path: cannot read the config of '{broken}'" in fails(f"model.path={broken}")


def test_tokenizer_missing_damaged_or_too_large(fails, no_weights, policy, tmp_path):
    broken = shutil.copytree(policy, tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{}")
    assert f"model.path: cannot read the tokenizer of '{broken}'" in fails(f"model.path={broken}")
    for path in broken.glob("tokenizer*"):
        path.unlink()
    assert f"model.path: {broken} has no tokenizer files" in fails(f"model.path={broken}")
    make_tokenizer("".join(map(chr, range(33, 127)))).save_pretrained(broken)
    message = fails(f"model.path={broken}")
    assert "has token ids up to 96, but the model's vocab_size is 32" in message


@pytest.mark.parametrize("device", ["meta", "mps", "xpu:0", "nonsense", "cuda:99"])
def test_device_that_cannot_be_used(fails, no_weights, device):
    assert f"train.device: '{device}'" in fails(f"train.device={device}")


def test_line_that_cannot_be_written_again(fails, no_weights, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "1+2=", "answer": "3"}\n{"prompt": "1\\ud800", "answer": "3"}\n')
    message = fails("task.kind=jsonl", f"task.path={path}", "task.held_out=1")
    assert f"{path}:2: field 'prompt'" in message


def test_a_scalar_where_a_section_belongs(fails, no_weights):
    assert (
        "replay: 'off' is a value, but this is a section; did you mean replay.mode=off?"
        in fails("replay=off")
    )


def test_recipe_that_is_a_folder(fails, tmp_path):
    assert f"{tmp_path}: a folder, not a recipe" in fails(
        arguments=["train", str(tmp_path), f"out={tmp_path / 'out'}"]
    )


def test_sample_without_its_step(fails, train):
    run = train("run", "steps=1", "eval.every=0")
    (run / "samples.jsonl").write_text('{"prompt": "x"}\n')
    resume = ["train", "--resume", str(run), "steps=2"]
    assert "samples.jsonl:1: no integer `step`" in fails(arguments=resume, out=run)


def test_make_policy_refuses_existing_folders_and_bad_settings(fails, policy):
    assert "already exists" in fails(arguments=["make-policy", "--out", str(policy)])
    assert "head_dym: unknown setting (value 3); did you mean head_dim?" in fails(
        arguments=["make-policy", "head_dym=3"]
    )
    assert "top_k: 8 is more than experts=4" in fails(
        arguments=["make-policy", "top_k=8", "experts=4"]
    )
    short = fails(arguments=["make-policy", "--out", str(policy.parent / "short"), "max_len=128"])
    short = short.splitlines()[-1]
    assert short.startswith(
        "onepolicy: max_len: 128, half of it for the response: problem 0: the right response"
    )
    assert "rollout." not in short
    assert short.rstrip().endswith("raise it")


def test_a_run_that_cannot_continue_exits_with_1(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(optim, "_norm", lambda *a, **k: torch.tensor(torch.nan))
    assert main(["train", str(recipe), f"out={tmp_path / 'out'}", "steps=1"]) == 1
    assert (
        "onepolicy: gradient norm is nan in step 1; this update was not made"
        in capsys.readouterr().err
    )
