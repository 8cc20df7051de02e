"""The checks of a SGLang server before a run: its model, version and settings."""

from __future__ import annotations

import base64
import dataclasses
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field
from transformers import PreTrainedConfig

from onepolicy.config import ServerEngineConfig, UsageError
from onepolicy.interfaces import EngineCaps
from onepolicy.rollout.remote.client import EngineClient
from onepolicy.rollout.remote.dialect import ModelShape, ServerInfo
from onepolicy.rollout.remote.replies import MAX_RANKS, AdapterLimits, Count, Reply, Text

DEFAULT_WEIGHTS_ID = "default"  # SGLang's name of its start-up weights
INITIAL_VERSION = "first"  # our version of the start-up weights
WEIGHTS_ID_PATTERN = re.compile(
    rf"onepolicy\.([^.]*)\.({INITIAL_VERSION}|[0-9]{{1,9}})\.([A-Za-z0-9_=-]*)"
)  # run, version, canary
SGLANG_VERSION = "0.5.23"

# Settings that make SGLang's routes wrong without an error: setting, right value, reason.
_WRONG_ROUTES: tuple[tuple[str, Any, str], ...] = (
    ("pp_size", 1, "each pipeline stage records its own layers only, the others stay zero"),
    (
        "enable_hierarchical_cache",
        False,
        "prefixes from the host's cache return stale routes "
        "(https://github.com/sgl-project/sglang/issues/26975)",
    ),
    ("disaggregation_mode", "null", "the decoding server has no routes of the prompt"),
    ("speculative_algorithm", None, "the buffer of routes is not sized for the tokens it verifies"),
)


class ServerSettings(Reply):
    """The settings of a server that decide whether it fits."""

    version: Text
    model_path: Text
    device: Text = ""
    dtype: Text
    quantization: Text | None = None
    enable_fp32_lm_head: bool | None = None
    max_req_input_len: Count = 0
    sampling_mask_max_tokens: Count = 0
    tp_size: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1
    dp_size: int = 1
    pp_size: int = 1
    enable_deterministic_inference: bool | None = None
    enable_return_routed_experts: bool | None = None
    enable_hierarchical_cache: bool = False
    disaggregation_mode: Text = "null"
    speculative_algorithm: Text | None = None
    enable_lora: bool | None = None
    max_lora_rank: Count | None = None
    lora_target_modules: list[Text] | None = None

    @property
    def adapters(self) -> AdapterLimits | None:
        """The adapters that the server takes, None if it was not started to take any."""
        rank, layers = self.max_lora_rank, self.lora_target_modules
        if not self.enable_lora or rank is None or not layers:  # of adapters at its start
            return None
        return AdapterLimits(rank=rank, layers=layers)


class ModelInfo(Reply):
    """The model that a server has."""

    model_type: Text | None = None
    architectures: list[Text] | None = None
    weight_version: Text


@dataclass(frozen=True, slots=True)
class WeightsId:
    """The name that a run gives to the weights on a server.

    It is all that the server stores for us.
    """

    run: str = ""  # the run that loaded the weights, or connected last
    version: str = INITIAL_VERSION  # of the weights, INITIAL_VERSION for those of the start-up
    canary: str = ""  # base64 of float32: log-probabilities of a fixed batch at the start-up

    def __str__(self) -> str:
        return f"onepolicy.{self.run}.{self.version}.{self.canary}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the parsed id, or None if it is not one of ours."""
        found = WEIGHTS_ID_PATTERN.fullmatch(text)
        if found is None:
            return None
        weights_id = cls(*found.groups())
        try:
            weights_id.canary_values()
        except ValueError:  # not base64, or not a multiple of 4 bytes
            return None
        return weights_id

    @property
    def is_initial(self) -> bool:
        return self.version == INITIAL_VERSION

    @property
    def version_number(self) -> int:
        if self.is_initial:
            return 0
        return int(self.version)

    @property
    def prefix_key(self) -> str:
        """Key of the requests that share prefixes."""
        return f"{self.run}.{self.version}"

    def canary_values(self) -> list[float] | None:
        """Return the canary's log-probabilities, None if it has none."""
        if not self.canary:
            return None
        return np.frombuffer(base64.urlsafe_b64decode(self.canary), dtype="<f4").tolist()

    def with_canary(self, values: list[float]) -> Self:
        data = np.asarray(values, dtype="<f4").tobytes()
        return dataclasses.replace(self, canary=base64.urlsafe_b64encode(data).decode())


