"""Adapters that a vLLM server loads by name (train.lora.sync = native), on a server in miniature:
an adapter there changes the logit of token 0 by the sum of its tensors."""

import asyncio
import contextlib

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from onepolicy.config import ModelConfig, TrainingError, UsageError
from onepolicy.config.lora import LoraConfig
from onepolicy.rollout.remote.client import EngineLost
from onepolicy.rollout.remote.dialects import vllm as dialect
from onepolicy.rollout.remote.servers import ServerFleet
from onepolicy.rollout.vllm.adapter import layer_names
from onepolicy.sync.push import push_weights
from onepolicy.types import Sampling
from support.adapter_learner import A, Learner, out_of_space
from support.fake_vllm import (
    GENERATE,
    HF,
    TABLE,
    FakeVLLM,
    connected,
    engine_of,
    model_shape,
    one,
)
from support.families import TABLE as FAMILIES
from support.http_server import Reply

LORA = LoraConfig(rank=4, targets=("attention",), sync="native")
LIMITS = {"rank": 8, "layers": ["k_proj", "o_proj", "q_proj", "v_proj"]}


@pytest.fixture
def lora_fake(fake):
    fake.told["adapters"] = LIMITS
    return fake


def logp_of(model, last, bias):
    table = model.state_dict()[TABLE]
    logits = table[last] @ table.T
    logits[0] += bias
    return logits.log_softmax(-1)


def assert_sampled(done, model, version, bias, last=5):
    assert (done.adapter, set(done.version.tolist())) == ("lora-run", {version})
    for token, logp in zip(done.token_ids.tolist(), done.logp, strict=True):
        torch.testing.assert_close(logp, logp_of(model, last, bias)[token], atol=1e-5, rtol=0)
        last = token


def push(learner, engine, version, bias):
    learner.version, learner.adapter.bias = version, bias
    return asyncio.run(push_weights(learner, engine))


@pytest.mark.few(1)
@pytest.mark.parametrize("sync", ["gloo", "disk"])
def test_every_version_is_loaded_by_its_name_and_the_last_one_unloaded(
    lora_fake, checkpoints, tmp_path, sync
):
    engine = connected(lora_fake, lora=LORA, sync=sync, sync_dir=str(tmp_path))
    other = checkpoints[1][1]  # not the weights that the server was started with
    learner = Learner(other)
    assert one(engine).adapter is None
    for version, bias in enumerate((0.0, 3.0, -2.0)):
        assert push(learner, engine, version, bias) == 4 * 16
        assert list(lora_fake.adapters) == [f"lora-run@{version}"]
        assert_sampled(one(engine), other, version, bias)
    assert lora_fake.full_syncs == 1  # the frozen weights travel once, and never merged ones
    assert [settings for _, settings in lora_fake.folders.values()] == [{"r": 4}] * 3
    sent = [r.body["model"] for r in lora_fake.server.asked if r.body and "model" in r.body]
    assert sent[-1] == "lora-run@2"


def test_the_adapters_of_an_earlier_run_are_unloaded(lora_fake, checkpoints):
    lora_fake.adapters |= {"lora-run@0": 9.0, "another": 1.0}
    engine = connected(lora_fake, lora=LORA)
    push(Learner(checkpoints[0][1]), engine, 0, 1.0)
    assert list(lora_fake.adapters) == ["lora-run@0"]
    assert_sampled(one(engine), checkpoints[0][1], 0, 1.0)


def test_a_request_that_an_update_interrupts_goes_on_with_the_new_adapter(lora_fake, checkpoints):
    engine, learner = connected(lora_fake, lora=LORA), Learner(checkpoints[0][1])
    push(learner, engine, 0, 0.0)
    lora_fake.hold, lora_fake.sampled = 5, 0

    async def interrupted():
        task = asyncio.create_task(engine.generate([3, 4, 5], Sampling(1.0, 20), seed=1))
        await lora_fake.sampling(5)
        learner.version, learner.adapter.bias = 1, 4.0
        await push_weights(learner, engine)
        return await task

    done = asyncio.run(interrupted())
    assert done.version.tolist() == [0] * 5 + [1] * 15
    assert done.adapter == "lora-run"
    fed = [5, *done.token_ids.tolist()]
    for i, logp in enumerate(done.logp):
        expected = logp_of(checkpoints[0][1], fed[i], 4.0 * (i >= 5))[fed[i + 1]]
        torch.testing.assert_close(logp, expected, atol=1e-5, rtol=0)


