"""What every engine behind HTTP goes through before a run samples from it."""

from __future__ import annotations

from onepolicy.config import ModelConfig, ServerEngineConfig, UsageError
from onepolicy.interfaces import LastingEngine
from onepolicy.models.load import read_config
from onepolicy.rollout.servers.http import EngineClient
from onepolicy.rollout.spec import EngineSpec
from onepolicy.sync.check import adopt


def refuse_nccl_without_cuda(spec: EngineSpec) -> None:
    config, device = spec.config, spec.device
    assert isinstance(config, ServerEngineConfig)
    if config.sync == "nccl" and device.type != "cuda":
        raise UsageError(f"rollout.engine.sync: nccl, but the trainer computes on the {device.type}; use gloo or disk")


async def connect(engine: LastingEngine, client: EngineClient, model: ModelConfig) -> None:
    """Connect, and give the server the weights of `model`, like an engine that loaded them itself."""
    with client.starting():
        await engine.connect()
        await adopt(engine, model.path, vocab=read_config(model).get_text_config().vocab_size)
    engine.take_metrics()
