"""Several servers as one engine, from the settings."""

from __future__ import annotations

import asyncio
import dataclasses
import pkgutil

from onepolicy.config import ServerEngineConfig
from onepolicy.models.load import read_config
from onepolicy.rollout.fleet.servers import Server, ServerFleet
from onepolicy.rollout.servers.addresses import server_urls
from onepolicy.rollout.servers.start_up import refuse_nccl_without_cuda
from onepolicy.rollout.spec import EngineSpec

CLIENTS = {
    "vllm-server": "onepolicy.rollout.vllm.server:make_client",
    "sglang": "onepolicy.rollout.sglang.engine:make_client",
}
"""The client of a server of each rollout.engine.kind, which is not connected."""


def build_fleet(spec: EngineSpec) -> ServerFleet:
    """Build the engine, connect all servers and load the model's weights into them."""
    config = spec.config
    assert isinstance(config, ServerEngineConfig)
    refuse_nccl_without_cuda(spec)
    make = pkgutil.resolve_name(CLIENTS[config.kind])

    def make_one(url: str) -> Server:
        own = config.model_copy(update={"url": url})
        client: Server = make(dataclasses.replace(spec, config=own))
        return client

    vocab = read_config(spec.model).get_text_config().vocab_size
    fleet = ServerFleet(make_one, lambda: server_urls(config.url), vocab=vocab)
    asyncio.run(fleet.start(spec.model.path))
    return fleet
