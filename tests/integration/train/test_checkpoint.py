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
from onepolicy.train import checkpoint
from onepolicy.train.learner import LocalLearner
from onepolicy.train.scorer import PolicyScorer
from support.learner_steps import batch_of, learner_of, one_step
from support.models import make


def save(run, learner, step=1):
    return checkpoint.save(run, learner, make_tokenizer("abc"), step=step, extra={})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    learner = learner_of()
    one_step(learner, batch_of())
    return save(tmp_path_factory.mktemp("run"), learner), learner


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "checkpoints" / "step_00001")


def refused(words):
    return pytest.raises(UsageError, match=words)


def test_the_step_after_a_restore_is_the_same_to_the_bit(saved):
    path, learner = saved
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    state, own = model.state_dict(), learner.model.state_dict()
    assert state.keys() == own.keys()
    assert all(torch.equal(state[name], own[name]) for name in own)
    prepare_for_training(model, torch.device("cpu"))
    again = LocalLearner(PolicyScorer(model.eval(), learner.config, routers=bind_routers(model)))
    checkpoint.restore_optimizer(path, again)
    assert again.version == learner.version == 1
    _, first, weights = one_step(learner, batch_of())
    _, second, restored = one_step(again, batch_of())
    assert first == second
    assert all(torch.equal(weights[n], restored[n]) for n in weights)


def test_a_fork_to_float32_goes_on_from_the_masters(tmp_path):
    """Updates that bfloat16 rounds away are in the masters alone."""
    learner = learner_of()
    learner.scorer.model.to(torch.bfloat16)
    one_step(learner, batch_of())
    path = save(tmp_path, learner)
    masters = {n: learner.optimizer.state[p]["master"] for n, p in learner.model.named_parameters()}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    rounded = {name: parameter.clone() for name, parameter in model.named_parameters()}
    fork = LocalLearner(PolicyScorer(model.eval(), learner.config, routers=bind_routers(model)))
    checkpoint.restore_optimizer(path, fork)
    own = dict(fork.model.named_parameters())
    assert all(torch.equal(own[name], master) for name, master in masters.items())
    assert any(not torch.equal(rounded[name], master) for name, master in masters.items())
    assert all("master" not in fork.optimizer.state[parameter] for parameter in own.values())


def test_the_index_keeps_engines_from_loading_the_optimizer(saved):
    """vLLM and SGLang load every *.safetensors of a folder that an index does not exclude."""
    path, _ = saved
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == {"model.safetensors"}
    assert set(index) == set(load_file(path / "model.safetensors"))
    assert (path / checkpoint.OPTIMIZER).exists()


def test_an_interrupted_save_leaves_the_last_one(saved, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    run, learner = tmp_path, saved[1]
    path = save(run, learner)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "rename", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save(run, learner, step=2)
    assert checkpoint.latest_checkpoint(run) == path
    assert save(run, learner, step=2).name == "step_00002"
    assert [p.name for p in checkpoint.complete_checkpoints(run)] == ["step_00001", "step_00002"]
    checkpoint.prune(run, 1)
    assert [p.name for p in checkpoint.complete_checkpoints(run)] == ["step_00002"]


def test_damage_is_named(copied, tmp_path, subtests):
    for name, data, words in (
        ("model.safetensors", b"x", "model.safetensors: half written"),
        ("optimizer.safetensors", None, "optimizer.safetensors: half written"),
        ("state.json", b'{"step": 1, "fi', "not valid JSON"),
        ("state.json", None, "half written"),
    ):
        whole = (copied / name).read_bytes()
        (copied / name).unlink()
        if data is not None:
            (copied / name).write_bytes(data)
        with subtests.test(name=name, data=data), refused(words):
            checkpoint.verify(checkpoint.latest_checkpoint(tmp_path))
        (copied / name).write_bytes(whole)


def test_every_byte_of_every_file_counts(copied):
    """With one flipped bit anywhere, or one byte less, the file is named. The whole file is
    accepted."""
    copy, names = copied, [*checkpoint.verify(copied)["files"]]
    expected = {"model.safetensors", "optimizer.safetensors", "config.json", "tokenizer.json"}
    assert expected <= set(names)
    for name in names:
        whole = (copy / name).read_bytes()
        for at in {0, len(whole) // 2, len(whole) - 1}:
            (copy / name).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with refused(f"{name}: damaged, .*; delete the folder to fall back"):
                checkpoint.verify(copy)
        (copy / name).write_bytes(whole[:-1])
        with refused(f"{name}: half written"):
            checkpoint.verify(copy)
        (copy / name).write_bytes(whole)
    assert checkpoint.verify(copy)["step"] == 1


def test_weights_are_read_only_from_files_written_with_the_checkpoint(copied, subtests):
    (copied / "notes.txt").write_text("nobody reads this")
    (copied / "shards").mkdir()
    for name in (
        "model-00002-of-00002.safetensors",
        "shards/rank_7.safetensors",
        "pytorch_model.bin",
        "adapter_config.json",
    ):
        checkpoint.verify(copied)
        (copied / name).write_bytes(b"")
        words = f"{name}: not written with this checkpoint.*move it out"
        with subtests.test(name=name), refused(words):
            checkpoint.verify(copied)
        (copied / name).unlink()


def test_zeros_beside_sharded_weights_are_not_loaded(saved, tmp_path):
    """transformers loads model.safetensors if there is one, and ignores the index."""
    copy, (path, learner) = tmp_path / "step_00001", saved
    shutil.copytree(path, copy, ignore=shutil.ignore_patterns("model*"))
    learner.model.save_pretrained(copy, max_shard_size="20KB")
    policy = ModelConfig(path=str(copy))
    on_cpu = torch.float32, torch.device("cpu")
    whole = load_model(policy, *on_cpu).state_dict()
    assert all(torch.equal(whole[name], t) for name, t in learner.model.state_dict().items())
    stored = load_file(path / "model.safetensors")
    zeros = {name: torch.zeros_like(value) for name, value in stored.items()}
    save_file(zeros, copy / "model.safetensors", {"format": "pt"})
    with refused(r"has a model.safetensors that its .*index.json does not name"):
        load_model(policy, *on_cpu)


def test_leftovers_of_a_killed_process_are_removed(copied, tmp_path):
    for name in (".step_00000.deleting", ".step_00002.writing"):
        shutil.copytree(copied, copied.with_name(name))
    checkpoint.remove_unfinished(tmp_path)
    assert list(copied.parent.iterdir()) == [copied]


def test_a_save_that_fails_gives_the_room_back(saved, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, saved[1])
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_disk_that_fills_in_the_tokenizer_is_an_error_of_the_disk(saved, tmp_path, monkeypatch):
    """Its file is written in Rust, which raises a bare Exception."""
    tokenizer = make_tokenizer("abc")
    monkeypatch.setattr(
        tokenizer, "save_pretrained", lambda folder: tokenizer.backend_tokenizer.save("/dev/full")
    )
    with pytest.raises(OSError, match="No space left on device"):
        checkpoint.save(tmp_path, saved[1], tokenizer, step=1, extra={})
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_no_run_no_checkpoint(tmp_path):
    with refused("no such run folder"):
        checkpoint.latest_checkpoint(tmp_path / "nowhere")
    with refused("no complete checkpoint"):
        checkpoint.latest_checkpoint(tmp_path)


def test_wrong_model_is_refused(saved):
    other = make("qwen3_dense")
    learner = LocalLearner(PolicyScorer(other, saved[1].config, routers=None))
    with refused("which the model does not have"):
        checkpoint.restore_optimizer(saved[0], learner)
