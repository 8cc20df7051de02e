"""Rows of `onepolicy audit`'s schema, with the routes of both sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.record.export import write_step
from onepolicy.types import RoutingTrace

PER_TOKEN = ("mask", "logp_rollout", "logp_trainer", "logp_native", "entropy")


def dump_row(
    tokens: Tensor,  # [n] integer, the response
    mask: Tensor,  # [n] bool, true where the engine sampled
    logp_rollout: Tensor,  # [n] float32
    logp_trainer: Tensor,  # [n] float32, as it trained: with replay, if there was one
    *,
    step: int,
    logp_native: Tensor | None = None,  # [n] float32, the trainer's without replay
    entropy: Tensor | None = None,  # [n] float32
    reward: float | None = None,
    version: int | None = None,
) -> dict[str, Any]:
    """Return one sample's response as a row of the schema (`onepolicy.record.schema`).

    `add_routes` adds the routes.

    Raises:
        UsageError: a column has another length than the tokens.
    """
    given = (mask, logp_rollout, logp_trainer, logp_native, entropy)
    row: dict[str, Any] = {"tokens": tokens.tolist(), "step": step}
    for name, values in zip(PER_TOKEN, given, strict=True):
        if values is None:
            continue
        if values.shape != tokens.shape:
            raise UsageError(
                f"dump_row: {name} has shape {list(values.shape)}, the tokens {list(tokens.shape)}"
            )
        row[name] = values.detach().cpu().tolist()
    for name, value in (("reward", reward), ("version", version)):
        if value is not None:
            row[name] = value
    return row


def write_rows(
    folder: Path,
    step: int,
    rows: Sequence[Mapping[str, Any]],
    *,
    framework: str = "",
    rank: int = 0,
    ranks: int = 1,
) -> None:
    """Write the rows of one step, and keep older files of it. No row, no file: training goes on.

    A step has no row if the trainer masked all its samples, or this rank's.
    """
    if rows:
        write_step(folder, step, rows, rank=rank, ranks=ranks, keep_older=True, framework=framework)


def add_routes(
    rows: Sequence[dict[str, Any]],
    replayed: Sequence[RoutingTrace | None],
    native: Sequence[RoutingTrace | None],
    prompts: Sequence[int],
    shape: tuple[int, int],
) -> None:
    """Add the route columns to the rows of one step: the engine's routes and the trainer's own.

    Entry t is the route of the slot whose log-probability entry t is: the slot that fed the token
    before it. Routes that are not known are -1, of a step without any too: all rows of a dump have
    the same columns.

    Args:
        rows: as of `dump_row`.
        replayed: each sample's trace of the whole path, or None.
        native: each sample's own choice of the whole path, or None.
        prompts: tokens of each sample's prompt.
        shape: number of the model's MoE layers, and experts a token.
    """
    layers, top_k = shape
    for row, trace, own, prompt in zip(rows, replayed, native, prompts, strict=True):
        count = len(row["tokens"])
        slots = prompt - 1, prompt - 1 + count
        row["routes_rollout"] = _route_entries(trace, *slots, layers, top_k)
        row["routes_trainer"] = _route_entries(own, *slots, layers, top_k)
        row["route_layers"], row["route_top_k"] = layers, top_k


def _route_entries(
    trace: RoutingTrace | None, start: int, stop: int, layers: int, top_k: int
) -> list[int]:
    """Return the ids of slots [start, stop), flat; -1 where there is no route."""
    entries = torch.full((stop - start, layers, top_k), -1, dtype=torch.int32)
    if trace is not None:
        part = trace.rows(start, min(stop, len(trace))).to("cpu")
        ids = part.ids.to(torch.int32)
        entries[: len(ids)] = torch.where(part.valid[:, None, None], ids, -1)
    listed: list[int] = entries.flatten().tolist()
    return listed
