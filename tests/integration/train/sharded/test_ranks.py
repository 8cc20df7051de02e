"""The learner on two ranks equals the learner of one process."""

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

from onepolicy.config import TrainingError, UsageError
from onepolicy.config.model import ModelConfig
from onepolicy.interfaces import EngineCaps
from onepolicy.models.checkpoint_names import CheckpointNames
from onepolicy.rollout.remote.client import EngineLost
from onepolicy.sync import broadcast
from onepolicy.sync.broadcast import Receiver, Sender
from onepolicy.sync.push import push_weights
from onepolicy.tiny.model import make_tokenizer
from onepolicy.train import checkpoint
from onepolicy.train.pack import Batcher
from onepolicy.train.sharded import rank
from onepolicy.train.sharded.divide import assign_micro_batches
from onepolicy.train.sharded.export import export_model
from onepolicy.train.sharded.fsdp import gather_full_tensor
from onepolicy.train.sharded.rank import RankBatcher
from onepolicy.train.sharded.ranks import Ranks
from onepolicy.train.sharded.wire import batch_message
from support.metrics import timeless
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
    learner_of,
    learner_on,
    one_step,
    siblings_for,
    weights_of,
)

pytestmark = pytest.mark.process
TWICE = {"deepseek_v3", "one_micro_batch_each", "recompute", "reuse", "r2", "off"}
"""Settings of SIBLINGS that add nothing where nothing is shared."""
FULL = {"qwen3_moe", "chunked", "soft", "centering", "host_state"}
"""What `idle`, `supports`, `idle_soft`, `chunked_recompute` and a restored checkpoint have too."""


@pytest.fixture
def folder(folders):
    return folders["qwen3_moe"]


@pytest.fixture
def pair(two, folder):
    """Return learners of two ranks and of one process."""
    return [learner_on(others, folder, QWEN) for others in (two, None)]


def equal_tensors(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.full] * (c in FULL)) for c in CASES if c not in TWICE],
)
def test_two_ranks_equal_one(case, two, folder):
    assert_equal_steps(CASES[case], two, folder)


