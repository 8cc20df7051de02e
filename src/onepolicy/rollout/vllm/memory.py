"""The memory of a vLLM engine: the arguments that limit it, and the cache that they leave.

`engine_args` passes the arguments to vLLM and `onepolicy plan` computes with them, so a planned
engine is the one that is started.
"""

from __future__ import annotations

from typing import Any

from onepolicy.config import VLLMEngineConfig

GPU_SHARE = 0.92
"""Share of a GPU's memory for an engine on its own: the default of vLLM 0.30."""
CPU_CACHE_GIB = 1.0
"""Memory for keys and values on a CPU, where vLLM would take a share of the machine's [GiB]."""
RESERVE = 5 * 10**9
"""Bytes on a GPU for an engine's activations and CUDA graphs."""


def memory_args(config: VLLMEngineConfig, *, cpu: bool, share: float = GPU_SHARE) -> dict[str, Any]:
    """Return vLLM's EngineArgs that limit its memory. None leaves an argument to vLLM.

    On a GPU the cache takes what the weights leave of the share, unless kv_cache_gib is set. vLLM
    still refuses to start if the share is not free. share: of the GPU, unless the setting says one.
    """
    cache_gib = config.kv_cache_gib
    if cpu:
        return {"kv_cache_memory_bytes": int((cache_gib or CPU_CACHE_GIB) * 2**30)}
    cache: int | None = None
    if cache_gib is not None:
        cache = int(cache_gib * 2**30)
    return {
        "kv_cache_memory_bytes": cache,
        "gpu_memory_utilization": config.gpu_memory_utilization or share,
    }


def cache_bytes(
    arguments: dict[str, Any], *, memory: float, weights: float, reserve: float = RESERVE
) -> float:
    """Return the bytes for keys and values on a device of an engine with these EngineArgs.

    memory: bytes of the device. weights: bytes of the engine's weights on it. Negative if the
    weights alone do not fit.
    """
    given = arguments["kv_cache_memory_bytes"]
    if given is not None:
        return float(given)
    return memory * arguments["gpu_memory_utilization"] - weights - reserve
