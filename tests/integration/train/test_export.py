"""A checkpoint's model is exported in bfloat16, whole, for whatever loads transformers' layout."""

import json
import resource
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from onepolicy.cli import main
from onepolicy.tiny.model import make_tokenizer
from onepolicy.train import checkpoint
from support.learner_steps import batch_of, learner_of, one_step


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    learner = learner_of("objective.preset=ppo")
    one_step(learner, batch_of())
    path = checkpoint.save(run, learner, make_tokenizer("abc"), step=1, extra={})
    return run, path, learner


def test_matrices_are_rounded_and_vectors_are_not(saved, tmp_path, capsys):
    run, path, learner = saved
    out = tmp_path / "new" / "policy"
    assert main(["export", str(run), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert not (out / "optimizer.safetensors").exists()
    assert not (out / "critic.safetensors").exists()
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    for name, tensor in learner.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor.bfloat16()), name
    exact = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
    norms = [name for name in exact if name.endswith("norm.weight")]
    assert norms
    assert all(torch.equal(exact[name], learner.model.state_dict()[name]) for name in norms)
    assert len(AutoTokenizer.from_pretrained(out)) == len(AutoTokenizer.from_pretrained(path))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    whole = (path / "model.safetensors").stat().st_size
    assert index["metadata"]["total_size"] < 0.52 * whole


def test_float32_is_the_checkpoint_itself(saved, tmp_path):
    _, path, learner = saved
    assert main(["export", str(path), "--out", str(tmp_path / "p"), "--dtype", "float32"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "p")
    for name, tensor in learner.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_a_whole_model_has_no_adapter_to_export(saved, tmp_path, capsys):
    assert main(["export", str(saved[1]), "--out", str(tmp_path / "out"), "--adapter"]) == 2
    assert "leave --adapter out" in " ".join(capsys.readouterr().err.split())


def test_a_damaged_checkpoint_is_refused(saved, tmp_path, capsys):
    copied = shutil.copytree(saved[1], tmp_path / "step_00001")
    weights = bytearray((copied / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copied / "model.safetensors").write_bytes(weights)
    assert main(["export", str(copied), "--out", str(tmp_path / "p")]) == 2
    assert "model.safetensors: damaged" in capsys.readouterr().err
    assert not (tmp_path / "p").exists()


INDEX = "model.safetensors.index.json"
STRANGE = [
    (INDEX, b"[1]", "is damaged: TypeError"),
    (INDEX, b"[" * 100_000, "is damaged: RecursionError"),
    (INDEX, b'{"weight_map": {"a": "../x.safetensors"}}', "which is not a file of this folder"),
    (INDEX, b'{"weight_map": {"a": ".."}}', "which is not a file of this folder"),
    ("config.json", b"[1]", "config.json: not a JSON object"),
    ("config.json", b"\xff\xfe", "config.json: not UTF-8"),
]


@pytest.mark.parametrize(("name", "data", "said"), STRANGE)
def test_a_strangers_checkpoint_is_refused(saved, tmp_path, capsys, name, data, said):
    """Its sizes are right, and as an older version wrote it, it has no checksums."""
    copied = shutil.copytree(saved[1], tmp_path / "step_00001")
    (copied / name).write_bytes(data)
    state = json.loads((copied / "state.json").read_text())
    state = {key: value for key, value in state.items() if not key.startswith("sha256")}
    state["files"][name] = len(data)
    (copied / "state.json").write_text(json.dumps(state))
    assert main(["export", str(copied), "--out", str(tmp_path / "p")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    ("folder", "out", "problem"),
    [("missing", "p", "no such checkpoint or run folder"), (".", ".", "already exists")],
)
def test_wrong_folders(folder, out, problem, tmp_path, capsys):
    assert main(["export", str(tmp_path / folder), "--out", str(tmp_path / out)]) == 2
    assert problem in capsys.readouterr().err


def test_a_full_disk_is_an_error_and_leaves_nothing(saved, tmp_path, capsys):
    """Files may not be longer than 20,000 bytes, and the weights are."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        code = main(["export", str(saved[1]), "--out", str(tmp_path / "p")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 1
    assert "Error while serializing" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
