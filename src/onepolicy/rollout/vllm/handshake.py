"""The checks of a vLLM server before a run: its model, version and settings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from transformers import PreTrainedConfig

from onepolicy.config import QuantFormat, UsageError, VLLMServerConfig
from onepolicy.errors import short_repr
from onepolicy.interfaces import EngineCaps
from onepolicy.models.quant.size_report import SizeReport
from onepolicy.replay.checks import RouteSpec
from onepolicy.replay.payloads.vllm import parse_version, payload_format_of
from onepolicy.rollout.servers.http import EngineClient
from onepolicy.rollout.servers.replies import (
    MAX_RANKS,
    AdapterLimits,
    MalformedReply,
    get_field,
    make_printable,
)
from onepolicy.rollout.vllm.compatibility import Deployment, check_route_compatibility
from onepolicy.rollout.vllm.generate_api import ReplyParser
from onepolicy.rollout.vllm.quant import PartTensors, part_sizes, quantization_method
from onepolicy.rollout.vllm.start import check_vllm_version
from onepolicy.rollout.vllm.worker import ServerDescription, model_shape

T = TypeVar("T")
OLDEST = (0, 28)
"""First version with the endpoints used here, by its source. Run: 0.30 on the CPU."""
INITIAL_WEIGHTS_ID = "default"
"""vLLM's name of its start-up weights."""
START_HINT = "start the server with `onepolicy engine serve MODEL`"


@dataclass(frozen=True, slots=True)
class VLLMServerInfo:
    """The properties of a connected server."""

    model: str  # path or hub id of its start-up weights
    weights_id: str  # of its present weights, INITIAL_WEIGHTS_ID for those of the start-up
    initial_canary: list[float] | None  # of the start-up weights, if a run stored one
    top_logprobs: int
    workers: int
    reply_parser: ReplyParser
    sizes: SizeReport | None  # of quantised weights
    cpu: bool
    adapters: AdapterLimits | None  # that it takes


async def handshake(
    client: EngineClient,
    text: PreTrainedConfig,
    config: VLLMServerConfig,
    caps: EngineCaps,
    route_spec: RouteSpec | None,
    quant: QuantFormat | None = None,
) -> VLLMServerInfo:
    """Check the server's model and settings, and lift a pause of an interrupted run.

    Raises UsageError if the server does not fit this run.
    """
    version = await client.get(
        "/version", parse=lambda reply: make_printable(get_field(reply, "version", str))
    )
    await _check_endpoints(client)
    server, workers = await describe_server(client)
    where = f"rollout.engine.url: the vLLM server at {client.url}"
    _check_version(where, server, version)
    _check_model(where, server, text)
    _check_precision(server, config, quant)
    _check_settings(where, server, config, caps)
    if caps.returns_routes:
        _check_routes(where, server, client)
    vocab = int(text.vocab_size)
    tensors = [_validate(PartTensors, each, client) for each in server.held]
    sizes: SizeReport | None = None
    if quant is not None:
        sizes = part_sizes(quant, tensors, config.dtype)
    return VLLMServerInfo(
        model=server.model,
        weights_id=await read_weights_id(client),
        initial_canary=server.initial_canary,
        top_logprobs=_max_top_logprobs(server.max_logprobs, vocab),
        workers=workers,
        reply_parser=ReplyParser(
            vocab, int(text.num_hidden_layers), route_spec, payload_format_of(version)
        ),
        sizes=sizes,
        cpu=server.device == "cpu",
        adapters=_adapters(server, client),
    )


def _adapters(server: ServerDescription, client: EngineClient) -> AdapterLimits | None:
    if server.adapters is None:
        return None
    return _validate(AdapterLimits, server.adapters, client)


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
        results = get_field(reply, "results", list)
        if not results or not isinstance(results[0], dict):
            raise MalformedReply(f"no description: {short_repr(reply)}")
        if len(results) > MAX_RANKS:
            raise MalformedReply(f"results: {len(results)} workers, expected 1 to {MAX_RANKS}")
        return make_printable(results[0]), len(results)

    try:
        fields, workers = await client.post(
            "/collective_rpc", {"method": "onepolicy_describe"}, parse=parse
        )
    except UsageError as error:
        raise UsageError(
            f"{error} Without our worker extension no weights can be loaded: {START_HINT}"
        ) from error
    return _validate(ServerDescription, fields, client), workers


def _validate(kind: type[T], fields: dict[str, Any], client: EngineClient) -> T:
    """Return the dataclass. Raise UsageError for unknown or missing fields, or other types."""
    try:
        kind(**fields)  # pydantic would ignore unknown fields
        return TypeAdapter(kind).validate_json(json.dumps(fields), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        found = f"{'.'.join(map(str, first['loc']))!r}: {first['msg']}"
    except TypeError as error:
        found = str(error)
    raise UsageError(
        f"rollout.engine.url: the vLLM server at {client.url} runs another version of onepolicy "
        f"({found}); {START_HINT} of this one"
    )


async def read_weights_id(client: EngineClient) -> str:
    """Return the id that the server's weights were given when they were loaded."""
    return await client.get(
        "/weight_info", parse=lambda reply: get_field(reply, "weight_version", str)
    )


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


def _check_routes(where: str, server: ServerDescription, client: EngineClient) -> None:
    if not server.routes:
        raise UsageError(f"{where} does not return routes; {START_HINT}, or set replay.mode=off")
    check_route_compatibility(_validate(Deployment, server.deployment, client))
