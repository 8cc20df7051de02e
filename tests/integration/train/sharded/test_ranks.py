"""The learner on two ranks equals the learner of one process. All tests share one start of the
second rank."""

import asyncio
import copy
import ctypes
import gc
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from onepolicy.config import UsageError
from onepolicy.config.model import ModelConfig
from onepolicy.interfaces import EngineCaps
from onepolicy.models.checkpoint_names import CheckpointNames
from onepolicy.rollout.servers.http import EngineLost
from onepolicy.sync import broadcast
from onepolicy.sync.broadcast import Receiver, Sender
from onepolicy.sync.push import push_weights
from onepolicy.tiny.model import make_tokenizer
from onepolicy.train import checkpoint
from onepolicy.train.scorer import PolicyScorer
from onepolicy.train.sharded import learner as sharded
from onepolicy.train.sharded import rank
from onepolicy.train.sharded.export import export_model
from onepolicy.train.sharded.fsdp import gather_full_tensor
from onepolicy.train.sharded.rank import RankLearner, RankScorer
from onepolicy.train.sharded.wire import batch_from_message as batch_in
from support.models import CONFIGS, make
from support.mxfp4 import write_mxfp4
from support.rank_cases import (
    CASES,
    QWEN,
    SIBLINGS,
    assert_close,
    assert_equal_steps,
    batch_for,
    config_of,
    joined,
    learner_of,
    learner_on,
    one_step,
    siblings_for,
    weights_of,
)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    with joined(2, tmp_path_factory.mktemp("rendezvous")) as others:
        yield others


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name in ("qwen3_moe", "deepseek_v3"):
        made[name] = tmp_path_factory.mktemp(name)
        make(name).save_pretrained(made[name])
    return made


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one(case, two, folders):
    assert_equal_steps(
        CASES[case], two, folders["deepseek_v3" if case == "deepseek_v3" else "qwen3_moe"]
    )


@pytest.mark.parametrize("case", SIBLINGS)
def test_two_ranks_share_prompts_and_equal_one(case, two, folders, monkeypatch):
    saved = []  # slots of each forward of rank 0 that it does not compute

    def micro_batch(self, batch, samples):
        found = PolicyScorer.micro_batch(self, batch, samples)
        rows = found.num_slots if found.shared is None else len(found.shared.slots)
        saved.append(found.num_slots - rows)
        return found

    monkeypatch.setattr(RankScorer, "micro_batch", micro_batch, raising=False)
    folder = folders["deepseek_v3" if case == "deepseek_v3" else "qwen3_moe"]
    for setting, shares in (("true", True), ("false", False)):
        saved.clear()
        overrides = [*SIBLINGS[case], f"train.share_prompts={setting}"]
        assert_equal_steps(overrides, two, folder, siblings_for)
        assert any(saved) == shares
        assert saved


def test_a_rank_has_only_its_own_samples_and_routes(two, folders, monkeypatch):
    messages = []  # of rank 1, then of rank 0, for scoring and for the update
    send, handle = two.send, RankLearner.handle
    monkeypatch.setattr(two, "send", lambda own: messages.extend(own) or send(own))
    monkeypatch.setattr(
        RankLearner, "handle", lambda self, own: messages.append(own) or handle(self, own)
    )
    learner = learner_on(two, folders["qwen3_moe"], CASES["idle"])
    batch, _, _ = one_step(learner, batch_for(learner))
    parts = [batch_in(m) for m in messages if m.header["do"] in ("score", "optimise")]
    known = samples_of(batch)
    assert len(parts) == 4
    for pair in (parts[:2], parts[2:]):
        found = [sample for part in pair for sample in samples_of(part)]
        idle = [routes for tokens, routes, real in found if not real]
        assert len(idle) == 1  # stands in for the micro-batch that one rank has less
        assert not idle[0].any()
        own = [(tokens, routes) for tokens, routes, real in found if real]
        assert len(own) == len(known)
        for tokens, routes, _ in known:
            assert sum(torch.equal(tokens, t) and torch.equal(routes, r) for t, r in own) == 1
        assert all(part.num_samples <= 2 for part in pair)


def samples_of(batch):
    """Return (tokens, routes, whether any slot is trainable) of each sample."""
    lengths = batch.cu_seqlens.diff().tolist()
    parts = [
        tensor.split(lengths) for tensor in (batch.input_ids, batch.routing.ids, batch.trainable)
    ]
    return [(tokens, routes, bool(mine.any())) for tokens, routes, mine in zip(*parts, strict=True)]


