"""Engines whose weights two processes share: as a replica of Ray with two devices, and as a server
of two workers."""

import asyncio

import pytest
import torch

from onepolicy.config import ModelConfig, TrainingError
from onepolicy.models.load import load_model, read_config
from onepolicy.rollout.vllm.engine import VLLMEngine
from onepolicy.types import Sampling
from support.vllm_engines import (
    CONFIG,
    MAX_LEN,
    ServerProcess,
    alone,
    check_follows,
    connect,
    make_checkpoints,
    prompts,
    rules_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.process]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """vLLM 0.30 reloads experts on a CPU only if each process has a multiple of 32 rows of them."""
    return make_checkpoints(tmp_path_factory.mktemp("models"), expert_size=64)


@pytest.fixture(scope="module")
def models(folders):
    return [
        load_model(ModelConfig(path=str(folder)), torch.float32, torch.device("cpu"))
        for folder in folders
    ]


@pytest.fixture(scope="module")
def parallel(folders):
    model = ModelConfig(path=str(folders[0]))
    config = CONFIG.model_copy(update={"tensor_parallel_size": 2})
    hf = read_config(model)
    engine = VLLMEngine(model, hf, config, route_spec=rules_of(hf), max_len=MAX_LEN, cpu=True)
    yield engine
    engine.llm.engine_core.shutdown()


def test_both_processes_follow_the_learner(parallel, models):
    assert len(parallel.llm.collective_rpc("onepolicy_describe")) == 2
    check_follows(parallel, models[0])
    weights = models[1].state_dict()
    asyncio.run(parallel.load_weights(weights.items(), 7))
    assert parallel.version == 7
    check_follows(parallel, models[1])
    (done,) = alone(parallel, [(prompts(1)[0], Sampling(1.0, 8), 3)])
    assert (done.version == 7).all()


def test_both_workers_of_a_server_follow_the_learner(folders, models, tmp_path):
    server = ServerProcess(folders[0], tmp_path / "log", settings=["tensor_parallel_size=2"])
    try:
        engine = connect(server.wait_until_ready(), folders[0])
        asyncio.run(engine.load_weights(models[1].state_dict().items(), 5))
        assert engine.version == 5
        check_follows(engine, models[1])
    finally:
        server.stop()


def test_a_sync_that_breaks_off_is_an_error_and_the_next_one_repairs_it(parallel, models):
    def breaks_off():
        for number, item in enumerate(models[0].state_dict().items()):
            if number == 9:
                raise TrainingError("the learner is gone")
            yield item

    with pytest.raises(TrainingError, match="the learner is gone"):
        asyncio.run(parallel.load_weights(breaks_off(), 8))
    assert parallel.version == -1
    asyncio.run(parallel.load_weights(models[0].state_dict().items(), 9))
    check_follows(parallel, models[0])


def test_a_tensor_that_no_process_takes_is_named(parallel, models):
    weights = models[0].state_dict() | {"model.layers.0.mlp.nothing.weight": torch.zeros(3)}
    with pytest.raises(Exception, match="nothing"):
        asyncio.run(parallel.load_weights(weights.items(), 10))
    assert parallel.version == -1
    asyncio.run(parallel.load_weights(models[1].state_dict().items(), 11))
    check_follows(parallel, models[1])
