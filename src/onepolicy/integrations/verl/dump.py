"""A step of verl's V1 trainer as a dump for `onepolicy audit`, with the routes of both sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from verl.protocol import DataProto

from onepolicy.integrations.core.dump import add_routes
from onepolicy.integrations.verl.routes import NATIVE_ROUTES, ROUTES
from onepolicy.integrations.verl.workers import ModelRouters
from onepolicy.record.export import write_step
from onepolicy.record.export.verl import batch_rows
from onepolicy.replay.axes import trace_from
from onepolicy.types import RoutingTrace, id_dtype

ROWS = ["responses", "response_mask", "rollout_log_probs", "old_log_probs", "entropy", "rm_scores"]
FIELDS = [*ROWS, "prompts", ROUTES, NATIVE_ROUTES]
"""Fields of verl's batch that a dump reads."""


def write_batch(
    data: Any,
    tags: Sequence[Mapping[str, Any]],
    routers: ModelRouters | None,
    folder: Path,
    step: int,
    *,
    part: int = 0,
) -> Path | None:
    """Write a batch to FOLDER/step_00012_0.parquet; none if all its responses are empty.

    Args:
        data: TensorDict of FIELDS, nested. Routes may be missing.
        tags: verl's tags of the samples. Those that it made up to fill the batch are left out.
        routers: the model's routers; None without routes.
        folder, step: where to write, and the number of the step.
        part: number of the batch in the step. A separate asynchronous trainer has several.
    """
    lengths = data["responses"].offsets().diff().tolist()
    made_up = (tag.get("is_padding", False) for tag in tags)
    real = [i for i, padding in enumerate(made_up) if lengths[i] and not padding]
    if not real:
        return None
    rows = batch_rows(_padded(data, tags, real), step)
    for row in rows:  # the batch may hold no sample of the weights that train in this step
        if "trained_version" in row:
            row["trained_version"] = max(row["trained_version"], step - 1)
    replays = routers is not None and {ROUTES, NATIVE_ROUTES} <= set(data.keys())
    if replays:
        assert routers is not None
        prompts = data["prompts"].offsets().diff().tolist()
        replayed, native = data[ROUTES].unbind(), data[NATIVE_ROUTES].unbind()
        add_routes(
            rows,
            [_rollout_trace(replayed[i], routers) for i in real],
            [_native_trace(native[i], routers) for i in real],
            [prompts[i] for i in real],
            (len(routers.layers), native[0].shape[-1]),
        )
    return write_step(
        folder, step, rows, rank=part, keep_older=True, framework="verl", replayed=replays
    )


def _padded(data: Any, tags: Sequence[Mapping[str, Any]], real: list[int]) -> DataProto:
    """Return these samples as the DataProto that the exporter of verl's batches reads."""
    present = set(ROWS) & set(data.keys())
    tensors = {name: data[name].to_padded_tensor(0)[real] for name in present}
    lengths = data["responses"].offsets().diff()[real]
    positions = torch.arange(tensors["responses"].shape[1])
    tensors["attention_mask"] = positions < lengths.cpu()[:, None]
    extra = {}
    for name in ("min_global_steps", "max_global_steps"):
        versions = [tags[i].get(name) for i in real]
        if all(version is not None for version in versions):
            extra[name] = np.array(versions)
    return DataProto(TensorDict(tensors, batch_size=len(real)), non_tensor_batch=extra)


def _rollout_trace(ids: Tensor, routers: ModelRouters) -> RoutingTrace:
    """Return the engine's routes [tokens, layers, K] of one sample; all-zero rows are invalid."""
    captured = None
    if ids.shape[-1] > 1:  # with one expert a token, 0 is a route
        captured = (ids != 0).flatten(1).any(1).cpu()
    return trace_from(
        ids.cpu(),
        layers=routers.layers,
        depth=routers.depth,
        num_experts=routers.num_experts,
        valid=captured,
    )


def _native_trace(ids: Tensor, routers: ModelRouters) -> RoutingTrace:
    """Return the trainer's own choice [tokens, layers, K] of one sample; -1 is invalid."""
    known = (ids >= 0).flatten(1).all(1)
    kept = ids.clamp(min=0).to(id_dtype(routers.num_experts))
    return RoutingTrace(kept.cpu(), known.cpu(), routers.layers, routers.num_experts)
