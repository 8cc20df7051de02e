"""Checkpoints: bit-exact, in transformers' layout, complete or absent, and checked for damage."""

import errno
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from onepolicy.config import ModelConfig, UsageError
from onepolicy.models.load import load_model
from onepolicy.models.prepare import prepare_for_training
from onepolicy.replay.routers import bind_routers
from onepolicy.tiny.model import make_tokenizer
from onepolicy.train import checkpoint, restore
from onepolicy.train.learner import LocalLearner
from onepolicy.train.scorer import PolicyScorer
from support.learner_steps import batch_of, learner_of, one_step
from support.models import make


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    learner = learner_of()
    one_step(learner, batch_of())
    path = checkpoint.save(run, learner, make_tokenizer("abc"), step=1, extra={"parent": None})
    return run, path, learner


def test_the_step_after_a_restore_is_the_same_to_the_bit(saved):
    _, path, learner = saved
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for (name, a), (_, b) in zip(
        model.state_dict().items(), learner.model.state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name
    prepare_for_training(model, torch.device("cpu"))
    again = LocalLearner(PolicyScorer(model.eval(), learner.config, routers=bind_routers(model)))
    restore.restore_optimizer(path, again)
    assert again.version == learner.version == 1
    _, first, weights = one_step(learner, batch_of())
    _, second, restored = one_step(again, batch_of())
    assert first == second
    assert all(torch.equal(weights[n], restored[n]) for n in weights)


def test_the_index_keeps_engines_from_loading_the_optimizer(saved):
    """vLLM and SGLang load every *.safetensors of a folder that an index does not exclude."""
    _, path, _ = saved
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == {"model.safetensors"}
    assert set(index) == set(load_file(path / "model.safetensors"))
    assert (path / checkpoint.OPTIMIZER).exists()


def test_an_interrupted_save_leaves_the_last_one(saved, tmp_path, monkeypatch):
    run, learner = tmp_path, saved[2]
    path = checkpoint.save(run, learner, make_tokenizer("abc"), step=1, extra={})
    monkeypatch.setattr(
        checkpoint.os, "rename", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(run, learner, make_tokenizer("abc"), step=2, extra={})
    monkeypatch.undo()
    assert checkpoint.latest_checkpoint(run) == path
    assert (
        checkpoint.save(run, learner, make_tokenizer("abc"), step=2, extra={}).name == "step_00002"
    )
    assert [p.name for p in checkpoint.complete_checkpoints(run)] == ["step_00001", "step_00002"]
    checkpoint.prune(run, 1)
    assert [p.name for p in checkpoint.complete_checkpoints(run)] == ["step_00002"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: (p / "state.json").unlink(), "half written"),
        (lambda p: (p / "state.json").write_text('{"step": 1, "fi'), "not valid JSON"),
        (lambda p: (p / "optimizer.safetensors").unlink(), "optimizer.safetensors: half written"),
        (lambda p: (p / "model.safetensors").write_bytes(b"x"), "model.safetensors: half written"),
    ],
)
def test_damage_is_named(saved, tmp_path, damage, words):
    copy = tmp_path / "checkpoints" / "step_00001"
    shutil.copytree(saved[1], copy)
    damage(copy)
    with pytest.raises(UsageError, match=words):
        checkpoint.verify(checkpoint.latest_checkpoint(tmp_path))


def test_every_byte_of_every_file_counts(saved, tmp_path):
    """With one flipped bit anywhere, or one byte less, the file is named. The whole file is
    accepted."""
    copy = shutil.copytree(saved[1], tmp_path / "step_00001")
    names = [*checkpoint.verify(copy)["files"]]
    assert {"model.safetensors", "optimizer.safetensors", "config.json", "tokenizer.json"} <= set(
        names
    )
    for name in names:
        whole = (copy / name).read_bytes()
        for at in {0, len(whole) // 2, len(whole) - 1}:
            (copy / name).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(
                UsageError, match=f"{name}: damaged, .*; delete the folder to fall back"
            ):
                checkpoint.verify(copy)
        (copy / name).write_bytes(whole[:-1])
        with pytest.raises(UsageError, match=f"{name}: half written"):
            checkpoint.verify(copy)
        (copy / name).write_bytes(whole)
    assert checkpoint.verify(copy)["step"] == 1


@pytest.mark.parametrize(
    "name",
    [
        "model-00002-of-00002.safetensors",
        "shards/rank_7.safetensors",
        "pytorch_model.bin",
        "adapter_config.json",
    ],
)
def test_weights_are_read_only_from_files_written_with_the_checkpoint(saved, tmp_path, name):
    copy = shutil.copytree(saved[1], tmp_path / "step_00001")
    (copy / "notes.txt").write_text("nobody reads this")
    checkpoint.verify(copy)
    (copy / name).parent.mkdir(exist_ok=True)
    (copy / name).write_bytes(b"")
    with pytest.raises(UsageError, match=f"{name}: not written with this checkpoint.*move it out"):
        checkpoint.verify(copy)


def test_zeros_beside_sharded_weights_are_not_loaded(saved, tmp_path):
    """transformers loads model.safetensors if there is one, and ignores the index."""
    copy, (_, path, learner) = tmp_path / "step_00001", saved
    shutil.copytree(path, copy, ignore=shutil.ignore_patterns("model*"))
    learner.model.save_pretrained(copy, max_shard_size="20KB")
    policy = ModelConfig(path=str(copy))
    whole = load_model(policy, torch.float32, torch.device("cpu")).state_dict()
    assert all(
        torch.equal(whole[name], value) for name, value in learner.model.state_dict().items()
    )
    zeros = {
        name: torch.zeros_like(value)
        for name, value in load_file(path / "model.safetensors").items()
    }
    save_file(zeros, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UsageError, match=r"has a model.safetensors that its .*index.json does not name"
    ):
        load_model(policy, torch.float32, torch.device("cpu"))


def test_leftovers_of_a_killed_process_are_removed(saved, tmp_path):
    copy = shutil.copytree(saved[1], tmp_path / "checkpoints" / "step_00001")
    for name in (".step_00000.deleting", ".step_00002.writing"):
        shutil.copytree(copy, copy.with_name(name))
    checkpoint.remove_unfinished(tmp_path)
    assert list(copy.parent.iterdir()) == [copy]


def test_a_save_that_fails_gives_the_room_back(saved, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path, saved[2], make_tokenizer("abc"), step=1, extra={})
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_no_run_no_checkpoint(tmp_path):
    with pytest.raises(UsageError, match="no such run folder"):
        checkpoint.latest_checkpoint(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="no complete checkpoint"):
        checkpoint.latest_checkpoint(tmp_path)


def test_wrong_model_is_refused(saved):
    other = make("qwen3_dense")
    learner = LocalLearner(PolicyScorer(other, saved[2].config, routers=None))
    with pytest.raises(UsageError, match="which the model does not have"):
        restore.restore_optimizer(saved[1], learner)
