"""A run's part of train.lora.sync = native on a SGLang server: the adapters that a server holds.

SGLang 0.5.23 loads an adapter from a folder under a name, and a request names it in `lora_path`.
Without that field the frozen weights are sampled. The name carries the version. No reply says which
adapter sampled, so a completion has the name that its own request carried. SGLang refuses a name
that it never had. But it loads one that was unloaded again, by itself, while its folder exists.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from onepolicy.config import ModelConfig, SGLangConfig, TrainingError, UsageError
from onepolicy.config.lora import LoraConfig
from onepolicy.errors import short_repr
from onepolicy.interfaces import AdapterSource
from onepolicy.rollout.servers.http import EngineClient
from onepolicy.rollout.servers.replies import MalformedReply, adapter_names, get_field
from onepolicy.rollout.sglang.handshake import SGLangServerInfo
from onepolicy.sync.adapters import linear_layers
from onepolicy.sync.weight_files import WeightFiles

LOAD, UNLOAD = "/load_lora_adapter", "/unload_lora_adapter"
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "o_proj": "o_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "down_proj": "down_proj",
}
"""Layers that may have an adapter here -> SGLang's layer that they are part of."""


class SGLangAdapters:
    """The adapters in one SGLang server. A run keeps one there, of its newest version."""

    def __init__(self, config: LoraConfig, model: ModelConfig, engine: SGLangConfig) -> None:
        """Raise UsageError for targets that SGLang cannot compute with."""
        self._config, self._layers = config, layer_names(config, model)
        self._where = f"the SGLang server at {engine.one_url}"
        self._files = WeightFiles(engine.sync_dir)
        self._number = 0  # of loads: SGLang must never find an older version in a folder
        self._held: list[str] = []  # names of all adapters that the server has
        self.name: str | None = None  # of this run's, with its version; requests carry it
        self.lack_base = True  # the server was not sent the frozen weights yet

    async def start(self, client: EngineClient, info: SGLangServerInfo) -> None:
        """Begin with a server that was just connected, and see what it holds.

        Raises UsageError if it cannot take this run's adapters.
        """
        self._check_limits(info)
        self.forget()
        self._held = await client.get("/v1/models", parse=adapter_names)

    def _check_limits(self, info: SGLangServerInfo) -> None:
        rank, limits, where = self._config.rank, info.adapters, self._where
        again = (
            f"start it with --enable-lora --max-lora-rank {rank} --lora-target-modules "
            f"{' '.join(self._layers)}"
        )
        if limits is None:
            raise UsageError(
                f"train.lora.sync: native, but {where} was started without adapters; {again}, or "
                "use train.lora.sync = merged"
            )
        if info.ranks != 1:
            raise UsageError(
                f"train.lora.sync: native, but {where} has {info.ranks} ranks, with which adapters "
                "were never run; use train.lora.sync = merged"
            )
        if rank > limits.rank:
            raise UsageError(
                f"train.lora.rank: {rank}, but {where} takes adapters of rank {limits.rank} at "
                f"most; {again}, lower the rank, or use train.lora.sync = merged"
            )
        taken = {FUSED.get(name, name) for name in limits.layers}
        missing = [name for name in self._layers if FUSED[name] not in taken]
        if missing and "all" not in taken:
            raise UsageError(
                f"train.lora.targets: they need an adapter on {', '.join(missing)}, but {where} "
                f"takes them on {', '.join(sorted(limits.layers))} only; {again}"
            )

    def forget(self) -> None:
        """Name no adapter in requests, because the server is being sent the frozen weights."""
        self.name, self.lack_base = None, True

    async def load(self, client: EngineClient, adapter: AdapterSource, version: int) -> None:
        """Unload what the server has, and load this version of the adapter from its files.

        client: without retries, because a second load of one name is refused. No request may be
        running: SGLang waits for those that name an adapter before it unloads that.
        """
        self.name = None
        self._number += 1
        folder = self._files.folder / f"adapter_{self._number}"
        folder.mkdir()
        adapter.write(folder)
        while self._held:
            await client.post(UNLOAD, {"lora_name": self._held[-1]}, parse=_check_done)
            self._held.pop()
        self._remove_all_but(folder)
        loaded = f"{adapter.name}@{version}"
        body = {"lora_name": loaded, "lora_path": str(folder)}
        has = await client.post(LOAD, body, parse=_check_done)
        if has != {loaded: str(folder)}:
            raise TrainingError(
                f"train.lora.sync: native, but {self._where} holds the adapters {short_repr(has)} "
                f"after {loaded!r} was loaded alone; use a server of this run only"
            )
        self._held.append(loaded)
        self.name = loaded

    def check_reply(self, versions: Tensor, asked: str | None) -> None:
        """Raise TrainingError if tokens are of other versions than the adapter that was asked for.

        versions: [n] int32, of the weights that the server says it sampled them with.
        """
        if asked is None:
            return
        found = versions.unique().tolist()
        if found not in ([], [int(asked.rpartition("@")[2])]):
            raise TrainingError(
                f"rollout.engine.url: {self._where} was asked for the adapter {asked!r}, but "
                f"sampled with weights of versions {found}"
            )

    def _remove_all_but(self, kept: Path) -> None:
        for folder in self._files.folder.glob("adapter_*"):
            if folder != kept:
                shutil.rmtree(folder, ignore_errors=True)


def layer_names(config: LoraConfig, model: ModelConfig) -> list[str]:
    """Return the last part of the name of every layer with an adapter, such as `q_proj`.

    Raises UsageError for targets that were never run in SGLang. It would put adapters on the
    experts too where it has them on a dense MLP.
    """
    names = linear_layers(
        config,
        model,
        refused=("experts", "routers", "dense"),
        reason="are not sent to SGLang here (its CPU kernels of experts take none)",
    )
    unknown = [name for name in names if name not in FUSED]
    if unknown:
        raise UsageError(
            f"train.lora.sync: native, but adapters on {', '.join(unknown)} were never run in "
            "SGLang; use train.lora.sync = merged"
        )
    return names


def _check_done(reply: Any) -> dict[str, str]:
    """Return the adapters that the server holds, by name. Raise MalformedReply after a failure."""
    if not isinstance(reply, dict) or reply.get("success") is not True:
        raise MalformedReply(short_repr(reply))
    return {
        str(name): str(path) for name, path in get_field(reply, "loaded_adapters", dict).items()
    }
