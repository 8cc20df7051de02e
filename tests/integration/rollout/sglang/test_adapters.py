"""Adapters that a SGLang server loads by name (train.lora.sync = native), on a server that keeps
SGLang 0.5.23's contract: an adapter there adds the sum of its tensors to the logit of token 0."""

import asyncio
import threading

import pytest
import torch

from onepolicy.config import ModelConfig, SGLangConfig, TrainingError, UsageError
from onepolicy.config.lora import LoraConfig
from onepolicy.models.load import read_config
from onepolicy.rollout.remote.client import EngineLost
from onepolicy.rollout.remote.engine import RemoteEngine
from onepolicy.sync.push import push_weights
from onepolicy.types import Sampling
from support.adapter_learner import Adapter, Learner, out_of_space
from support.fake_sglang import FakeSGLang
from support.fake_sglang_adapters import TAKES_ADAPTERS
from support.http_server import Reply
from support.sglang_engines import PROMPT, RULES, bigram, play
from support.waiting import LIMIT_S, until

LORA = LoraConfig(rank=4, targets=("attention",), sync="native")


@pytest.fixture
def fake(models):
    with FakeSGLang(models[0][1], info=dict(TAKES_ADAPTERS)) as server:
        yield server


def engine_of(fake, lora=LORA, **settings):
    model = ModelConfig(path=fake.folder)
    usual = {"url": fake.url, "dtype": "float32", "retries": 2, "timeout_s": LIMIT_S}
    config = SGLangConfig(**usual | settings)
    return RemoteEngine(model, read_config(model), config, route_spec=RULES, max_len=200, lora=lora)


def connected(fake, lora=LORA, **settings):
    engine = engine_of(fake, lora, **settings)
    asyncio.run(engine.connect())
    return engine


def one(engine, length=6):
    return play(engine, (PROMPT, Sampling(1.0, length)))[0]


def logp_of(folder, path, biases):
    """Return log-probabilities [n] of a path's last tokens; biases [n] of their adapters."""
    start = len(path) - len(biases) - 1
    logits = bigram(folder, path)[start:-1].clone()
    logits[:, 0] += torch.tensor(biases)
    found = torch.log_softmax(logits, -1)
    return found.gather(-1, torch.tensor(path[start + 1 :])[:, None])[:, 0]


def assert_sampled(done, folder, version, bias):
    assert (done.adapter, set(done.version.tolist())) == ("lora-run", {version})
    path = [*PROMPT, *done.token_ids.tolist()]
    expected = logp_of(folder, path, [bias] * len(done.token_ids))
    torch.testing.assert_close(done.logp, expected, atol=1e-5, rtol=0)


def push(learner, engine, version, bias):
    learner.version, learner.adapter.bias = version, bias
    return asyncio.run(push_weights(learner, engine))


def whole_syncs(fake):
    return sum(r.path == "/begin_weight_update" for r in fake.http.asked)


@pytest.mark.few(1)
@pytest.mark.parametrize("sync", ["gloo", "disk"])
def test_every_version_is_loaded_by_its_name_and_the_last_one_unloaded(
    fake, models, tmp_path, sync
):
    engine = connected(fake, sync=sync, sync_dir=str(tmp_path))
    other, folder = models[1]  # not the weights that the server was started with
    learner = Learner(other)
    assert one(engine).adapter is None
    for version, bias in enumerate((0.0, 3.0, -2.0)):
        assert push(learner, engine, version, bias) == 4 * 16
        assert list(fake.adapters) == [f"lora-run@{version}"]
        assert not fake.cache
        assert_sampled(one(engine), folder, version, bias)
    assert whole_syncs(fake) == (sync == "gloo")  # the frozen weights travel once
    sent = [r.body for r in fake.http.asked if r.path == "/generate"]
    assert ("lora_path" in sent[0], sent[-1]["lora_path"]) == (False, "lora-run@2")
    assert len(list(tmp_path.glob("*/adapter_*"))) == 1  # what an unloaded name could load again


def test_the_adapters_of_an_earlier_run_are_unloaded(fake, models, tmp_path):
    for name in ("lora-run@0", "another"):
        (tmp_path / name).mkdir()
        Adapter().write(tmp_path / name)
        fake.read_adapter(name, str(tmp_path / name))
    engine = connected(fake)
    push(Learner(models[0][0]), engine, 0, 1.0)
    assert list(fake.adapters) == ["lora-run@0"]
    assert_sampled(one(engine), models[0][1], 0, 1.0)


