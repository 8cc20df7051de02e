"""A run's part of train.lora.sync = native: the adapters that one server holds.

A server loads an adapter from a folder under a name, and a request names the one that samples. The
name carries the version. Without a name the frozen weights are sampled.
"""

from __future__ import annotations

from onepolicy.config import ModelConfig, UsageError
from onepolicy.config.lora import LoraConfig
from onepolicy.rollout.remote.dialect import Dialect, ServerInfo
from onepolicy.rollout.remote.replies import Models


class ServerAdapters:
    """The adapters in one server. A run keeps one there, of its newest version."""

    def __init__(self, dialect: Dialect, config: LoraConfig, model: ModelConfig) -> None:
        """Raise UsageError for targets that the server cannot compute with."""
        self._dialect, self._config, self._path = dialect, config, model.path
        self._layers = dialect.adapter_layers(config, model)
        self._held: list[str] = []  # names of all adapters that the server has
        self.name: str | None = None  # of this run's, with its version; requests carry it
        self.lack_base = True  # the server was not sent the frozen weights yet

    async def start(self, info: ServerInfo) -> None:
        """Begin with a server that was just connected, and see its adapters.

        Raises UsageError if it cannot take this run's adapters.
        """
        self._check_limits(info)
        self.forget()
        models = await self._dialect.client.get("/v1/models", parse=Models.read)
        self._held = models.adapters

    def _check_limits(self, info: ServerInfo) -> None:
        rank, limits, where = self._config.rank, info.adapters, self._dialect.where
        again = self._dialect.start_with_adapters(self._path, rank, self._layers)
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
        missing = self._dialect.missing_layers(self._layers, set(limits.layers))
        if missing:
            raise UsageError(
                f"train.lora.targets: they need an adapter on {', '.join(missing)}, but {where} "
                f"takes them on {', '.join(sorted(limits.layers))} only; {again}, without other "
                "--lora-target-modules"
            )

    def forget(self) -> None:
        """Name no adapter in requests, because the server is being sent the frozen weights."""
        self.name, self.lack_base = None, True

    async def load(self, name: str, version: int, folder: str) -> None:
        """Unload the server's adapter, and load the adapter in this folder of the server.

        No request may be running: a server waits for those that name an adapter before it unloads
        that.
        """
        self.name = None
        while self._held:
            await self._dialect.unload_adapter(self._held[-1])
            self._held.pop()
        loaded = f"{name}@{version}"
        await self._dialect.load_adapter(loaded, folder, version)
        self._held.append(loaded)
        self.name = loaded
