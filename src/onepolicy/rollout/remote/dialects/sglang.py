"""SGLang 0.5.23's server."""

from __future__ import annotations

import dataclasses
import secrets
import shutil
from pathlib import Path
from typing import Any

from onepolicy.config import ModelConfig, SGLangConfig, TrainingError, UsageError
from onepolicy.config.lora import LoraConfig
from onepolicy.errors import short_repr
from onepolicy.interfaces import AdapterSource, EngineCaps, NamedWeights
from onepolicy.models.checksum import ChecksumTable
from onepolicy.rollout.remote.client import EngineClient, RequestGate
from onepolicy.rollout.remote.dialect import Dialect, PlaceAdapter, Request
from onepolicy.rollout.remote.dialects import sglang_weights as sync
from onepolicy.rollout.remote.dialects.sglang_adapters import layer_names, missing_layers
from onepolicy.rollout.remote.dialects.sglang_handshake import ModelInfo, WeightsId, handshake
from onepolicy.rollout.remote.dialects.sglang_replies import (
    kept_tokens,
    parse_reply,
    request_body,
    uses_top_k_or_top_p,
)
from onepolicy.rollout.remote.replies import Reply, check_success
from onepolicy.sync.weight_files import num_files
from onepolicy.types import Completion, Sampling

MIN_TEMPERATURE = 1e-6  # SGLang samples greedily below it
MASK_BYTES = 12  # of JSON for one token id of a sampling mask, at most
FLUSH_TIMEOUT_S = 10  # for the server to clean up requests that have ended


class _Adapters(Reply):
    loaded_adapters: dict[str, str]


