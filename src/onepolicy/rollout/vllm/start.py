"""The start of vLLM in this process. Only this file imports vLLM to build an engine."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onepolicy.config import ModelConfig, QuantFormat, UsageError, VLLMEngineConfig
from onepolicy.config.lora import LoraConfig
from onepolicy.replay.payloads.vllm import RoutePayloadFormat, parse_version, payload_format_of
from onepolicy.rollout.vllm import quant as vllm_quant
from onepolicy.rollout.vllm.compatibility import (
    CPU,
    Deployment,
    check_route_compatibility,
    deployment_of,
)
from onepolicy.rollout.vllm.memory import GPU_SHARE, memory_args
from onepolicy.telemetry import OPT_OUT

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# In this process, so that weights are loaded without a copy. No telemetry.
_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **OPT_OUT}
WORKER_PROCESSES = {
    "distributed_executor_backend": "mp",
    "worker_extension_cls": "onepolicy.rollout.vllm.worker.WorkerExtension",
}
"""EngineArgs of an engine of several devices, each in a process of its own."""
UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Else vLLM 0.30 wants a NUMA node for each of several devices that are CPUs."""
CPU_EXPERT_ROWS = 32
OLDEST, NEWEST = (0, 16), (0, 33)
"""Versions with the Python interface used here. Run: 0.30 on the CPU. Read: the others."""


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
    gpu_share: float = GPU_SHARE,
    sleeps: bool = False,
    lora: LoraConfig | None = None,
) -> tuple[Any, RoutePayloadFormat | None]:
    """Return vLLM's LLMEngine with the model of `path`, and the format of its routes.

    The format is None without routes. max_len, top_logprobs: limits of a request. gpu_share: the
    default of gpu_memory_utilization. sleeps: with vLLM's sleep mode. lora: adapters
    that requests may name. Raises UsageError if vLLM is
    missing, or if its version or set-up is refused.
    """
    vllm_quant.check_quant_device(quant, cpu=cpu)
    version, platform = _import_vllm(cpu=cpu)
    vllm_quant.check_quant_version(quant, version)
    payload_format = None
    if return_routes:
        payload_format = payload_format_of(version)
        caching = config.enable_prefix_caching
        check_route_compatibility(
            Deployment(parse_version(version), platform, prefix_caching=caching)
        )
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
        gpu_share=gpu_share,
    )
    experts: AbstractContextManager[None] = nullcontext()
    if config.tensor_parallel_size > 1:
        arguments |= WORKER_PROCESSES
        if cpu:
            _unbind_threads()
            _check_cpu_experts(path, config.tensor_parallel_size, trust_remote_code)
    if lora is not None:
        from onepolicy.rollout.vllm.adapter import cpu_experts, lora_args  # not in a server

        arguments |= lora_args(lora, ModelConfig(path=path, trust_remote_code=trust_remote_code))
        if cpu:
            experts = cpu_experts()
    if sleeps:
        arguments["enable_sleep_mode"] = True
    if return_routes and parse_version(version) < (0, 22):
        arguments["async_scheduling"] = False
    with _keep_set_num_threads(), vllm_quant.name_setting_in_errors(quant), experts:
        llm = LLMEngine.from_engine_args(EngineArgs(**arguments, disable_log_stats=True))
    if config.lm_head == "float32":
        check_head_dtype(llm.apply_model(head_dtypes))
    if return_routes:
        monolithic = any(llm.apply_model(has_monolithic_kernel))
        deployment = deployment_of(llm.vllm_config, version, platform)
        check_route_compatibility(dataclasses.replace(deployment, monolithic=monolithic))
    return llm, payload_format


def _unbind_threads() -> None:
    """Set UNBOUND. vLLM keeps the environment from the first engine of a process on."""
    from vllm import envs

    os.environ.update(UNBOUND)
    if hasattr(envs, "disable_envs_cache"):
        envs.disable_envs_cache()