def test_a_checkpoint_of_two_ranks_resumes_on_two_and_on_one(two, folders, tmp_path, monkeypatch):
    stepped = threading.Event()
    monkeypatch.setattr(
        sharded, "export_model", lambda *given: stepped.wait(60) and export_model(*given)
    )
    overrides = CASES["critic_kl_entropy"]
    ranked = learner_on(two, folders["qwen3_moe"], overrides)
    one_step(ranked, batch_for(ranked))
    path = checkpoint.save(tmp_path, ranked, make_tokenizer("abc"), step=1, extra={})
    held = weights_of(ranked)
    _, expected, _ = one_step(ranked, batch_for(ranked))  # while the files are being written
    after = weights_of(ranked)
    assert not checkpoint.complete_checkpoints(tmp_path)
    stepped.set()
    ranked.finish_saving()
    assert checkpoint.latest_checkpoint(tmp_path) == path
    assert json.loads((path / "state.json").read_text())["updates"] == 1
    assert not list(
        (path / "shards").glob("*model-00001-of-00002*")
    )  # the weights stand in transformers' layout
    for others, same in ((two, True), (None, False)):
        again = learner_on(others, folders["qwen3_moe"], [*overrides, "optim.state=host"])
        config = again.config
        again = learner_of(config, ModelConfig(path=str(path)), others)
        assert all(torch.equal(tensor, held[name]) for name, tensor in again.named_weights())
        again.restore(path)
        assert (again.version, again.updates) == (1, 1)
        _, found, _ = one_step(again, batch_for(again))
        if same:
            assert {k: v for k, v in found.items() if "time" not in k} == {
                k: v for k, v in expected.items() if "time" not in k
            }
            assert all(torch.equal(tensor, after[name]) for name, tensor in again.named_weights())
        else:
            assert_close(found, expected)
            for name, tensor in again.named_weights():
                torch.testing.assert_close(tensor, after[name], rtol=0, atol=2e-5)