def test_a_reply_that_names_another_adapter_stops_the_run(lora_fake, checkpoints):
    engine = connected(lora_fake, lora=LORA)
    push(Learner(checkpoints[0][1]), engine, 1, 1.0)
    for told in ("lora-run@0", "lora-other@1", "", "/models/base"):
        lora_fake.spoil[GENERATE] = lambda reply, _, told=told: reply | {"model": told}
        with pytest.raises(TrainingError, match=f"the adapter 'lora-run@1'.*names '{told}'"):
            one(engine)
    lora_fake.spoil.clear()
    engine._adapters.name = None  # a bug: a request without a name
    assert one(engine).adapter is None
    lora_fake.spoil[GENERATE] = lambda reply, _: reply | {"model": "lora-x@7"}
    assert one(engine).adapter == "lora-x"


UNFIT = [
    (
        None,
        4,
        "sync: native, but the vLLM server at http.* was started without adapters; start it with "
        "`onepolicy engine serve .* lora_rank=4`, or use train.lora.sync = merg",
    ),
    (LIMITS, 9, "rank: 9, but .* takes adapters of rank 8 at most; .*lora_rank=9`, lower"),
    (LIMITS | {"layers": ["q_proj", "v_proj"]}, 4, "on k_proj, o_proj, but .* on q_proj, v_proj"),
    ({"rank": 8}, 4, "runs another version of onepolicy"),
]


def test_a_server_that_cannot_take_the_adapters_is_refused(lora_fake, subtests):
    experts = LoraConfig(rank=4, sync="native")
    with pytest.raises(UsageError, match="adapters of experts are not what vLLM computes with"):
        engine_of(lora_fake, lora=experts)
    assert not lora_fake.server.asked
    for limits, rank, message in UNFIT:
        lora_fake.told["adapters"] = limits
        lora = LORA.model_copy(update={"rank": rank})
        with subtests.test(limits=limits), pytest.raises(UsageError, match=message):
            connected(lora_fake, lora=lora)
    lora_fake.told["adapters"] = LIMITS
    lora_fake.spoil["/collective_rpc"] = lambda reply, _: {"results": reply["results"] * 2}
    with pytest.raises(UsageError, match="has 2 workers, with which adapters were never run"):
        connected(lora_fake, lora=LORA)
    assert not [r for r in lora_fake.server.asked if r.path == GENERATE]


@pytest.mark.parametrize("model", ["qwen3_moe", "phimoe"])
def test_routers_are_refused_as_parameters_and_as_layers(model, tmp_path):
    AutoConfig.for_model(model, **FAMILIES[model].options).save_pretrained(tmp_path)
    path = ModelConfig(path=str(tmp_path))
    attention = LoraConfig(rank=4, targets=("attention",))
    both = LoraConfig(rank=4, targets=("attention", "routers"))
    assert layer_names(attention, path) == LIMITS["layers"]
    with pytest.raises(UsageError, match="adapters of routers are not what vLLM computes with"):
        layer_names(both, path)


def test_altered_tensors_are_never_loaded(lora_fake, checkpoints, tmp_path, monkeypatch):
    engine = connected(lora_fake, lora=LORA, sync="disk", sync_dir=str(tmp_path))
    learner = Learner(checkpoints[0][1])
    push(learner, engine, 0, 0.0)
    original = dialect.write_weight_files

    def altered(*args):
        folder, sums = original(*args)
        (path,) = folder.glob("*.safetensors")
        save_file(learner.adapter.tensors() | {A: torch.ones(4, 2)}, path)
        return folder, sums

    monkeypatch.setattr(dialect, "write_weight_files", altered)
    with pytest.raises(TrainingError, match=r"the adapter of version 1 .* the bytes of .*lora_A"):
        push(learner, engine, 1, 1.0)
    assert engine.version == -1
    assert list(lora_fake.adapters) == ["lora-run@0"]
    with pytest.raises(RuntimeError, match="failed half-way"):
        one(engine)


def test_an_adapter_that_the_server_does_not_load_is_an_error(lora_fake, checkpoints):
    engine = connected(lora_fake, lora=LORA)
    refusal = Reply({"error": {"message": "rank 4 is too large"}}, 500)
    lora_fake.spoil["/v1/load_lora_adapter"] = lambda reply, _: refusal
    with pytest.raises(TrainingError, match=r"load_lora_adapter.*rank 4 is too large"):
        push(Learner(checkpoints[0][1]), engine, 0, 0.0)
    assert engine.version == -1