def _import_vllm(*, cpu: bool) -> tuple[str, str]:
    """Import vLLM and return its version and platform.

    Raises UsageError if it is missing, or if its version or platform is refused.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UsageError(
            "rollout.engine.kind: vllm is not installed; run `make vllm` (CPU) or pip install "
            "'onepolicy[vllm]' (CUDA)"
        )
    os.environ.update(_ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm
    from vllm.platforms import current_platform

    platform = current_platform.device_type
    if (platform == "cpu") != cpu:
        raise UsageError(
            f"rollout.engine.kind: this vllm was built for {platform}, which is not train.device; "
            "set train.device to it or install the other build"
        )
    check_vllm_version(vllm.__version__, cpu=cpu)
    if cpu:
        # otherwise the first call compiles one comparison with a C++ compiler for 5 to 15 s
        type(current_platform).simple_compile_backend = "eager"
    return vllm.__version__, platform


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
    gpu_share: float = GPU_SHARE,
) -> dict[str, Any]:
    """Return vLLM's EngineArgs, for this process or for a server's command line.

    None leaves an argument to vLLM. gpu_share: the default of gpu_memory_utilization.
    """
    overrides: dict[str, Any] = {}
    if config.lm_head == "float32":
        overrides["head_dtype"] = "float32"
    return {
        "model": path,
        "trust_remote_code": trust_remote_code,
        "load_format": "safetensors",  # the others that vLLM would try are pickles
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "generation_config": "vllm",  # no sampling defaults from the model's folder
        "dtype": config.dtype,
        "max_model_len": max_len,
        "tensor_parallel_size": config.tensor_parallel_size,
        "max_num_seqs": config.max_num_seqs,
        "block_size": config.block_size,
        "enable_prefix_caching": config.enable_prefix_caching,
        "max_logprobs": top_logprobs,
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from
        "hf_overrides": overrides,
        "enable_return_routed_experts": return_routes,
        "enforce_eager": cpu,
        # 0.30.0 cannot rewind a CPU request's random generator after half a prompt
        "enable_chunked_prefill": not cpu,
        "use_tqdm_on_load": False,
        "seed": 0,  # every request brings its own
        **memory_args(config, cpu=cpu, share=gpu_share),
        **vllm_quant.quantization_args(quant),
    }


def check_cpu_hybrid(
    config: VLLMEngineConfig, text: PreTrainedConfig, *, section: str = "rollout.engine."
) -> None:
    """Raise UsageError for settings with which vLLM's CPU build runs no recurrent layers.

    text: the config of the language model. section: the path of the settings, with a dot; `engine
    serve` has them without one.
    """
    from onepolicy.models.layer_kinds import LAYER_KINDS, layer_kinds  # not in a server

    recurrent = {k for k in layer_kinds(text) if k in LAYER_KINDS and LAYER_KINDS[k].recurrent}
    if not recurrent:
        return
    has = f"{text.model_type} has {', '.join(sorted(recurrent))} layers"
    if config.dtype == "float32":
        raise UsageError(
            f"{section}dtype: float32, but {has}, which vLLM's CPU build computes in "
            "bfloat16 only; use bfloat16"
        )
    if config.enable_prefix_caching:
        raise UsageError(
            f"{section}enable_prefix_caching: {has}, whose states vLLM's CPU build caches "
            "only with prefills in chunks, which lose its random numbers; set it to false"
        )


def _check_cpu_experts(path: str, size: int, trust_remote_code: bool) -> None:
    """Raise UsageError for experts that vLLM 0.30's CPU kernel pads, which it cannot load again."""
    from onepolicy.models.load import read_config  # not in a server

    model = ModelConfig(path=path, trust_remote_code=trust_remote_code)
    rows = getattr(read_config(model).get_text_config(), "moe_intermediate_size", None)
    if rows is not None and rows % (CPU_EXPERT_ROWS * size):
        raise UsageError(
            f"rollout.engine.tensor_parallel_size: {size}, but each of {size} processes would have "
            f"{rows}/{size} rows of an expert, and on a CPU vLLM 0.30 loads only multiples of "
            f"{CPU_EXPERT_ROWS} again; lower it"
        )


def check_vllm_version(version: str, *, cpu: bool) -> None:
    """Raise UsageError if this vLLM cannot be an engine, with or without routes."""
    found = parse_version(version)
    if cpu and found != CPU:
        raise UsageError(
            f"rollout.engine.kind: vllm {version}: on the CPU only 0.30 is known to work; "
            "`make vllm` installs 0.30.0"
        )
    if found < OLDEST:
        raise UsageError(
            f"rollout.engine.kind: vllm {version}: before 0.16 reload_weights takes no tensors, so "
            "the engine would keep its first weights; use 0.28 to 0.30"
        )
    if found > NEWEST:
        raise UsageError(
            f"rollout.engine.kind: vllm {version} is newer than any that is known here; use 0.28 "
            "to 0.30"
        )


def has_monolithic_kernel(model: nn.Module) -> bool:
    """Return whether the kernel of some MoE layer of a vLLM model chooses the experts itself."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    return any(getattr(method, "is_monolithic", False) for method in methods)


def head_dtypes(model: nn.Module) -> list[str]:
    """Return the dtype in which each logits processor of a vLLM model computes the logits."""
    return [
        str(getattr(module, "head_dtype", None))
        for module in model.modules()
        if type(module).__name__ == "LogitsProcessor"
    ]


def check_head_dtype(found: list[list[str]]) -> None:
    """Raise UsageError unless all workers compute logits in float32.

    found: `head_dtypes` of each worker's model.
    """
    if any(not each or set(each) != {"torch.float32"} for each in found):
        raise UsageError(
            "rollout.engine.lm_head: float32 was asked for, but this vLLM computes the logits in "
            f"{found}; it needs https://github.com/vllm-project/vllm/pull/48390 (0.30 has it). "
            "Leave the setting out"
        )


@contextmanager
def _keep_set_num_threads() -> Iterator[None]:
    """Restore torch.set_num_threads, which vLLM's CPU worker replaces by an empty function."""
    original = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = original
