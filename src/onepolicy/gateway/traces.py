"""Episodes on disk: dumps that `onepolicy audit` reads, and a line of JSON for each episode."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onepolicy.files import replace_atomically
from onepolicy.gateway.history import History
from onepolicy.gateway.tree import breaks_of
from onepolicy.record.export import step_file
from onepolicy.record.schema import write_parquet
from onepolicy.types import RoutingTrace, TokenBatch

DUMP, EPISODES = "dump", "episodes.jsonl"
"""Names in the output folder."""


class TraceWriter:
    """The output folder of a gateway."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._episodes = 0
        folder.mkdir(parents=True)

    def write(
        self,
        name: str,
        history: History,
        *,
        scored: TokenBatch | None,
        native: TokenBatch | None = None,
        reward: float | None,
        note: str = "",
        is_open: bool = False,
    ) -> dict[str, Any]:
        """Write an episode and return its line.

        scored: its samples, scored by the trainer; None if it has none. native: scored without the
        engine's routes, if `scored` has them. reward: None for one that was not ended. note: a
        fault, if there was one. is_open: the episode stays open, and a later line counts it.
        """
        rows: list[dict[str, Any]] = []
        if scored is not None and reward is not None:
            rows = dump_rows(scored, native, step=self._episodes, reward=reward)
        line: dict[str, Any] = {"episode": name, "reward": reward, "step": self._episodes}
        line |= {"samples": len(rows), "counts": dict(history.counts())}
        line["breaks"] = breaks_of(history)
        if note:
            line["note"] = note
        if is_open:
            line["open"] = True
        self._write(rows, json.dumps(line) + "\n")
        self._episodes += 1
        return line

    def _write(self, rows: Sequence[dict[str, Any]], line: str) -> None:
        """Write the file of an episode with samples, and its line; neither if that fails.

        The file gets its name after the line is there. So whatever a killed gateway leaves, the
        dump has no episode without a line, and no half of one.
        """
        lines = self.folder / EPISODES
        size = 0
        if lines.exists():
            size = lines.stat().st_size
        try:
            if not rows:
                _append(lines, line)
                return
            file = step_file(self.folder / DUMP, self._episodes)
            file.parent.mkdir(exist_ok=True)
            with replace_atomically(file) as temporary:
                write_parquet(temporary, rows)
                _append(lines, line)
        except BaseException:
            with contextlib.suppress(OSError):
                os.truncate(lines, size)
            raise


def _append(file: Path, line: str) -> None:
    with file.open("a", encoding="utf-8") as opened:
        opened.write(line)


def dump_rows(
    scored: TokenBatch, native: TokenBatch | None, *, step: int, reward: float
) -> list[dict[str, Any]]:
    """Return a row of the audit's schema for every sample of an episode, prompt included."""
    bounds = scored.cu_seqlens.tolist()
    rows = []
    for start, stop in itertools.pairwise(bounds):
        slots = slice(start, stop)
        assert scored.logp_old is not None
        row: dict[str, Any] = {
            "tokens": [*scored.input_ids[slots].tolist(), int(scored.target_ids[stop - 1])],
            "mask": _predicted(scored.trainable[slots], False),
            "logp_rollout": _predicted(scored.logp_rollout[slots], 0.0),
            "logp_trainer": _predicted(scored.logp_old[slots], 0.0),
            "version": _predicted(scored.version[slots], -1),
            "turn": _predicted(scored.turn[slots], -1),
            "step": step,
            "reward": reward,
        }
        if scored.entropy is not None:
            row["entropy"] = _predicted(scored.entropy[slots], 0.0)
        if scored.support is not None:
            support = scored.support.at(slots)
            row["support_ids"] = support.ids.tolist()
            row["support_counts"] = _predicted(support.sizes, 0)
        if scored.logp_vocabulary is not None:
            row["logp_vocabulary"] = _predicted(scored.logp_vocabulary[slots], 0.0)
        if native is not None and native.logp_old is not None:
            row["logp_native"] = _predicted(native.logp_old[slots], 0.0)
        if scored.routing is not None and scored.routing_native is not None:
            row["routes_rollout"] = _route_entries(scored.routing, slots)
            row["routes_trainer"] = _route_entries(scored.routing_native, slots)
            row["route_layers"], row["route_top_k"] = scored.routing.ids.shape[1:]
        rows.append(row)
    return rows


def _predicted(values: Tensor, first: float) -> Sequence[Any]:
    """Return an entry for every token from values [T] of the slots that predict them."""
    return [first, *values.tolist()]


def _route_entries(trace: RoutingTrace, slots: slice) -> list[int]:
    """Return the ids of the slots that predict the tokens, flat; -1 where there is no route."""
    ids, valid = trace.ids[slots].to(torch.int32), trace.valid[slots]
    known = torch.where(valid[:, None, None], ids, -1)
    first = known.new_full((1, *known.shape[1:]), -1)  # no forward predicts the first token
    entries: list[int] = torch.cat([first, known]).flatten().tolist()
    return entries
