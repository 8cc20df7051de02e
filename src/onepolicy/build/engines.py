"""The engine of a run, copies of the model as it has it, and what it must be able to do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from onepolicy.config import (
    EngineConfig,
    FromRollout,
    HFEngineConfig,
    ModelConfig,
    QuantFormat,
    RolloutConfig,
    RunConfig,
    ServerEngineConfig,
    SGLangConfig,
    UsageError,
    VLLMEngineConfig,
    VLLMServerConfig,
    WeightsReplay,
)
from onepolicy.config.engine import Head
from onepolicy.config.numerics import Numerics
from onepolicy.interfaces import EngineCaps, RolloutEngine
from onepolicy.models import fp32_head
from onepolicy.models.load import cast, load_model, read_config
from onepolicy.models.prepare import prepare_for_training
from onepolicy.replay.checks import RouteRules
from onepolicy.rollout.hf.engine import DTYPES, HFEngine, quantise_policy
from onepolicy.rollout.sglang.engine import SGLangEngine
from onepolicy.rollout.vllm import quant as vllm_quant
from onepolicy.rollout.vllm.engine import VLLMEngine
from onepolicy.rollout.vllm.server import VLLMServer
from onepolicy.sync.check import adopt

BuildEngine = Callable[..., RolloutEngine]
"""With the arguments of `build_engine`."""


def build_engine(
    model: ModelConfig,
    config: EngineConfig,
    device: torch.device,
    *,
    routes: RouteRules | None,
    max_len: int,
    weights: bool = False,
    numerics: Numerics = "fast",
    quant: QuantFormat | None = None,
) -> RolloutEngine:
    """The engine with a copy of the model's weights of its own, in its own dtype and format.

    routes: record them (MoE models); weights: and the combine weights.
    """
    if isinstance(config, VLLMEngineConfig):
        cpu = device.type == "cpu"
        return VLLMEngine(model, read_config(model), config, routes=routes, max_len=max_len, cpu=cpu, quant=quant)
    if isinstance(config, ServerEngineConfig) and config.sync == "nccl" and device.type != "cuda":
        raise UsageError(f"rollout.engine.sync: nccl, but the trainer computes on the {device.type}; use gloo or disk")
    if isinstance(config, VLLMServerConfig):
        server = VLLMServer(model, read_config(model), config, routes=routes, max_len=max_len, quant=quant)
        return asyncio.run(_connected(server, model))
    if isinstance(config, SGLangConfig):
        sglang = SGLangEngine(model, read_config(model), config, routes=routes, max_len=max_len)
        return asyncio.run(_connected(sglang, model))
    own = load_engine_model(model, config.dtype, config.lm_head, device, quant=quant)
    record = routes is not None
    return HFEngine(own, config, record=record, max_len=max_len, weights=weights, numerics=numerics, quant=quant)


async def _connected(engine: VLLMServer | SGLangEngine, model: ModelConfig) -> RolloutEngine:
    """The server with the weights of `model`, like an engine that loaded it itself."""
    with engine.client.starting():
        await engine.connect()
        await adopt(engine, model.path, vocab=read_config(model).get_text_config().vocab_size)
    engine.take_metrics()
    return engine


def load_copy(
    model: ModelConfig,
    rollout: RolloutConfig,
    device: torch.device,
    *,
    lm_head: Head | None = None,
    quantised: bool = True,
) -> PreTrainedModel:
    """The model in the engine's dtype and format, its lm_head too (or as said), ready for packed samples.

    Static activations are not calibrated: every token has its own scale. vLLM's format is imitated by ours.
    """
    engine, quant = rollout.engine, rollout.quant if quantised else None
    lm_head = lm_head or engine.lm_head
    own = quant if isinstance(engine, HFEngineConfig) else None  # vLLM rounds weights before it quantises them
    copy, dtype = load_engine_model(model, engine.dtype, lm_head, device, quant=own), DTYPES[engine.dtype]
    if own is not None:
        quantise_policy(copy, own)
    elif quant is not None:
        like, experts_only = vllm_quant.imitation(quant)
        quantise_policy(copy, like, experts_only=experts_only)
    if lm_head == "float32":
        fp32_head.install(copy, dtype, field="rollout.engine.lm_head", copy=True)
    cast(copy, dtype)
    prepare_for_training(copy, device)
    return copy


def load_engine_model(
    model: ModelConfig, dtype: str, lm_head: Head, device: torch.device, *, quant: QuantFormat | None = None
) -> PreTrainedModel:
    """Rounded as the trainer's weights are, and as the engine's will be unless its lm_head or its quantised weights are
    made of unrounded ones."""
    dtypes = {model.dtype, dtype if lm_head == "same" and quant is None else model.dtype}
    return load_model(model, DTYPES["bfloat16" if "bfloat16" in dtypes else "float32"], device)


def check_engine(config: RunConfig, caps: EngineCaps, top_logprobs: int) -> None:
    """Does the engine return what replay.mode replays and the correction needs?"""
    if top_logprobs > caps.top_logprobs:
        correction = config.correction
        most = f"but this engine returns those of at most {caps.top_logprobs}"
        if correction.centering == "support" and caps.top_logprobs:
            raise UsageError(
                f"correction.centering: support needs the log-probabilities of all {top_logprobs} tokens, {most}; use "
                "head"
            )
        mend = f"set it to at most {caps.top_logprobs}" if caps.top_logprobs else "choose one without centering"
        raise UsageError(
            f"correction.head_size: {correction.name} needs the log-probabilities of the {top_logprobs} likeliest "
            f"tokens, {most}; {mend}"
        )
    mode = config.replay.mode
    if not isinstance(config.replay, FromRollout) or config.replay.source == "reprefill":
        return
    if not caps.routing:
        raise UsageError(
            f"replay.mode: {mode} needs the rollout's routes, which this engine does not return; set it to off or "
            "record them by a second forward (replay.source=reprefill)"
        )
    if isinstance(config.replay, WeightsReplay) and not caps.routing_weights:
        raise UsageError("replay.mode: weights needs the combine weights, which this engine does not return; use r3")
