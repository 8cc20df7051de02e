"""`onepolicy engine serve`: reads the model's properties and starts a vLLM server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onepolicy.config import ModelConfig, UsageError
from onepolicy.config.input_files import absolute_path, resolve_model
from onepolicy.config.serve import ServeConfig
from onepolicy.models.load import context_length, read_config
from onepolicy.replay.layers import is_moe
from onepolicy.rollout.vllm.adapter import server_args
from onepolicy.rollout.vllm.serve import run_server
from onepolicy.rollout.vllm.start import check_cpu_hybrid


def serve_model(
    name: str,
    config: ServeConfig,
    *,
    host: str,
    port: int,
    token_env: str | None,
    names: Sequence[str],
    routes: bool,
    extra: Sequence[str],
    log: Callable[[str], None],
) -> int:
    """Serve a model until the server ends, and return its exit status.

    name: a folder, a hub id or `tiny`. names: other host names that requests may use. routes:
    return the routes of a MoE model. extra: arguments for vLLM. Raises UsageError if max_len is
    more than the model's context.
    """
    model = resolve_model(ModelConfig(path=name))
    hf_config = read_config(model)
    context = context_length(hf_config)
    max_len = config.max_len or context
    if max_len > context:
        raise UsageError(f"max_len: {max_len} is more than the model's context of {context}")
    cpu = not torch.cuda.is_available()
    if cpu:
        check_cpu_hybrid(config, hf_config.get_text_config(), section="")
    adapters = None
    if config.lora_rank is not None:
        adapters = _adapter_settings(config, config.lora_rank, model)
    return run_server(
        config,
        absolute_path(model.path),
        max_len=max_len,
        vocab=int(hf_config.get_text_config().vocab_size),
        return_routes=routes and is_moe(hf_config),
        cpu=cpu,
        adapters=adapters,
        host=host,
        port=port,
        token_env=token_env,
        names=names,
        extra=extra,
        log=log,
    )


def _adapter_settings(config: ServeConfig, rank: int, model: ModelConfig) -> dict[str, Any]:
    """Return vLLM's settings of a server that takes adapters.

    Raises UsageError for settings that were never run with them.
    """
    name = f"lora_rank: {rank}"
    if config.quant is not None:
        raise UsageError(
            f"{name}, but runs with train.lora.sync = native refuse rollout.quant; leave "
            "lora_rank or quant out"
        )
    if config.tensor_parallel_size > 1:
        raise UsageError(
            f"{name}, but adapters were never run with tensor_parallel_size = "
            f"{config.tensor_parallel_size}; leave lora_rank out, and use train.lora.sync = merged"
        )
    return server_args(rank, model)
