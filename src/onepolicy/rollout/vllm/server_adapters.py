"""A run's part of train.lora.sync = native on a vLLM server: the adapters that a server holds.

vLLM's server names the adapter of a request in its field `model`, and says in the reply's which one
sampled. The name carries the version. Without the field the frozen weights are sampled.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from onepolicy.config import ModelConfig, TrainingError, UsageError
from onepolicy.config.lora import LoraConfig
from onepolicy.interfaces import AdapterSource
from onepolicy.rollout.servers.http import EngineClient
from onepolicy.rollout.servers.replies import adapter_names, get_field, make_printable
from onepolicy.rollout.vllm.adapter import layer_names
from onepolicy.rollout.vllm.handshake import VLLMServerInfo
from onepolicy.rollout.vllm.served_adapter import CONFIG, WEIGHTS
from onepolicy.types import Completion

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class ServerAdapters:
    """The adapters in one vLLM server. A run keeps one there, of its newest version."""

    def __init__(self, config: LoraConfig, model: ModelConfig, url: str) -> None:
        """Raise UsageError for targets that vLLM cannot compute with. url: of the server."""
        self._config, self._path = config, model.path
        self._where = f"the vLLM server at {url}"
        self._layers = layer_names(config, model)
        self._held: list[str] = []  # names of all adapters that the server has
        self.name: str | None = None  # of this run's, with its version; requests carry it
        self.lack_base = True  # the server was not sent the frozen weights yet

    async def start(self, client: EngineClient, info: VLLMServerInfo) -> None:
        """Begin with a server that was just connected, and see what it holds.

        Raises UsageError if it cannot take this run's adapters.
        """
        self._check_limits(info)
        self.forget()
        self._held = await client.get("/v1/models", parse=adapter_names)

    def _check_limits(self, info: VLLMServerInfo) -> None:
        rank, limits, where = self._config.rank, info.adapters, self._where
        again = f"start it with `onepolicy engine serve {self._path} lora_rank={rank}`"
        if limits is None:
            raise UsageError(
                f"train.lora.sync: native, but {where} was started without adapters; {again}, or "
                "use train.lora.sync = merged"
            )
        if info.workers != 1:
            raise UsageError(
                f"train.lora.sync: native, but {where} has {info.workers} workers, with which "
                "adapters were never run; use train.lora.sync = merged"
            )
        if rank > limits.rank:
            raise UsageError(
                f"train.lora.rank: {rank}, but {where} takes adapters of rank {limits.rank} at "
                f"most; {again}, lower the rank, or use train.lora.sync = merged"
            )
        missing = sorted(set(self._layers) - set(limits.layers))
        if missing:
            raise UsageError(
                f"train.lora.targets: they need an adapter on {', '.join(missing)}, but {where} "
                f"takes them on {', '.join(limits.layers)} only; {again}, without an own "
                "--lora-target-modules"
            )

    def forget(self) -> None:
        """Name no adapter in requests, because the server is being sent the frozen weights."""
        self.name, self.lack_base = None, True

    async def load(self, client: EngineClient, name: str, version: int, folder: str) -> None:
        """Unload what the server has, and load the adapter in this folder of the server.

        client: without retries, because a second load of one name is refused.
        """
        self.name = None
        while self._held:
            await client.post(UNLOAD, {"lora_name": self._held[-1]})
            self._held.pop()
        loaded = f"{name}@{version}"
        await client.post(LOAD, {"lora_name": loaded, "lora_path": folder})
        self._held.append(loaded)
        self.name = loaded

    def read_reply(self, part: Completion, reply: Any, asked: str | None) -> Completion:
        """Return the completion with the adapter and the version that the reply names.

        asked: the adapter that the request named. Raises TrainingError if the reply names another.
        """
        told: str = make_printable(get_field(reply, "model", str))
        name, at, version = told.rpartition("@")
        if asked is None:
            if at and "/" not in told and version.isdecimal():
                return dataclasses.replace(part, adapter=name)
            return part
        if told != asked:
            raise TrainingError(
                f"rollout.engine.url: {self._where} was asked for the adapter {asked!r}, but its "
                f"reply names {told[:200]!r}: another adapter, or the frozen weights, sampled"
            )
        return dataclasses.replace(
            part, adapter=name, version=torch.full_like(part.version, int(version))
        )


def read_adapter(adapter: AdapterSource) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of an adapter as its file names them, and its adapter_config.json."""
    with tempfile.TemporaryDirectory(prefix="onepolicy-adapter-") as folder:
        adapter.write(Path(folder))
        tensors = load_file(Path(folder) / WEIGHTS)
        settings = (Path(folder) / CONFIG).read_text(encoding="utf-8")
    return tensors, settings