@pytest.mark.parametrize("sync", ["gloo", "disk"])
def test_an_adapter_that_cannot_be_read_changes_nothing(
    lora_fake, checkpoints, tmp_path, monkeypatch, sync
):
    engine = connected(lora_fake, lora=LORA, sync=sync, sync_dir=str(tmp_path))
    learner, model = Learner(checkpoints[0][1]), checkpoints[0][1]
    push(learner, engine, 0, 1.0)
    named = lora_fake.weights
    with monkeypatch.context() as patch:
        patch.setattr(learner.adapter, "write", out_of_space)
        with pytest.raises(OSError, match="No space left"):
            push(learner, engine, 1, 2.0)
    assert (engine.version, lora_fake.weights) == (0, named)
    assert not lora_fake.paused.is_set()
    assert_sampled(one(engine), model, 0, 1.0)
    push(learner, engine, 1, 2.0)
    assert_sampled(one(engine), model, 1, 2.0)


def restart(fake):
    """Let the server forget all that a run has given it, as a new process does."""
    fake.weights, fake.adapters = "default", {}


def test_a_restarted_server_is_lost_and_gets_frozen_weights_and_adapter_again(
    lora_fake, checkpoints
):
    engine, learner = connected(lora_fake, lora=LORA), Learner(checkpoints[1][1])
    push(learner, engine, 4, 2.0)
    restart(lora_fake)
    with pytest.raises(EngineLost, match="was restarted"):
        one(engine)  # it does not know the adapter
    asyncio.run(engine.connect())
    assert push(learner, engine, 4, 2.0) == 4 * 16
    assert lora_fake.full_syncs == 2
    assert_sampled(one(engine), checkpoints[1][1], 4, 2.0)


@pytest.fixture
def two(checkpoints):
    with contextlib.ExitStack() as stack:
        made = [FakeVLLM(checkpoints[0][0], model_shape(HF)) for _ in range(2)]
        for fake in made:
            fake.told["adapters"] = LIMITS
            stack.enter_context(fake.server)
        yield made


def fleet_of(fakes, checkpoints):
    by_url = {fake.server.url: fake for fake in fakes}
    made = ServerFleet(
        lambda url: engine_of(by_url[url], retries=0, lora=LORA), lambda: list(by_url)
    )
    asyncio.run(made.start(checkpoints[0][0]))
    return made


async def sample(fleet, count=10):
    prompts = [[i, i + 1, 5] for i in range(3, 3 + count)]
    calls = (fleet.generate(p, Sampling(1.0, 6), seed=i) for i, p in enumerate(prompts))
    return await asyncio.gather(*calls)


def test_a_server_that_comes_back_gets_frozen_weights_and_adapter_and_no_request_before(
    two, checkpoints
):
    fleet, learner = fleet_of(two, checkpoints), Learner(checkpoints[1][1])
    assert push(learner, fleet, 0, 1.0) == 4 * 16
    assert [list(fake.adapters) for fake in two] == [["lora-run@0"]] * 2
    for done in asyncio.run(sample(fleet)):
        assert_sampled(done, checkpoints[1][1], 0, 1.0)
    assert all(fake.sampled for fake in two)
    assert fleet.adapter == "lora-run"
    lost = next(each for each in fleet._all if each.name == two[1].server.url)
    fleet._lose(lost, EngineLost("gone"))
    restart(two[1])
    begun = asyncio.Event()

    async def back():
        original, asked = lost.engine.load_weights, two[1].server.count(GENERATE)

        async def load(*args):
            begun.set()
            seen = two[1].server.count(GENERATE)
            assert seen > asked  # the checks of its start
            await sample(fleet, 4)
            assert two[1].server.count(GENERATE) == seen
            await original(*args)

        lost.engine.load_weights = load
        learner.version, learner.adapter.bias = 1, 3.0
        await push_weights(learner, fleet)

    asyncio.run(back())
    assert begun.is_set()
    assert [fake.full_syncs for fake in two] == [1, 2]
    two[1].sampled = 0
    for done in asyncio.run(sample(fleet)):
        assert_sampled(done, checkpoints[1][1], 1, 3.0)
    assert two[1].sampled


def test_what_is_sent_is_what_the_guard_lets_through():
    from onepolicy.rollout.vllm.guard import ENDPOINTS

    sent = dialect.VLLMDialect
    assert {sent.generate_path, sent.load_adapter_path, sent.unload_adapter_path} <= ENDPOINTS
