"""The checks of a vLLM server before a run: its model, version and settings."""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter, ValidationError
from transformers import PreTrainedConfig

from onepolicy.config import QuantFormat, UsageError, VLLMServerConfig
from onepolicy.errors import short_repr
from onepolicy.interfaces import EngineCaps
from onepolicy.models.quant.size_report import SizeReport
from onepolicy.replay.payloads.vllm import RoutePayloadFormat, parse_version, payload_format_of
from onepolicy.rollout.remote.client import EngineClient
from onepolicy.rollout.remote.dialect import ModelShape, ServerInfo
from onepolicy.rollout.remote.replies import (
    MAX_RANKS,
    MalformedReply,
    Reply,
    Results,
    Text,
    make_printable,
)
from onepolicy.rollout.vllm.compatibility import check_route_compatibility
from onepolicy.rollout.vllm.quant import part_sizes, quantization_method
from onepolicy.rollout.vllm.start import check_vllm_version
from onepolicy.rollout.vllm.worker import ServerDescription, model_shape

OLDEST = (0, 28)
"""First version with the endpoints used here, by its source. Run: 0.30 on the CPU."""
START_HINT = "start the server with `onepolicy engine serve MODEL`"


class _Version(Reply):
    version: Text


async def handshake(
    client: EngineClient,
    hf_config: PreTrainedConfig,
    config: VLLMServerConfig,
    caps: EngineCaps,
    shape: ModelShape,
    quant: QuantFormat | None,
) -> tuple[ServerInfo, RoutePayloadFormat, list[float] | None]:
    """Check the server's model and settings, and lift a pause of an interrupted run.

    Return also the format of its routes, and the canary of its start-up weights. Raises UsageError
    if the server does not fit this run.
    """
    version = (await client.get("/version", parse=_Version.read)).version
    await _check_endpoints(client)
    server, workers = await describe_server(client)
    where = f"rollout.engine.url: the vLLM server at {client.url}"
    _check_version(where, server, version)
    _check_model(where, server, hf_config.get_text_config())
    _check_precision(server, config, quant)
    _check_settings(where, server, config, caps)
    if caps.returns_routes:
        _check_routes(where, server)
    sizes: SizeReport | None = None
    if quant is not None:
        sizes = part_sizes(quant, server.held, config.dtype)
    info = ServerInfo(
        model=server.model,
        workers=workers,
        cpu=server.device == "cpu",
        top_logprobs=_max_top_logprobs(server.max_logprobs, shape.vocab),
        adapters=server.adapters,
        sizes=sizes,
    )
    return info, payload_format_of(version), server.initial_canary


def _max_top_logprobs(max_logprobs: int, vocab: int) -> int:
    """Return the most likely tokens that the server can return. max_logprobs: -1 is no limit."""
    if max_logprobs < 0 or max_logprobs >= vocab:
        return vocab
    return max(max_logprobs - 1, 0)  # the sampled token takes one of them


async def describe_server(client: EngineClient) -> tuple[ServerDescription, int]:
    """Return the description by the server's first worker, and the number of workers.

    Raises UsageError unless they run this version of onepolicy.
    """

    def parse(reply: Any) -> tuple[dict[str, Any], int]:
        results = Results.read(reply).results
        if not 1 <= len(results) <= MAX_RANKS:
            raise MalformedReply(f"results: {len(results)} workers, expected 1 to {MAX_RANKS}")
        if not isinstance(results[0], dict):
            raise MalformedReply(f"no description: {short_repr(reply)}")
        return make_printable(results[0]), len(results)

    try:
        fields, workers = await client.post(
            "/collective_rpc", {"method": "onepolicy_describe"}, parse=parse
        )
    except UsageError as error:
        raise UsageError(
            f"{error} Without our worker extension no weights can be loaded: {START_HINT}"
        ) from error
    try:
        description = TypeAdapter(ServerDescription).validate_json(json.dumps(fields), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(
            f"rollout.engine.url: the vLLM server at {client.url} runs another version of "
            f"onepolicy ({'.'.join(map(str, first['loc']))!r}: {first['msg']}); {START_HINT} of "
            "this one"
        ) from error
    return description, workers


async def _check_endpoints(client: EngineClient) -> None:
    """Pause, abort and resume once, as every weight update does. This lifts an earlier pause."""
    try:
        await client.post("/pause", params={"mode": "abort"})
        await client.post("/abort_requests", {})
        await client.post("/resume")
    except UsageError as error:
        raise UsageError(
            f"{error} Without these endpoints no weights can be loaded: {START_HINT}"
        ) from error


def _check_version(where: str, server: ServerDescription, version: str) -> None:
    check_vllm_version(version, cpu=server.device == "cpu")
    if parse_version(version) < OLDEST:
        raise UsageError(
            f"{where} is version {version}, which lacks endpoints this needs; use 0.28 to 0.30"
        )


def _check_model(where: str, server: ServerDescription, text: PreTrainedConfig) -> None:
    expected = model_shape(text)
    for name in sorted(expected.keys() & server.shape.keys()):
        if expected[name] != server.shape[name]:
            raise UsageError(
                f"{where} serves {server.model!r}, another model: its {name} is "
                f"{server.shape[name]}, model.path's {expected[name]}; start it with the run's "
                "model"
            )


def _check_precision(
    server: ServerDescription, config: VLLMServerConfig, quant: QuantFormat | None
) -> None:
    if server.dtype != config.dtype:
        raise UsageError(
            f"rollout.engine.dtype: {config.dtype}, but the server runs {server.dtype}"
        )
    if server.quantization != quantization_method(quant):
        wanted, option, served = "unset", "", "not quantised"
        if quant is not None:
            wanted, option = quant.format, f" quant={quant.format}"
        if server.quantization:
            served = f"quantised by {server.quantization}"
        raise UsageError(
            f"rollout.quant: {wanted}, but the server's weights are {served}; {START_HINT}{option}"
        )
    head: str = config.dtype
    if config.lm_head == "float32":
        head = "float32"
    other_dtypes = set(server.head_dtypes) - {"None", f"torch.{head}"}
    unknown = head != config.dtype and not server.head_dtypes
    if other_dtypes or unknown:
        raise UsageError(
            f"rollout.engine.lm_head: {config.lm_head}, but the server computes the logits in "
            f"{server.head_dtypes}; start it with the same lm_head"
        )


def _check_settings(
    where: str, server: ServerDescription, config: VLLMServerConfig, caps: EngineCaps
) -> None:
    if config.sync == "nccl" and server.device != "cuda":
        raise UsageError(
            f"rollout.engine.sync: nccl, but the server computes on {server.device}; use gloo or "
            "disk"
        )
    if server.max_len < caps.max_len:
        raise UsageError(
            f"rollout.engine.max_len: {caps.max_len}, but the server takes {server.max_len} "
            f"tokens; lower it, or start the server with max_len={caps.max_len}"
        )
    if server.logprobs_mode != "processed_logprobs":
        raise UsageError(
            f"{where} returns {server.logprobs_mode}, not log-probabilities of the distribution "
            f"sampled from; {START_HINT}"
        )


def _check_routes(where: str, server: ServerDescription) -> None:
    if not server.routes:
        raise UsageError(f"{where} does not return routes; {START_HINT}, or set replay.mode=off")
    check_route_compatibility(server.deployment)
