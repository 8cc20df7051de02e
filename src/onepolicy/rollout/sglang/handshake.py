"""The checks of a SGLang server before a run: its model, version and settings."""

from __future__ import annotations

import base64
import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from transformers import PreTrainedConfig

from onepolicy.config import SGLangConfig, UsageError
from onepolicy.errors import short_repr
from onepolicy.interfaces import EngineCaps
from onepolicy.rollout.servers.http import EngineClient
from onepolicy.rollout.servers.replies import (
    MAX_RANKS,
    AdapterLimits,
    MalformedReply,
    get_count,
    get_field,
    make_printable,
)

DEFAULT_WEIGHTS_ID = "default"  # SGLang's name of its start-up weights
INITIAL_VERSION = "first"  # our version of the start-up weights
WEIGHTS_ID_PATTERN = re.compile(
    rf"onepolicy\.([^.]*)\.({INITIAL_VERSION}|[0-9]{{1,9}})\.([A-Za-z0-9_=-]*)"
)  # run, version, canary
SGLANG_VERSION = "0.5.23"
MAX_COUNT = 2**31 - 1  # of a setting that is a count

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


async def read_weights_id(client: EngineClient) -> str:
    """Return the server's id of its weights."""

    def parse(reply: object) -> str:
        weights_id = None
        if isinstance(reply, dict):
            weights_id = reply.get("weight_version")
        if not isinstance(weights_id, str):
            raise MalformedReply(f"expected a weight_version, got {short_repr(reply)}")
        return weights_id

    return await client.get("/model_info", parse=parse)


@dataclass(frozen=True, slots=True)
class SGLangServerInfo:
    """The properties of a connected server."""

    model: str  # path or hub id of its start-up weights
    weights_id: WeightsId  # of its present weights
    ranks: int  # that take part in a broadcast
    max_masked_tokens: int  # most tokens in a sampling mask; more return no log-probabilities
    seeded: bool  # a request's seed determines its random numbers
    cpu: bool
    adapters: AdapterLimits | None  # None: it takes none


async def handshake(
    client: EngineClient, hf_config: PreTrainedConfig, config: SGLangConfig, caps: EngineCaps
) -> SGLangServerInfo:
    """Check the server's model and settings, and lift a pause of an interrupted run.

    Raises UsageError if the server does not fit this run.
    """
    info = await client.get("/server_info", parse=_parse_server_info)
    model = await client.get("/model_info", parse=_parse_object)
    where = f"rollout.engine.url: the server at {client.url}"
    _check_model(where, info, model, hf_config)
    _check_precision(info, config)
    _check_settings(where, info, config, caps)
    if caps.returns_routes:
        _check_routes(where, info)
    await client.post("/continue_generation", {})
    text = str(model.get("weight_version"))
    weights_id = WeightsId()
    if text != DEFAULT_WEIGHTS_ID:
        weights_id = WeightsId.parse(text) or WeightsId(version="0")
    return SGLangServerInfo(
        model=str(info.get("model_path")),
        weights_id=weights_id,
        ranks=info.get("tp_size", 1),
        max_masked_tokens=info.get("sampling_mask_max_tokens", 0),
        seeded=info.get("enable_deterministic_inference") is True,
        cpu=info.get("device") == "cpu",
        adapters=_adapter_limits(info),
    )


def _adapter_limits(info: dict[str, Any]) -> AdapterLimits | None:
    """Return the adapters that the server takes, None if it was not started to take any."""
    inferred = info.get("max_lora_rank") is None or not info.get("lora_target_modules")
    if info.get("enable_lora") is not True or inferred:  # from adapters that it was started with
        return None
    layers = get_field(info, "lora_target_modules", list)
    return AdapterLimits(
        rank=get_count(info, "max_lora_rank", MAX_COUNT), layers=[str(each) for each in layers]
    )


def _parse_object(reply: Any) -> dict[str, Any]:
    if not isinstance(reply, dict):
        raise MalformedReply(f"expected an object, got {short_repr(reply)}")
    return dict(make_printable(reply))


def _parse_server_info(reply: Any) -> dict[str, Any]:
    """Return the server's settings. Raise MalformedReply if one that we use is of another type."""
    info = _parse_object(reply)
    _adapter_limits(info)
    for name in ("sampling_mask_max_tokens", "max_req_input_len"):
        if name in info:
            get_count(info, name, MAX_COUNT)
    if "tp_size" in info:
        get_count(info, "tp_size", MAX_RANKS, 1)
    return info


def _check_model(
    where: str, info: dict[str, Any], model: dict[str, Any], hf_config: PreTrainedConfig
) -> None:
    if info.get("version") != SGLANG_VERSION:
        raise UsageError(
            f"{where} is not SGLang {SGLANG_VERSION}, whose replies are known here, but "
            f"{info.get('version')}"
        )
    served = model.get("model_type"), model.get("architectures")
    if served != (hf_config.model_type, hf_config.architectures):
        raise UsageError(
            f"{where} serves a {served[0]} {served[1]}, model.path is a {hf_config.model_type} "
            f"{hf_config.architectures}; start it with the run's model"
        )


def _check_precision(info: dict[str, Any], config: SGLangConfig) -> None:
    quantisation = info.get("quantization")
    if info.get("dtype") != config.dtype or quantisation:
        quantised = ""
        if quantisation:
            quantised = f", quantised by {quantisation}"
        raise UsageError(
            f"rollout.engine.dtype: {config.dtype}, but the server runs {info.get('dtype')}"
            f"{quantised}; set it to the server's, or start that with --dtype {config.dtype}"
        )
    has_float32_head = bool(info.get("enable_fp32_lm_head"))
    if has_float32_head != (config.lm_head == "float32"):
        with_flag = {True: "with", False: "without"}[has_float32_head]
        raise UsageError(
            f"rollout.engine.lm_head: {config.lm_head}, but the server was started {with_flag} "
            "--enable-fp32-lm-head"
        )


def _check_settings(
    where: str, info: dict[str, Any], config: SGLangConfig, caps: EngineCaps
) -> None:
    if caps.max_len > info.get("max_req_input_len", 0):
        raise UsageError(
            f"rollout.engine.max_len: {caps.max_len}, but the server takes "
            f"{info.get('max_req_input_len')} tokens; lower it, or start the server with a larger "
            "--context-length or --max-total-tokens"
        )
    for setting in ("dp_size", "pp_size"):
        if config.sync != "disk" and info.get(setting, 1) != 1:
            raise UsageError(
                f"{where} has {setting}={info[setting]}, and takes broadcast weights only with 1; "
                "use sync=disk"
            )


def _check_routes(where: str, info: dict[str, Any]) -> None:
    if not info.get("enable_return_routed_experts"):
        raise UsageError(
            f"{where} does not return routes; start it with --enable-return-routed-experts or set "
            "replay.mode=off"
        )
    for setting, right, reason in _WRONG_ROUTES:
        if info.get(setting, right) != right:
            raise UsageError(
                f"{where} has {setting}={info[setting]}: its routes would be wrong, because "
                f"{reason}"
            )
