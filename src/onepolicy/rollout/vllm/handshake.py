"""What a vLLM server is asked before work starts: is it of this model, and was it started the way a run needs it?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from transformers import PreTrainedConfig

from onepolicy.config import QuantFormat, UsageError, VLLMServerConfig
from onepolicy.config.base import short_repr
from onepolicy.interfaces import EngineCaps
from onepolicy.models.quant.size_report import SizeReport
from onepolicy.replay.checks import RouteSpec
from onepolicy.replay.payloads.vllm import parse_version, payload_format_of
from onepolicy.rollout.servers.http import EngineClient
from onepolicy.rollout.servers.replies import MalformedReply, get_field, make_printable
from onepolicy.rollout.vllm.compatibility import Deployment, check_route_compatibility
from onepolicy.rollout.vllm.generate_api import ReplyParser
from onepolicy.rollout.vllm.quant import PartTensors, part_sizes, quantization_method
from onepolicy.rollout.vllm.start import check_vllm_version
from onepolicy.rollout.vllm.worker import ServerDescription, model_shape

T = TypeVar("T")
OLDEST = (0, 28)
"""First version with the endpoints used here, by its source. Run: 0.30 on the CPU."""
INITIAL_WEIGHTS_ID = "default"
"""vLLM's name of the weights it started with."""
START = "start the server with `onepolicy engine serve MODEL`"


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server said of itself."""

    model: str  # path or hub id it was started with
    weights: str  # their name, FIRST if nobody has given it others since it started
    first_probe: list[float] | None  # what a run kept of a probe of these weights
    top_logprobs: int
    workers: int
    reader: ReplyParser
    sizes: SizeReport | None  # of quantised weights


async def handshake(
    client: EngineClient,
    text: PreTrainedConfig,
    config: VLLMServerConfig,
    caps: EngineCaps,
    route_spec: RouteSpec | None,
    quant: QuantFormat | None = None,
) -> ServerInfo:
    """UsageError for a server that cannot be this run's engine. A pause that an interrupted run left is lifted."""
    version = await client.get(
        "/version", parse=lambda reply: make_printable(get_field(reply, "version", str))
    )
    await _check_endpoints(client)
    told, workers = await describe(client)
    _check_settings(client, told, version, text, config, caps, quant)
    reader = ReplyParser(
        int(text.vocab_size), int(text.num_hidden_layers), route_spec, payload_format_of(version)
    )
    held = [_typed(PartTensors, each, client) for each in told.held]
    most = (
        told.max_logprobs if told.max_logprobs >= 0 else reader.vocab
    )  # the sampled token takes one of them
    return ServerInfo(
        model=told.model,
        weights=await read_weights_id(client),
        first_probe=told.first_probe,
        top_logprobs=reader.vocab if most >= reader.vocab else max(most - 1, 0),
        workers=workers,
        reader=reader,
        sizes=None if quant is None else part_sizes(quant, held, config.dtype),
    )


async def describe(client: EngineClient) -> tuple[ServerDescription, int]:
    """What the server's first worker says, and how many there are. UsageError if they are not of this onepolicy."""

    def parse(reply: Any) -> tuple[dict[str, Any], int]:
        results = get_field(reply, "results", list)
        if not results or not isinstance(results[0], dict):
            raise MalformedReply(f"no description: {short_repr(reply)}")
        return make_printable(results[0]), len(results)

    try:
        told, workers = await client.post(
            "/collective_rpc", {"method": "onepolicy_describe"}, parse=parse
        )
    except UsageError as error:
        raise UsageError(
            f"{error} Without our worker extension no weights can be given to it: {START}"
        ) from error
    return _typed(ServerDescription, told, client), workers


def _typed(kind: type[T], told: dict[str, Any], client: EngineClient) -> T:
    """UsageError for fields that are others, or of other types."""
    try:
        kind(**told)  # pydantic would ignore fields it does not know
        return TypeAdapter(kind).validate_json(json.dumps(told), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        found = f"{'.'.join(map(str, first['loc']))!r}: {first['msg']}"
    except TypeError as error:
        found = str(error)
    raise UsageError(
        f"rollout.engine.url: the vLLM server at {client.url} runs another version of onepolicy ({found}); {START} of "
        "this one"
    )


async def read_weights_id(client: EngineClient) -> str:
    """The name of the weights the server holds, as given by whoever gave it the weights."""
    return await client.get(
        "/weight_info", parse=lambda reply: get_field(reply, "weight_version", str)
    )


async def _check_endpoints(client: EngineClient) -> None:
    """Pause, abort and resume once: what every weight update needs, and an end to a pause that was left behind."""
    try:
        await client.post("/pause", params={"mode": "abort"})
        await client.post("/abort_requests", {})
        await client.post("/resume")
    except UsageError as error:
        raise UsageError(
            f"{error} Without these endpoints no weights can be given to it: {START}"
        ) from error


def _check_settings(
    client: EngineClient,
    told: ServerDescription,
    version: str,
    text: PreTrainedConfig,
    config: VLLMServerConfig,
    caps: EngineCaps,
    quant: QuantFormat | None,
) -> None:
    where = f"rollout.engine.url: the vLLM server at {client.url}"
    check_vllm_version(version, cpu=told.device == "cpu")
    if parse_version(version) < OLDEST:
        raise UsageError(
            f"{where} is version {version}, which lacks endpoints this needs; use 0.28 to 0.30"
        )
    ours = model_shape(text)
    for name in sorted(ours.keys() & told.shape.keys()):
        if ours[name] != told.shape[name]:
            raise UsageError(
                f"{where} serves {told.model!r}, another model: its {name} is {told.shape[name]}, model.path's "
                f"{ours[name]}; start it with the run's model"
            )
    if told.dtype != config.dtype:
        raise UsageError(f"rollout.engine.dtype: {config.dtype}, but the server runs {told.dtype}")
    if told.quantization != quantization_method(quant):
        wanted = "unset" if quant is None else quant.format
        served = f"quantised by {told.quantization}" if told.quantization else "not quantised"
        mend = "" if quant is None else f" quant={quant.format}"
        raise UsageError(
            f"rollout.quant: {wanted}, but the server's weights are {served}; {START}{mend}"
        )
    head = "float32" if config.lm_head == "float32" else config.dtype
    if set(told.head_dtypes) - {"None"} - {f"torch.{head}"} or (
        head != config.dtype and not told.head_dtypes
    ):
        raise UsageError(
            f"rollout.engine.lm_head: {config.lm_head}, but the server computes the logits in {told.head_dtypes}; "
            "start it with the same lm_head"
        )
    if config.sync == "nccl" and told.device != "cuda":
        raise UsageError(
            f"rollout.engine.sync: nccl, but the server computes on {told.device}; use gloo or disk"
        )
    if told.max_len < caps.max_len:
        raise UsageError(
            f"rollout.engine.max_len: {caps.max_len}, but the server takes {told.max_len} tokens; lower it, or "
            f"start the server with max_len={caps.max_len}"
        )
    if told.logprobs_mode != "processed_logprobs":
        raise UsageError(
            f"{where} returns {told.logprobs_mode}, not log-probabilities of the distribution sampled from; {START}"
        )
    if not caps.returns_routes:
        return
    if not told.routes:
        raise UsageError(f"{where} does not return routes; {START}, or set replay.mode=off")
    check_route_compatibility(_typed(Deployment, told.deployment, client))