def test_a_checkpoint_of_one_process_resumes_on_two_ranks(two, folders, tmp_path):
    overrides = CASES["critic_kl_entropy"]
    one = learner_on(None, folders["qwen3_moe"], overrides)
    one_step(one, batch_for(one))
    path = checkpoint.save(tmp_path, one, make_tokenizer("abc"), step=1, extra={})
    _, expected, _ = one_step(one, batch_for(one))
    ranked = learner_of(
        config_of(folders["qwen3_moe"], overrides, 2), ModelConfig(path=str(path)), two
    )
    ranked.restore(path)
    _, found, _ = one_step(ranked, batch_for(ranked))
    assert_close(found, expected)
    for name, tensor in ranked.named_weights():
        torch.testing.assert_close(tensor, weights_of(one)[name], rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_an_exported_folder_equals_save_pretrained(family, two, folders, tmp_path):
    ranked = learner_on(two, folders[family], QWEN)
    path = checkpoint.save(tmp_path, ranked, make_tokenizer("abc"), step=1, extra={})
    ranked.finish_saving()
    AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.float32).save_pretrained(
        tmp_path / "plain"
    )
    expected = load_file(tmp_path / "plain" / "model.safetensors")
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    found = {name: load_file(path / file)[name] for name, file in index.items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    config, plain = (
        json.loads((folder / "config.json").read_text()) for folder in (path, tmp_path / "plain")
    )
    assert config == plain


def test_weights_come_whole_and_a_reader_may_stop_early(two, folders):
    ranked, one = (learner_on(others, folders["qwen3_moe"], QWEN) for others in (two, None))
    first = next(iter(ranked.named_weights()))
    assert first[0] == next(iter(one.named_weights()))[0]
    found, expected = dict(ranked.named_weights()), dict(one.named_weights())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_checkpoint_that_was_stored_in_mxfp4_is_exported_plain(two, tmp_path):
    """Its tensors are float32, and its config says nothing else of them."""
    expected = write_mxfp4(tmp_path)
    ranked = learner_on(two, tmp_path, QWEN)
    path = checkpoint.save(tmp_path, ranked, make_tokenizer("abc"), step=1, extra={})
    ranked.finish_saving()
    assert "quantization_config" not in json.loads((path / "config.json").read_text())
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == expected.keys()
    for name, file in index.items():
        assert torch.equal(load_file(path / file)[name], expected[name].float()), name


class LostEngine:
    """An engine that is lost while it takes an update."""

    caps, version = EngineCaps(returns_routes=True, max_len=8), 0

    async def load_weights(self, weights, version):
        self.weights = weights
        next(weights)
        raise EngineLost("gone")


def test_an_engine_that_is_lost_in_mid_update_leaves_the_ranks_in_step(two, folders):
    """The error's traceback keeps the weights' iterator, and so whatever it has open."""
    ranked, one = (learner_on(others, folders["qwen3_moe"], QWEN) for others in (two, None))
    engine = LostEngine()
    with pytest.raises(EngineLost):
        asyncio.run(push_weights(ranked, engine))
    gathered = engine.weights.gi_frame.f_locals["weights"]  # by the learner, for what was given
    assert gathered.gi_frame is None  # every rank has gathered the rest
    found, expected = dict(ranked.named_weights()), dict(one.named_weights())
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_weights_of_a_bfloat16_engine_are_cast_before_they_are_gathered(two, folders, monkeypatch):
    gathered = []

    def gather(tensor):
        gathered.append(tensor.nbytes)
        return gather_full_tensor(tensor)

    monkeypatch.setattr(rank, "gather_full_tensor", gather)
    ranked, one = (learner_on(others, folders["qwen3_moe"], QWEN) for others in (two, None))
    found, expected = dict(ranked.named_weights("bfloat16")), dict(one.named_weights("bfloat16"))
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == expected[name].dtype for name in expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert sum(gathered) < 0.6 * sum(tensor.nbytes for _, tensor in one.named_weights())


@pytest.mark.parametrize("setting", ["train.fsdp_param_dtype=bfloat16", "train.autocast=bfloat16"])
def test_bfloat16_forward_with_float32_masters(setting, two, folders):
    ranked = learner_on(two, folders["qwen3_moe"], [*QWEN, setting])
    one = learner_on(None, folders["qwen3_moe"], QWEN)
    (rounded, metrics, _), (exact, expected, _) = (
        one_step(each, batch_for(each)) for each in (ranked, one)
    )
    gap = (rounded.logp_old - exact.logp_old)[exact.trainable].abs()
    assert 1e-4 < gap.mean() < 0.1
    assert metrics["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=0.1)
    after = dict(ranked.named_weights())
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    moved = {
        n: after[n] - t
        for n, t in AutoModelForCausalLM.from_pretrained(folders["qwen3_moe"]).state_dict().items()
    }
    assert any(
        bool(((d != 0) & (d.abs() < 1e-6)).any()) for d in moved.values()
    )  # less than bfloat16 could hold


@pytest.mark.parametrize("family", CONFIGS)
def test_checkpoint_names_by_layer_equal_those_of_the_whole(family):
    model = make(family)
    names = CheckpointNames(model.config, trust_remote_code=False)
    whole, streamed = (
        revert_weight_conversion(model, dict(model.state_dict())),
        dict(names.stream_to_checkpoint(model.state_dict().items())),
    )
    assert whole.keys() == streamed.keys()
    assert all(torch.equal(whole[name], streamed[name]) for name in whole)
    with pytest.raises(UsageError, match=r"1 tensors are missing, first 'lm_head.weight'"):
        list(
            names.stream_to_checkpoint(
                (name, tensor)
                for name, tensor in model.state_dict().items()
                if name != "lm_head.weight"
            )
        )


def peak(work):
    """Return the result of `work` and the most that it adds to this process's resident memory
    [bytes]."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or it would fill what earlier tests left
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    done = work()
    return done, resident("VmHWM") - before


def resident(what):
    return 1024 * int(re.search(rf"{what}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="this system is not Linux, which measures it"
)
def test_the_driver_never_holds_the_weights_twice_while_sending(two, tmp_path, monkeypatch):
    """They are gathered tensor by tensor, renamed layer by layer, and sent bucket by bucket. (The
    other ranks drop the tensors that they help to gather.)"""
    config = copy.deepcopy(make("qwen3_moe").config)
    config.update(
        {
            "hidden_size": 256,
            "moe_intermediate_size": 128,
            "num_experts": 16,
            "num_hidden_layers": 20,
        }
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    ranked = learner_on(two, tmp_path, QWEN)
    size = sum(tensor.nbytes for tensor in ranked.rank_0.model.state_dict().values())
    assert size > 100e6
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", 2**20)
    names = CheckpointNames(config, trust_remote_code=False)

    def receive(invitation):
        with Receiver(invitation, 1, version=1) as weights:
            return sum(tensor.nbytes for _, tensor in weights)

    def send():
        with Sender(receivers=1, timeout_s=60) as sender, ThreadPoolExecutor(1) as pool:
            received = pool.submit(receive, sender.invitation)
            sender.send(names.stream_to_checkpoint(ranked.named_weights()), 1)
            return received.result()

    received, grown = peak(send)
    assert received >= size
    assert grown < 0.5 * size
    whole, grown = peak(lambda: dict(ranked.named_weights()))
    assert grown > 0.8 * size  # the measure sees a copy where there is one
    assert whole