class SGLangDialect(Dialect):
    """A SGLang server.

    A request may span a weight update, because the replies name the weights that sampled each
    token. No reply says which adapter sampled, so a completion has the name that its own request
    carried. SGLang refuses the name of an adapter that it never had. But it loads one that was
    unloaded again, by itself, while its folder exists.
    """

    server = "the SGLang server"
    generate_path = "/generate"
    names_weights = True
    adapters_are_files = True
    config: SGLangConfig

    version = 0
    _weights = WeightsId()
    _flush = True  # whether the load of an update empties the cache
    _loads = 0  # of adapters: SGLang must never find an older version in a folder
    max_masked_tokens = 0
    """Most tokens in a sampling mask; more return no log-probabilities."""

    async def handshake(self, caps: EngineCaps) -> None:
        self.info, self.max_masked_tokens, self._weights = await handshake(
            self.client, self.hf_config, self.config, caps, self.shape
        )
        self.version = self._weights.version_number

    async def claim(self) -> None:
        await self._rename(dataclasses.replace(self._weights, run=secrets.token_hex(4)))

    async def read_weights_id(self) -> str:
        return (await self.client.get("/model_info", parse=ModelInfo.read)).weight_version

    @property
    def weights_id(self) -> str:
        return str(self._weights)

    @property
    def is_initial(self) -> bool:
        return self._weights.is_initial

    @property
    def canary(self) -> list[float] | None:
        return self._weights.canary_values()

    async def store_canary(self, canary: list[float]) -> None:
        await self._rename(self._weights.with_canary(canary))

    async def _rename(self, weights: WeightsId) -> None:
        """Rename the server's weights. No request may be running.

        A running request's tokens would seem to be sampled by other weights.
        """
        await self._send_name(weights)
        self._weights = weights

    async def _send_name(self, weights: WeightsId) -> None:
        # by default SGLang aborts all requests, of other clients too
        body = {"new_version": str(weights), "abort_all_requests": False}
        await self.client.post("/update_weight_version", body, parse=check_success)

    # --- requests ---------------------------------------------------------------------------------

    def check_sampling(self, sampling: Sampling, caps: EngineCaps) -> None:
        if 0 < sampling.temperature < MIN_TEMPERATURE:
            raise UsageError(
                f"temperature: SGLang takes {sampling.temperature} for 0; use 0 (greedy) or at "
                f"least {MIN_TEMPERATURE}"
            )
        if sampling.min_p:
            raise UsageError(
                "min_p: SGLang returns the tokens that top_k and top_p leave, not those of min_p; "
                "leave it out"
            )
        if not uses_top_k_or_top_p(sampling):
            return
        limit = self.max_masked_tokens
        if kept_tokens(sampling, self.shape.vocab) > limit:
            fix = "start the server with a larger --sampling-mask-max-tokens"
            if limit:
                fix = f"set top_k to 1..{limit} beside top_p, or {fix}"
            raise UsageError(
                "top_k: SGLang returns the log-probabilities of a narrowed distribution for up to "
                f"{limit} tokens; {fix}"
            )
        if sampling.top_logprobs:
            raise UsageError(
                "top_logprobs: SGLang returns those of the whole distribution; leave out top_k and "
                "top_p"
            )

    def body(self, request: Request) -> dict[str, Any]:
        return request_body(request, self.shape, self._weights.prefix_key)

    def max_reply_bytes(self, request: Request) -> int:
        mask, sampling = 0, request.sampling
        if uses_top_k_or_top_p(sampling):
            mask = sampling.max_tokens * kept_tokens(sampling, self.shape.vocab) * MASK_BYTES
        return mask + super().max_reply_bytes(request)

    def num_likeliest(self, sampling: Sampling) -> int:
        return sampling.top_logprobs

    def parse(self, reply: Any, request: Request) -> Completion:
        part = parse_reply(reply, request, self.shape, self._version_of)
        if request.adapter is None:
            return part
        name, _, version = request.adapter.rpartition("@")
        found = part.version.unique().tolist()
        if found not in ([], [int(version)]):
            raise TrainingError(
                f"rollout.engine.url: {self.where} was asked for the adapter {request.adapter!r}, "
                f"but sampled with weights of versions {found}"
            )
        return dataclasses.replace(part, adapter=name)

    def _version_of(self, text: str) -> int:
        """Return the version of a weights id. Raise EngineLost if this run did not load it."""
        found, newest = WeightsId.parse(text), self._weights
        if found is None or found.run != newest.run:
            raise self.other_weights(text)
        if found.version_number > newest.version_number:
            raise self.other_weights(text)
        return found.version_number

    # --- weights ----------------------------------------------------------------------------------

    @property
    def aborts(self) -> bool:
        return self.config.pause == "abort"

    async def begin_update(self, gate: RequestGate) -> None:
        """Pause the server, and see whether the load must flush the cache.

        It must not while requests keep their keys and values; the new prefix key then separates
        later requests from them.
        """
        await self.client.post("/pause_generation", {"mode": self.config.pause})
        if self.is_initial:  # of which only a part may be left: a later run must reload them
            await self._rename(self._named(0))
        self._flush = self.config.pause != "in_place" or not gate.running

    def _named(self, version: int) -> WeightsId:
        return dataclasses.replace(self._weights, version=str(version))

    async def end_update(self, version: int) -> None:
        self._weights = self._named(version)

    async def resume(self) -> None:
        await self.client.post("/continue_generation", {})

    async def reset_cache(self) -> None:
        await self.client.post("/flush_cache", params={"timeout": str(FLUSH_TIMEOUT_S)})

    async def load_files(self, folder: Path, sums: ChecksumTable, version: int) -> None:
        limit = self.config.timeout_s * num_files(folder)
        await self._load_from(self.client, str(folder), version, limit)

    async def load_checkpoint(self, path: str | None, version: int) -> None:
        path = path or self.info.model
        # once: a repeated load would wait for the first one
        await self._load_from(self.once, path, version, self.checkpoint_limit(path))

    async def _load_from(
        self, client: EngineClient, folder: str, version: int, limit: float
    ) -> None:
        body = {
            "model_path": folder,
            "weight_version": str(self._named(version)),
            "flush_cache": self._flush,
            "abort_all_requests": False,
        }
        await client.post("/update_weights_from_disk", body, parse=check_success, timeout_s=limit)

    async def broadcast(self, tensors: NamedWeights, version: int, *, backend: str) -> None:
        await sync.broadcast_weights(
            self.once,
            tensors,
            str(self._named(version)),
            backend=backend,
            ranks=self.info.workers,
            timeout_s=self.config.timeout_s,
            flush=self._flush,
            bucket_bytes=self.config.bucket_bytes,
        )

    # --- adapters ---------------------------------------------------------------------------------

    load_adapter_path, unload_adapter_path = "/load_lora_adapter", "/unload_lora_adapter"

    def adapter_layers(self, config: LoraConfig, model: ModelConfig) -> list[str]:
        return layer_names(config, model)

    def missing_layers(self, layers: list[str], taken: set[str]) -> list[str]:
        return missing_layers(layers, taken)

    def start_with_adapters(self, path: str, rank: int, layers: list[str]) -> str:
        return (
            f"start it with --enable-lora --max-lora-rank {rank} --lora-target-modules "
            f"{' '.join(layers)}"
        )

    async def prepare_adapter(self, adapter: AdapterSource, version: int) -> PlaceAdapter:
        assert self.files is not None
        self._loads += 1
        folder = self.files.folder / f"adapter_{self._loads}"
        folder.mkdir()
        adapter.write(folder)

        async def place() -> str:
            return str(folder)  # the server reads it there

        return place

    async def unload_adapter(self, name: str) -> None:
        await self.once.post(self.unload_adapter_path, {"lora_name": name}, parse=check_success)

    async def load_adapter(self, name: str, folder: str, version: int) -> None:
        self._remove_all_but(Path(folder))
        body = {"lora_name": name, "lora_path": folder}
        held = await self.once.post(self.load_adapter_path, body, parse=_adapters_of)
        if held != {name: folder}:
            raise TrainingError(
                f"train.lora.sync: native, but {self.where} holds the adapters {short_repr(held)} "
                f"after {name!r} was loaded alone; use a server of this run only"
            )
        await self._send_name(self._named(version))
        await self.reset_cache()

    def _remove_all_but(self, kept: Path) -> None:
        assert self.files is not None
        for folder in self.files.folder.glob("adapter_*"):
            if folder != kept:
                shutil.rmtree(folder, ignore_errors=True)


def _adapters_of(reply: Any) -> dict[str, str]:
    """Return the adapters that the server holds: name -> folder."""
    check_success(reply)
    return _Adapters.read(reply).loaded_adapters