def test_gradients_over_supports_and_routes_on_two_ranks(two, folder):
    """Their norm is that of one process: chunks of logits, replayed routes, KL and centering."""
    norms = []
    for others in (None, two):
        learner = learner_on(others, folder, CASES["centered_supports"])
        batch, metrics, _ = one_step(learner, batch_for(learner))
        assert batch.routing is not None
        assert batch.support is not None
        norms.append(metrics["train/grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("case", SIBLINGS)
def test_two_ranks_share_prompts_and_equal_one(case, two, folders, monkeypatch):
    saved = []  # slots of each forward of rank 0 that it does not compute

    def micro_batch(self, batch, samples):
        found = Batcher.micro_batch(self, batch, samples)
        rows = found.num_slots if found.shared is None else len(found.shared.slots)
        saved.append(found.num_slots - rows)
        return found

    monkeypatch.setattr(RankBatcher, "micro_batch", micro_batch, raising=False)
    folder = folders.get(case, folders["qwen3_moe"])
    assert_equal_steps([*SIBLINGS[case], "train.share_prompts=true"], two, folder, siblings_for)
    assert any(saved)
    if case == "r3":
        saved.clear()
        off = [*SIBLINGS[case], "train.share_prompts=false"]
        assert_equal_steps(off, two, folder, siblings_for)
        assert saved
        assert not any(saved)


def test_a_rank_computes_only_its_own_samples(two, folder, monkeypatch):
    computed = []  # real samples and idle ones of each micro-batch of rank 0

    def micro_batch(self, batch, samples):
        found = Batcher.micro_batch(self, batch, samples or [0])
        computed.append(len(samples))
        return found if samples else idle(self, batch, samples)

    idle = RankBatcher.micro_batch
    monkeypatch.setattr(RankBatcher, "micro_batch", micro_batch)
    learner = learner_on(two, folder, CASES["idle"])
    batch = batch_for(learner)
    learner.scorer.score(batch)
    of_ranks = assign_micro_batches(batch, 15, 2)
    assert computed == [len(samples) for samples in of_ranks[0]]
    assert sum(computed) < batch.num_samples


def test_a_batch_is_sent_once_a_step(two, folder, monkeypatch):
    """The update's message has only what rank 0 has added to the scored batch."""
    sent = {}

    def announce(self, call):
        held = self.held
        announced(self, call)
        if call.batch is not None:
            sent[call.name] = batch_message({}, call.batch, held)

    announced = Ranks._announce
    monkeypatch.setattr(Ranks, "_announce", announce)
    learner = learner_on(two, folder, QWEN)
    one_step(learner, batch_for(learner))
    assert sent.keys() == {"score", "step"}
    assert {"input_ids", "routing.ids"} <= sent["score"].tensors.keys()
    assert sent["step"].tensors.keys() == {"advantage", "weight", "keep"}
    assert {"input_ids", "routing", "routing_native", "logp_old"} <= {*sent["step"].header["kept"]}


def test_an_error_of_all_ranks_is_raised_once_and_they_go_on(pair, capfd):
    """The routes of another sample are refused by every rank, in the words of one process."""
    ranked, one = pair
    batch = batch_for(one)
    bad = batch.replace(input_ids=batch.input_ids.masked_fill(batch.segment == 2, -1))
    messages = []
    for learner in (one, ranked):
        with pytest.raises(TrainingError, match="of sample 2") as raised:
            learner.score(bad)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    assert torch.isfinite(ranked.score(batch).logp_old).all()
    assert capfd.readouterr().err == ""


def save(run, learner):
    return checkpoint.save(run, learner, make_tokenizer("abc"), step=1, extra={})


def written(path):
    """Return the tensors of a checkpoint's weights, by the files of its index."""
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    return {name: load_file(path / file)[name] for name, file in index.items()}


def test_a_checkpoint_of_two_ranks_resumes_on_two_and_on_one(two, folder, tmp_path, monkeypatch):
    stepped = threading.Event()
    monkeypatch.setattr(
        rank, "export_model", lambda *given: stepped.wait(60) and export_model(*given)
    )
    overrides = CASES["critic_kl_entropy"]
    ranked = learner_on(two, folder, overrides)
    one_step(ranked, batch_for(ranked))
    path = save(tmp_path, ranked)
    held = weights_of(ranked)
    _, expected, _ = one_step(ranked, batch_for(ranked))  # while the files are being written
    after = weights_of(ranked)
    assert not checkpoint.complete_checkpoints(tmp_path)
    stepped.set()
    ranked.finish_saving()
    assert checkpoint.latest_checkpoint(tmp_path) == path
    assert json.loads((path / "state.json").read_text())["updates"] == 1
    # the weights stand in transformers' layout
    assert not list((path / "shards").glob("*model-00001-of-00002*"))
    for others, same in ((two, True), (None, False)):
        count = 2 if same else 0
        config = config_of(folder, [*overrides, "optim.state=host"], count)
        again = learner_of(config, ModelConfig(path=str(path)), others)
        equal_tensors(dict(again.named_weights()), held)
        again.restore(path)
        assert (again.version, again.updates) == (1, 1)
        _, found, _ = one_step(again, batch_for(again))
        if same:
            assert timeless(found) == timeless(expected)
            equal_tensors(dict(again.named_weights()), after)
        else:
            assert_close(found, expected)
            for name, tensor in again.named_weights():
                torch.testing.assert_close(tensor, after[name], rtol=0, atol=2e-5)


@pytest.mark.full
def test_a_checkpoint_of_one_process_resumes_on_two_ranks(two, folder, tmp_path):
    overrides = CASES["critic_kl_entropy"]
    one = learner_on(None, folder, overrides)
    one_step(one, batch_for(one))
    path = save(tmp_path, one)
    _, expected, _ = one_step(one, batch_for(one))
    ranked = learner_of(config_of(folder, overrides, 2), ModelConfig(path=str(path)), two)
    ranked.restore(path)
    _, found, _ = one_step(ranked, batch_for(ranked))
    assert_close(found, expected)
    for name, tensor in ranked.named_weights():
        torch.testing.assert_close(tensor, weights_of(one)[name], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "family", [pytest.param("qwen3_moe", marks=pytest.mark.full), "deepseek_v3"]
)
def test_an_exported_folder_equals_save_pretrained(family, two, folders, tmp_path):
    ranked, plain = learner_on(two, folders[family], QWEN), tmp_path / "plain"
    path = save(tmp_path, ranked)
    ranked.finish_saving()
    model = AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.float32)
    model.save_pretrained(plain)
    equal_tensors(written(path), load_file(plain / "model.safetensors"))
    config, expected = (json.loads((each / "config.json").read_text()) for each in (path, plain))
    assert config == expected


def test_weights_come_whole_and_a_reader_may_stop_early(pair):
    ranked, one = pair
    first = next(iter(ranked.named_weights()))
    assert first[0] == next(iter(one.named_weights()))[0]
    equal_tensors(dict(ranked.named_weights()), dict(one.named_weights()))


def test_a_checkpoint_that_was_stored_in_mxfp4_is_exported_plain(two, tmp_path):
    """Its tensors are float32, and its config says nothing else of them."""
    expected = write_mxfp4(tmp_path)
    ranked = learner_on(two, tmp_path, QWEN)
    path = save(tmp_path, ranked)
    ranked.finish_saving()
    assert "quantization_config" not in json.loads((path / "config.json").read_text())
    equal_tensors(written(path), {name: tensor.float() for name, tensor in expected.items()})


class LostEngine:
    """An engine that is lost while it takes an update."""

    caps, version = EngineCaps(returns_routes=True, max_len=8), 0

    async def load_weights(self, weights, version):
        self.weights = weights
        next(weights)
        raise EngineLost("gone")


def test_an_engine_that_is_lost_in_mid_update_leaves_the_ranks_in_step(pair):
    """The error's traceback keeps the weights' iterator, and so whatever it has open."""
    ranked, one = pair
    engine = LostEngine()
    with pytest.raises(EngineLost):
        asyncio.run(push_weights(ranked, engine))
    gathered = engine.weights.gi_frame.f_locals["weights"]  # by the learner, for what was given
    assert gathered.gi_frame is None  # every rank has gathered the rest
    equal_tensors(dict(ranked.named_weights()), dict(one.named_weights()))


def test_weights_of_a_bfloat16_engine_are_cast_before_they_are_gathered(pair, monkeypatch):
    gathered, (ranked, one) = [], pair

    def gather(tensor):
        gathered.append(tensor.nbytes)
        return gather_full_tensor(tensor)

    monkeypatch.setattr(rank, "gather_full_tensor", gather)
    equal_tensors(dict(ranked.named_weights("bfloat16")), dict(one.named_weights("bfloat16")))
    assert sum(gathered) < 0.6 * sum(tensor.nbytes for _, tensor in one.named_weights())


@pytest.mark.few(1)
@pytest.mark.parametrize("setting", ["train.fsdp_param_dtype=bfloat16", "train.autocast=bfloat16"])
def test_bfloat16_forward_with_float32_masters(setting, two, folder):
    ranked, one = learner_on(two, folder, [*QWEN, setting]), learner_on(None, folder, QWEN)
    (rounded, metrics, _), (exact, expected, _) = (
        one_step(each, batch_for(each)) for each in (ranked, one)
    )
    gap = (rounded.logp_old - exact.logp_old)[exact.trainable].abs()
    assert 1e-4 < gap.mean() < 0.1
    assert metrics["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=0.1)
    after = dict(ranked.named_weights())
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    before = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    moved = [after[name] - tensor for name, tensor in before.items()]
    # less than bfloat16 could hold
    assert any(bool(((d != 0) & (d.abs() < 1e-6)).any()) for d in moved)


def test_a_critic_computes_in_the_dtype_of_autocast(folder):
    learner = learner_on(None, folder, [*QWEN, "objective.preset=ppo", "train.autocast=bfloat16"])
    found = set()
    projection = learner.critic.values.backbone.layers[0].self_attn.q_proj
    projection.register_forward_hook(lambda *seen: found.add(seen[-1].dtype))
    _, metrics, _ = one_step(learner, batch_for(learner))
    assert found == {torch.bfloat16}
    assert projection.weight.dtype == torch.float32
    assert metrics["train/value_loss"] > 0


@pytest.mark.parametrize("family", CONFIGS)
def test_checkpoint_names_by_layer_equal_those_of_the_whole(family):
    model = make(family)
    names, state = CheckpointNames(model.config, trust_remote_code=False), model.state_dict()
    streamed = dict(names.stream_to_checkpoint(state.items()))
    equal_tensors(streamed, revert_weight_conversion(model, dict(state)))
    without = [(name, tensor) for name, tensor in state.items() if name != "lm_head.weight"]
    with pytest.raises(UsageError, match=r"1 tensors are missing, first 'lm_head.weight'"):
        list(names.stream_to_checkpoint(without))


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


@pytest.mark.full
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="this system is not Linux, which measures it"
)
def test_the_driver_never_holds_the_weights_twice_while_sending(two, tmp_path, monkeypatch):
    """They are gathered tensor by tensor, renamed layer by layer, and sent bucket by bucket. (The
    other ranks drop the tensors that they help to gather.)"""
    config = copy.deepcopy(make("qwen3_moe").config)
    config.update({"hidden_size": 256, "moe_intermediate_size": 128})
    config.update({"num_experts": 16, "num_hidden_layers": 20})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    ranked = learner_on(two, tmp_path, QWEN)
    size = sum(tensor.nbytes for tensor in ranked.model.state_dict().values())
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
