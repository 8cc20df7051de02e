"""One engine of each kind per session."""

import asyncio

import pytest
import torch

from onepolicy.config import ModelConfig
from onepolicy.models.load import load_model
from support.small_policy import policy  # noqa: F401
from support.vllm_engines import ServerProcess, make_checkpoints, open_engine


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Make two checkpoints of one random MoE."""
    return make_checkpoints(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def models(folders):
    return [
        load_model(ModelConfig(path=str(folder)), torch.float32, torch.device("cpu"))
        for folder in folders
    ]


@pytest.fixture(scope="session")
def shared(folders):
    torch.set_num_threads(1)
    return open_engine(folders[0])


@pytest.fixture(scope="session")
def fresh(folders):
    """Start engines that loaded the first and the second checkpoint and never others."""
    return [open_engine(folder) for folder in folders]


@pytest.fixture(scope="session")
def server(folders, tmp_path_factory):
    server = ServerProcess(folders[0], tmp_path_factory.mktemp("server") / "log")
    try:
        yield server.wait_until_ready()
    finally:
        server.stop()


@pytest.fixture
def engine(shared, models):
    """Return the session's engine with the first checkpoint and nothing cached."""
    asyncio.run(shared.load_weights(models[0].state_dict().items(), 0))
    return shared
