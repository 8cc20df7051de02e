"""`onepolicy engine serve`: what a server needs to know of the model it serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from onepolicy.build.learner import resolve_model
from onepolicy.config import ModelConfig, UsageError
from onepolicy.config.engine import ServeConfig
from onepolicy.models.load import context_length, read_config
from onepolicy.replay.checks import is_moe
from onepolicy.rollout.vllm.serve import serve


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
    say: Callable[[str], None],
) -> int:
    """Serve a folder, a hub id or `tiny` until it ends; its exit status. routes: return those of a MoE model."""
    model = resolve_model(ModelConfig(path=name))
    hf_config = read_config(model)
    context = context_length(hf_config)
    max_len = config.max_len or context
    if max_len > context:
        raise UsageError(f"max_len: {max_len} is more than the model's context of {context}")
    return serve(
        config,
        str(Path(model.path).resolve()) if Path(model.path).exists() else model.path,
        max_len=max_len,
        vocab=int(hf_config.get_text_config().vocab_size),
        routes=routes and is_moe(hf_config),
        cpu=not torch.cuda.is_available(),
        host=host,
        port=port,
        token_env=token_env,
        names=names,
        extra=extra,
        say=say,
    )
