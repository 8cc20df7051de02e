"""Start vLLM in this process. The only file that imports it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from onepolicy.config import UsageError, VLLMEngineConfig
from onepolicy.rollout.vllm.contract import check_version

# In this process, so that weights are handed over without a copy; quiet; nothing sent anywhere.
_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
_DEFAULTS = {"VLLM_LOGGING_LEVEL": "ERROR"}


def start(
    config: VLLMEngineConfig,
    path: str,
    *,
    max_len: int,
    top_logprobs: int,
    routes: bool,
    cpu: bool,
    trust_remote_code: bool,
) -> Any:
    """vLLM's LLMEngine with the model of `path` loaded. UsageError if vLLM is missing or of a version we refuse.

    max_len, top_logprobs: most that a request may ask for.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UsageError(
            "rollout.engine.kind: vllm is not installed; run `make vllm` (CPU) or pip install 'onepolicy[vllm]' (CUDA)"
        )
    os.environ.update(_ENVIRONMENT | {name: value for name, value in _DEFAULTS.items() if name not in os.environ})
    import vllm

    check_version(vllm.__version__, cpu=cpu, routes=routes)
    from vllm.platforms import current_platform

    if (current_platform.device_type == "cpu") != cpu:
        raise UsageError(
            f"rollout.engine.kind: this vllm was built for {current_platform.device_type}, which is not train.device; "
            "set train.device to it or install the other build"
        )
    if cpu:  # or the first call compiles one comparison with a C++ compiler for 5 to 15 s
        type(current_platform).simple_compile_backend = "eager"
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = EngineArgs(
        model=path,
        trust_remote_code=trust_remote_code,
        skip_tokenizer_init=True,  # token ids in, token ids out
        generation_config="vllm",  # no sampling defaults from the model's folder
        dtype=config.dtype,
        max_model_len=max_len,
        max_num_seqs=config.slots,
        block_size=config.block_size,
        enable_prefix_caching=config.prefix_reuse,
        kv_cache_memory_bytes=int(config.cache_gib * 2**30),
        max_logprobs=top_logprobs,
        logprobs_mode="processed_logprobs",  # of the distribution sampled from
        enable_return_routed_experts=routes,
        enforce_eager=cpu,
        enable_chunked_prefill=not cpu,  # 0.30.0 cannot rewind a CPU request's generator after half a prompt
        disable_log_stats=True,
        use_tqdm_on_load=False,
        seed=0,  # every request brings its own
    )
    with _threads_kept():
        return LLMEngine.from_engine_args(arguments)


@contextmanager
def _threads_kept() -> Iterator[None]:
    """vLLM's CPU worker replaces torch.set_num_threads by a function that does nothing."""
    original = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = original
