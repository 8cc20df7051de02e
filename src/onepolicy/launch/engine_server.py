"""`onepolicy engine serve`: reads the model's properties and starts a vLLM server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from onepolicy.config import ModelConfig, UsageError
from onepolicy.config.engine import ServeConfig
from onepolicy.config.model_path import resolve_model
from onepolicy.models.load import context_length, read_config
from onepolicy.replay.checks import is_moe
from onepolicy.rollout.vllm.serve import run_server


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
    path = model.path
    if Path(path).exists():
        path = str(Path(path).resolve())
    return run_server(
        config,
        path,
        max_len=max_len,
        vocab=int(hf_config.get_text_config().vocab_size),
        return_routes=routes and is_moe(hf_config),
        cpu=not torch.cuda.is_available(),
        host=host,
        port=port,
        token_env=token_env,
        names=names,
        extra=extra,
        log=log,
    )