def test_a_request_that_an_update_interrupts_goes_on_with_the_new_adapter(fake, models):
    engine, learner = connected(fake), Learner(models[0][0])
    push(learner, engine, 0, 0.0)
    fake.hold = 5

    async def interrupted():
        task = asyncio.create_task(engine.generate(PROMPT, Sampling(1.0, 20), seed=1))
        await until(lambda: fake.held)
        learner.version, learner.adapter.bias = 1, 4.0
        await push_weights(learner, engine)
        return await task

    done = asyncio.run(interrupted())
    assert done.version.tolist() == [0] * 5 + [1] * 15
    assert done.adapter == "lora-run"
    path = [*PROMPT, *done.token_ids.tolist()]
    expected = logp_of(models[0][1], path, [0.0] * 5 + [4.0] * 15)
    torch.testing.assert_close(done.logp, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("reloads", [False, True])
def test_a_request_that_arrives_after_its_adapter_was_replaced_is_sent_again(
    fake, models, monkeypatch, reloads
):
    """SGLang refuses the old name, or loads it again if its folder is there: never unseen."""
    engine, learner = connected(fake), Learner(models[0][0])
    push(learner, engine, 0, 0.0)
    if reloads:
        monkeypatch.setattr(engine.dialect, "_remove_all_but", lambda _: None)
    arrived, let_in = threading.Event(), threading.Event()
    handle = fake.http.handlers["POST /generate"]

    def late(request):
        arrived.set()
        assert let_in.wait(LIMIT_S)
        return handle(request)

    async def replaced():
        fake.http.handlers["POST /generate"] = late
        task = asyncio.create_task(engine.generate(PROMPT, Sampling(1.0, 6), seed=1))
        await until(arrived.is_set)
        learner.version, learner.adapter.bias = 1, 4.0
        await push_weights(learner, engine)
        let_in.set()
        return await task

    assert_sampled(asyncio.run(replaced()), models[0][1], 1, 4.0)
    assert fake.reloads == ["lora-run@0"] * reloads
    assert engine.take_metrics()["rollout/requests_resumed"] == 1


def test_a_request_without_a_name_has_no_adapter(fake, models):
    engine = connected(fake)
    push(Learner(models[0][0]), engine, 1, 1.0)
    engine._adapters.name = None  # a bug
    done = one(engine)
    assert done.adapter is None
    path = [*PROMPT, *done.token_ids.tolist()]
    torch.testing.assert_close(done.logp, logp_of(models[0][1], path, [0.0] * 6), atol=1e-5, rtol=0)


def test_tokens_of_another_version_than_the_adapter_stop_the_run(fake, models):
    engine = connected(fake)
    push(Learner(models[0][0]), engine, 1, 1.0)
    asyncio.run(engine.dialect.end_update(2))
    fake.version = engine.dialect.weights_id
    with pytest.raises(TrainingError, match=r"the adapter 'lora-run@1', but .* versions \[2\]"):
        one(engine)


UNFIT = [
    (
        {"enable_lora": None},
        4,
        "native, but the SGLang server at http.* was started without adapters; start it with "
        "--enable-lora --max-lora-rank 4 --lora-target-modules k_proj o_proj q_proj v_proj, or",
    ),
    ({"max_lora_rank": None}, 4, "was started without adapters"),
    ({}, 9, "rank: 9, but .* takes adapters of rank 8 at most; .*rank 9 .*, lower"),
    ({"lora_target_modules": ["o_proj"]}, 4, "on k_proj, q_proj, v_proj, but .* on o_proj only"),
    ({"tp_size": 2}, 4, "has 2 workers, with which adapters were never run"),
]


def test_a_server_that_cannot_take_the_adapters_is_refused(fake, subtests):
    for targets in (None, ("experts",), ("dense",)):
        lora = LoraConfig(rank=4, targets=targets, sync="native")
        with pytest.raises(UsageError, match="are not sent to SGLang here"):
            engine_of(fake, lora)
    assert not fake.http.asked
    for info, rank, message in UNFIT:
        fake.info = TAKES_ADAPTERS | info
        lora = LORA.model_copy(update={"rank": rank})
        with subtests.test(info=info), pytest.raises(UsageError, match=message):
            connected(fake, lora)
    assert not [r for r in fake.http.asked if r.path == "/generate"]


def test_sglangs_other_names_of_the_layers_are_known(fake):
    for layers in (["qkv_proj", "o_proj"], ["all"]):
        fake.info["lora_target_modules"] = layers
        connected(fake)


def test_an_adapter_that_cannot_be_written_changes_nothing(fake, models, monkeypatch):
    engine, learner = connected(fake), Learner(models[0][0])
    push(learner, engine, 0, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(learner.adapter, "write", out_of_space)
        with pytest.raises(OSError, match="No space left"):
            push(learner, engine, 1, 2.0)
    assert engine.version == 0
    assert_sampled(one(engine), models[0][1], 0, 1.0)
    push(learner, engine, 1, 2.0)
    assert_sampled(one(engine), models[0][1], 1, 2.0)


def test_an_adapter_that_the_server_does_not_load_is_an_error(fake, models):
    engine = connected(fake)
    failed = {"success": False, "error_message": "rank 4 is incompatible", "loaded_adapters": {}}
    fake.http.handlers["POST /load_lora_adapter"] = lambda _: Reply(failed, 400)
    with pytest.raises(TrainingError, match=r"load_lora_adapter.*rank 4 is incompatible"):
        push(Learner(models[0][0]), engine, 0, 0.0)
    assert (engine.version, fake.mode) == (-1, "abort")
    with pytest.raises(RuntimeError, match="failed half-way"):
        one(engine)


@pytest.mark.parametrize(
    "held", [{}, {"lora-run@0": "/elsewhere"}, {"lora-run@0": "/x", "lora-x@3": "/y"}]
)
def test_a_server_that_then_holds_other_adapters_is_an_error(fake, models, held):
    engine, loaded = connected(fake), {"success": True, "loaded_adapters": held}
    fake.http.handlers["POST /load_lora_adapter"] = lambda _: loaded
    with pytest.raises(TrainingError, match="use a server of this run only"):
        push(Learner(models[0][0]), engine, 0, 0.0)


def restart(fake):
    """Let the server forget all that a run has given it, as a new process does."""
    fake.version = "default"
    fake.start_adapters()


def test_a_restarted_server_is_lost_and_gets_frozen_weights_and_adapter_again(fake, models):
    engine, learner = connected(fake), Learner(models[1][0])
    push(learner, engine, 4, 2.0)
    restart(fake)
    with pytest.raises(TrainingError):
        one(engine)  # it does not know the adapter
    with pytest.raises(EngineLost, match="was restarted"):
        push(learner, engine, 5, 2.0)
    asyncio.run(engine.connect())
    assert push(learner, engine, 4, 2.0) == 4 * 16
    assert whole_syncs(fake) == 2
    assert_sampled(one(engine), models[1][1], 4, 2.0)
