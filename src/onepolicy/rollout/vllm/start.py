"""Start vLLM in this process. The only file that imports it."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from onepolicy.config import QuantFormat, UsageError, VLLMEngineConfig
from onepolicy.replay.payloads.vllm import RoutePayloadFormat, parse_version, payload_format_of
from onepolicy.rollout.vllm import quant as vllm_quant
from onepolicy.rollout.vllm.compatibility import (
    CPU,
    Deployment,
    check_route_compatibility,
    deployment_of,
)
from onepolicy.telemetry import OPT_OUT

# In this process, so that weights are handed over without a copy; quiet; nothing sent anywhere.
_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **OPT_OUT}
_DEFAULTS = {"VLLM_LOGGING_LEVEL": "ERROR"}
OLDEST, NEWEST = (0, 16), (0, 33)
"""Versions whose Python interface is the one used here. Run: 0.30 on the CPU; the others were read."""


def start_llm_engine(
    config: VLLMEngineConfig,
    path: str,
    *,
    max_len: int,
    top_logprobs: int,
    return_routes: bool,
    cpu: bool,
    trust_remote_code: bool,
    quant: QuantFormat | None = None,
) -> tuple[Any, RoutePayloadFormat | None]:
    """vLLM's LLMEngine with the model of `path` loaded and, with routes, how it returns them.

    max_len, top_logprobs: most that a request may ask for. UsageError if vLLM is missing, or of a version or set-up
    that is refused.
    """
    vllm_quant.check_quant_device(quant, cpu=cpu)
    if importlib.util.find_spec("vllm") is None:
        raise UsageError(
            "rollout.engine.kind: vllm is not installed; run `make vllm` (CPU) or pip install 'onepolicy[vllm]' (CUDA)"
        )
    os.environ.update(
        _ENVIRONMENT | {name: value for name, value in _DEFAULTS.items() if name not in os.environ}
    )
    import vllm
    from vllm.platforms import current_platform

    platform = current_platform.device_type
    if (platform == "cpu") != cpu:
        raise UsageError(
            f"rollout.engine.kind: this vllm was built for {platform}, which is not train.device; set train.device to "
            "it or install the other build"
        )
    check_vllm_version(vllm.__version__, cpu=cpu)
    vllm_quant.check_quant_version(quant, vllm.__version__)
    found, contract = parse_version(vllm.__version__), None
    if return_routes:
        contract = payload_format_of(vllm.__version__)
        check_route_compatibility(
            Deployment(found, platform, prefix_caching=config.enable_prefix_caching)
        )
    if cpu:  # or the first call compiles one comparison with a C++ compiler for 5 to 15 s
        type(current_platform).simple_compile_backend = "eager"
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = engine_args(
        config,
        path,
        max_len=max_len,
        top_logprobs=top_logprobs,
        return_routes=return_routes,
        cpu=cpu,
        trust_remote_code=trust_remote_code,
        quant=quant,
    )
    if return_routes and found < (0, 22):
        arguments["async_scheduling"] = False
    with _threads_kept(), vllm_quant.name_setting_in_errors(quant):
        llm = LLMEngine.from_engine_args(EngineArgs(**arguments, disable_log_stats=True))
    if config.lm_head == "float32":
        check_head_dtype(llm.apply_model(head_dtypes))
    if return_routes:
        monolithic = any(llm.apply_model(has_monolithic_kernel))
        resolved = deployment_of(llm.vllm_config, vllm.__version__, platform)
        check_route_compatibility(dataclasses.replace(resolved, monolithic=monolithic))
    return llm, contract


def engine_args(
    config: VLLMEngineConfig,
    path: str,
    *,
    max_len: int,
    top_logprobs: int,
    return_routes: bool,
    cpu: bool,
    trust_remote_code: bool,
    quant: QuantFormat | None = None,
) -> dict[str, Any]:
    """vLLM's EngineArgs, in this process and on a server's command line. None: vLLM's own choice."""
    return (
        {
            "model": path,
            "trust_remote_code": trust_remote_code,
            "load_format": "safetensors",  # the others that vLLM would try are pickles
            "skip_tokenizer_init": True,  # token ids in, token ids out
            "generation_config": "vllm",  # no sampling defaults from the model's folder
            "dtype": config.dtype,
            "max_model_len": max_len,
            "max_num_seqs": config.max_num_seqs,
            "block_size": config.block_size,
            "enable_prefix_caching": config.enable_prefix_caching,
            "kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30),
            "max_logprobs": top_logprobs,
            "logprobs_mode": "processed_logprobs",  # of the distribution sampled from
            "hf_overrides": {"head_dtype": "float32"} if config.lm_head == "float32" else {},
            "enable_return_routed_experts": return_routes,
            "enforce_eager": cpu,
            "enable_chunked_prefill": not cpu,  # 0.30.0 cannot rewind a CPU request's generator after half a prompt
            "use_tqdm_on_load": False,
            "seed": 0,  # every request brings its own
        }
        | vllm_quant.quantization_args(quant)
    )


def check_vllm_version(version: str, *, cpu: bool) -> None:
    """UsageError if this vLLM cannot be an engine in this process, with or without routes."""
    found = parse_version(version)
    if cpu and found != CPU:
        raise UsageError(
            f"rollout.engine.kind: vllm {version}: on the CPU only 0.30 is known to work; `make vllm` installs 0.30.0"
        )
    if found < OLDEST:
        raise UsageError(
            f"rollout.engine.kind: vllm {version}: before 0.16 reload_weights takes no tensors, so the engine would "
            "keep its first weights; use 0.28 to 0.30"
        )
    if found > NEWEST:
        raise UsageError(
            f"rollout.engine.kind: vllm {version} is newer than any that is known here; use 0.28 to 0.30"
        )


def has_monolithic_kernel(model: nn.Module) -> bool:
    """Whether some MoE layer of a vLLM model leaves the choice of experts to its kernel."""
    return any(
        getattr(getattr(m, "quant_method", None), "is_monolithic", False) for m in model.modules()
    )


def head_dtypes(model: nn.Module) -> list[str]:
    """In what a vLLM model computes its logits: `head_dtype` of each of its logits processors."""
    return [
        str(getattr(m, "head_dtype", None))
        for m in model.modules()
        if type(m).__name__ == "LogitsProcessor"
    ]


def check_head_dtype(found: list[list[str]]) -> None:
    """UsageError unless every worker's model (`head_dtypes`) has logits processors, and all compute in float32."""
    if any(not each or set(each) != {"torch.float32"} for each in found):
        raise UsageError(
            f"rollout.engine.lm_head: float32 was asked for, but this vLLM computes the logits in {found}; it needs "
            "https://github.com/vllm-project/vllm/pull/48390 (0.30 has it). Leave the setting out"
        )


@contextmanager
def _threads_kept() -> Iterator[None]:
    """vLLM's CPU worker replaces torch.set_num_threads by a function that does nothing."""
    original = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = original
