"""Settings that a recipe leaves open and that are other on a GPU than on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from onepolicy.build.components import model_to_load
from onepolicy.build.room import settle_max_len
from onepolicy.config import RunConfig
from onepolicy.models.load import parse_device


def settle_gpu_settings(
    config: RunConfig, weights: Path | None, note: Callable[[str], None]
) -> RunConfig:
    """Return the settings of a new run on a GPU, which are stored with it. note: gets them.

    weights: see `build_components`.
    """
    config = apply_gpu_defaults(config, note)
    return settle_max_len(config, model_to_load(config, weights), note)


def apply_gpu_defaults(config: RunConfig, note: Callable[[str], None]) -> RunConfig:
    """Return the settings of a new run with the GPU's defaults, and say so in one line.

    Nothing changes on a CPU.
    """
    if parse_device(config.train.device).type != "cuda":
        return config
    return with_gpu_precision(config, note, ranks=bool(config.train.ranks))


def with_gpu_precision(config: RunConfig, note: Callable[[str], None], *, ranks: bool) -> RunConfig:
    """Return the settings with the precision that a run on GPUs has. ranks: it is sharded.

    It computes in bfloat16 with float32 master weights: with float32 products a GPU has a fifteenth
    of its speed, and attention takes its slowest kernel. A dtype, autocast or fsdp_param_dtype that
    was given stays, a float32 engine too.
    """
    model, train = config.model, config.train
    if config.names_precision:
        return config
    if ranks:
        note(
            "on a GPU: train.fsdp_param_dtype = bfloat16, the shards stay float32 "
            "(train.fsdp_param_dtype=same for float32 throughout)"
        )
        train = train.model_copy(update={"fsdp_param_dtype": "bfloat16"})
        return config.model_copy(update={"train": train})
    note(
        "on a GPU: model.dtype = bfloat16 with float32 master weights (model.dtype=float32 for "
        "float32 throughout)"
    )
    return config.model_copy(update={"model": model.model_copy(update={"dtype": "bfloat16"})})
