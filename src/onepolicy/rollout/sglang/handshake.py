"""What a SGLang server is asked before work starts: is it of this model, and was it started the way a run needs it?"""

from __future__ import annotations

import base64
import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from transformers import PreTrainedConfig

from onepolicy.config import SGLangConfig, UsageError
from onepolicy.config.base import short_repr
from onepolicy.interfaces import EngineCaps
from onepolicy.rollout.servers.http import EngineClient
from onepolicy.rollout.servers.replies import MalformedReply, get_count, make_printable

DEFAULT_WEIGHTS_ID = "default"  # SGLang's name of the weights it started with
INITIAL_VERSION = "first"  # ours
WEIGHTS_ID_PATTERN = re.compile(
    rf"onepolicy\.([^.]*)\.({INITIAL_VERSION}|[0-9]{{1,9}})\.([A-Za-z0-9_=-]*)"
)  # run, weights, probe


@dataclass(frozen=True, slots=True)
class WeightsId:
    run: str = ""  # who gave the weights, or connected last
    weights: str = INITIAL_VERSION  # version, or FIRST for those the server was started with
    probe: str = ""  # base64 of float32: log-probabilities of a fixed batch under the first weights

    def __str__(self) -> str:
        return f"onepolicy.{self.run}.{self.weights}.{self.probe}"

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """None for a name that is not ours."""
        found = WEIGHTS_ID_PATTERN.fullmatch(name)
        if found is None:
            return None
        ours = cls(*found.groups())
        try:
            ours.initial_canary()
        except ValueError:  # no base64, or no whole numbers of 4 bytes
            return None
        return ours

    @property
    def version(self) -> int:
        return 0 if self.weights == INITIAL_VERSION else int(self.weights)

    @property
    def key(self) -> str:
        """Prefixes are shared among requests of one key."""
        return f"{self.run}.{self.weights}"

    def initial_canary(self) -> list[float] | None:
        if not self.probe:
            return None
        return np.frombuffer(base64.urlsafe_b64decode(self.probe), dtype="<f4").tolist()

    def with_probe(self, values: list[float]) -> Self:
        data = np.asarray(values, dtype="<f4").tobytes()
        return dataclasses.replace(self, probe=base64.urlsafe_b64encode(data).decode())


async def read_weights_id(client: EngineClient) -> str:
    """What the server calls the weights it holds."""

    def parse(reply: object) -> str:
        name = reply.get("weight_version") if isinstance(reply, dict) else None
        if not isinstance(name, str):
            raise MalformedReply(f"expected a weight_version, got {short_repr(reply)}")
        return name

    return await client.get("/model_info", parse=parse)


VERSION = "0.5.23"
LARGEST = 2**31 - 1  # of a setting that is a count

# What makes SGLang's routes wrong without an error: setting, the value that is fine, why.
_WRONG_ROUTES: tuple[tuple[str, Any, str], ...] = (
    ("pp_size", 1, "each pipeline stage records its own layers only, the others stay zero"),
    (
        "enable_hierarchical_cache",
        False,
        "prefixes from the host's cache return stale routes (https://github.com/sgl-project/sglang/issues/26975)",
    ),
    ("disaggregation_mode", "null", "the decoding server has no routes of the prompt"),
    ("speculative_algorithm", None, "the buffer of routes is not sized for the tokens it verifies"),
)


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server said of itself."""

    model: str  # path or hub id it was started with
    name: WeightsId  # of the weights it holds
    ranks: int  # that take part in a broadcast
    masked: int  # tokens top_k may leave for their log-probabilities to be returned
    seeded: bool  # draws a request's random numbers from its seed


async def handshake(
    client: EngineClient, hf_config: PreTrainedConfig, config: SGLangConfig, caps: EngineCaps
) -> ServerInfo:
    """UsageError for a server that cannot be this run's engine. A pause that an interrupted run left is lifted."""
    info = await client.get("/server_info", parse=_info)
    model = await client.get("/model_info", parse=_object)
    _check(client.url, info, model, hf_config, config, caps)
    await client.post("/continue_generation", {})
    found = str(model.get("weight_version"))
    return ServerInfo(
        model=str(info.get("model_path")),
        name=WeightsId()
        if found == DEFAULT_WEIGHTS_ID
        else WeightsId.parse(found) or WeightsId(weights="0"),
        ranks=info.get("tp_size", 1),
        masked=info.get("sampling_mask_max_tokens", 0),
        seeded=info.get("enable_deterministic_inference") is True,
    )


def _object(reply: Any) -> dict[str, Any]:
    if not isinstance(reply, dict):
        raise MalformedReply(f"expected an object, got {short_repr(reply)}")
    return dict(make_printable(reply))


def _info(reply: Any) -> dict[str, Any]:
    """What is calculated with are counts, where it is said."""
    info = _object(reply)
    for name in ("tp_size", "sampling_mask_max_tokens", "max_req_input_len"):
        if name in info:
            get_count(info, name, LARGEST)
    return info


def _check(
    url: str,
    info: dict[str, Any],
    model: dict[str, Any],
    hf_config: PreTrainedConfig,
    config: SGLangConfig,
    caps: EngineCaps,
) -> None:
    where = f"rollout.engine.url: the server at {url}"
    if info.get("version") != VERSION:
        raise UsageError(
            f"{where} is not SGLang {VERSION}, whose replies are known here, but {info.get('version')}"
        )
    if (model.get("model_type"), model.get("architectures")) != (
        hf_config.model_type,
        hf_config.architectures,
    ):
        raise UsageError(
            f"{where} serves a {model.get('model_type')} {model.get('architectures')}, model.path is a "
            f"{hf_config.model_type} {hf_config.architectures}; start it with the run's model"
        )
    if info.get("dtype") != config.dtype or info.get("quantization"):
        quantised = f", quantised by {info.get('quantization')}" if info.get("quantization") else ""
        raise UsageError(
            f"rollout.engine.dtype: {config.dtype}, but the server runs {info.get('dtype')}{quantised}; set it to the "
            f"server's, or start that with --dtype {config.dtype}"
        )
    if bool(info.get("enable_fp32_lm_head")) != (config.lm_head == "float32"):
        raise UsageError(
            f"rollout.engine.lm_head: {config.lm_head}, but the server was started "
            f"{'with' if info.get('enable_fp32_lm_head') else 'without'} --enable-fp32-lm-head"
        )
    if caps.max_len > info.get("max_req_input_len", 0):
        raise UsageError(
            f"rollout.engine.max_len: {caps.max_len}, but the server takes {info.get('max_req_input_len')} tokens; "
            "lower it, or start the server with a larger --context-length or --max-total-tokens"
        )
    for setting in ("dp_size", "pp_size"):
        if config.sync != "disk" and info.get(setting, 1) != 1:
            raise UsageError(
                f"{where} has {setting}={info[setting]}, and takes broadcast weights only with 1; use sync=disk"
            )
    if not caps.returns_routes:
        return
    if not info.get("enable_return_routed_experts"):
        raise UsageError(
            f"{where} does not return routes; start it with --enable-return-routed-experts or set replay.mode=off"
        )
    for setting, fine, why in _WRONG_ROUTES:
        if info.get(setting, fine) != fine:
            raise UsageError(
                f"{where} has {setting}={info[setting]}: its routes would be wrong, because {why}"
            )