async def handshake(
    client: EngineClient,
    hf_config: PreTrainedConfig,
    config: ServerEngineConfig,
    caps: EngineCaps,
    shape: ModelShape,
) -> tuple[ServerInfo, int, WeightsId]:
    """Check the server's model and settings, and end the update and pause of an interrupted run.

    Return also the most tokens of a sampling mask, and the name of its weights. Raises UsageError
    if the server does not fit this run.
    """
    settings = await client.get("/server_info", parse=ServerSettings.read)
    model = await client.get("/model_info", parse=ModelInfo.read)
    where = f"rollout.engine.url: the server at {client.url}"
    _check_model(where, settings, model, hf_config)
    _check_precision(settings, config)
    _check_settings(where, settings, config, caps)
    if caps.returns_routes:
        _check_routes(where, settings)
    with suppress(UsageError):  # if no update of a killed run is open, which would bar any other
        await client.post("/end_weight_update", {})
    await client.post("/continue_generation", {})
    weights_id = WeightsId()
    if model.weight_version != DEFAULT_WEIGHTS_ID:
        weights_id = WeightsId.parse(model.weight_version) or WeightsId(version="0")
    info = ServerInfo(
        model=settings.model_path,
        workers=settings.tp_size,
        cpu=settings.device == "cpu",
        top_logprobs=shape.vocab,
        adapters=settings.adapters,
        seeded=settings.enable_deterministic_inference is True,
    )
    return info, settings.sampling_mask_max_tokens, weights_id


def _check_model(
    where: str, settings: ServerSettings, model: ModelInfo, hf_config: PreTrainedConfig
) -> None:
    if settings.version != SGLANG_VERSION:
        raise UsageError(
            f"{where} is not SGLang {SGLANG_VERSION}, whose replies are known here, but "
            f"{settings.version}"
        )
    served = model.model_type, model.architectures
    if served != (hf_config.model_type, hf_config.architectures):
        raise UsageError(
            f"{where} serves a {served[0]} {served[1]}, model.path is a {hf_config.model_type} "
            f"{hf_config.architectures}; start it with the run's model"
        )


def _check_precision(settings: ServerSettings, config: ServerEngineConfig) -> None:
    if settings.dtype != config.dtype or settings.quantization:
        quantised = ""
        if settings.quantization:
            quantised = f", quantised by {settings.quantization}"
        raise UsageError(
            f"rollout.engine.dtype: {config.dtype}, but the server runs {settings.dtype}"
            f"{quantised}; set it to the server's, or start that with --dtype {config.dtype}"
        )
    has_float32_head = bool(settings.enable_fp32_lm_head)
    if has_float32_head != (config.lm_head == "float32"):
        with_flag = {True: "with", False: "without"}[has_float32_head]
        raise UsageError(
            f"rollout.engine.lm_head: {config.lm_head}, but the server was started {with_flag} "
            "--enable-fp32-lm-head"
        )


def _check_settings(
    where: str, settings: ServerSettings, config: ServerEngineConfig, caps: EngineCaps
) -> None:
    if caps.max_len > settings.max_req_input_len:
        raise UsageError(
            f"rollout.engine.max_len: {caps.max_len}, but the server takes "
            f"{settings.max_req_input_len} tokens; lower it, or start the server with a larger "
            "--context-length or --max-total-tokens"
        )
    for name in ("dp_size", "pp_size"):
        size = getattr(settings, name)
        if config.sync != "disk" and size != 1:
            raise UsageError(
                f"{where} has {name}={size}, and takes broadcast weights only with 1; use sync=disk"
            )


def _check_routes(where: str, settings: ServerSettings) -> None:
    if not settings.enable_return_routed_experts:
        raise UsageError(
            f"{where} does not return routes; start it with --enable-return-routed-experts or set "
            "replay.mode=off"
        )
    for name, right, reason in _WRONG_ROUTES:
        found = getattr(settings, name)
        if found != right:
            raise UsageError(
                f"{where} has {name}={found}: its routes would be wrong, because {reason}"
            )
