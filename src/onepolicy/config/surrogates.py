"""The surrogates of a policy's loss, from surrogates.toml: rows that rules and docs read."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

LEVELS = ("token", "sequence", "sequence-token", "trajectory")
"""What objective.ratio_level can be."""


class SurrogateRow(NamedTuple):
    """A surrogate of a slot with ratio r and advantage A."""

    loss: str
    gradient: str  # by log p
    source: str
    reads: tuple[str, ...] = ()  # settings of `objective` that its function gets by name
    levels: tuple[str, ...] = LEVELS  # that the ratio can have; none: no ratio_level is read
    has_ratio: bool = True  # r is a factor, so that a ratio new/rollout corrects it
    detached: bool = False  # r carries no gradient
    whole_samples: bool = False  # a slot's loss is one of its sample, so A is one per sample


SURROGATES = {
    name: SurrogateRow(**row)
    for name, row in tomllib.loads(
        Path(__file__).with_name("surrogates.toml").read_text(encoding="utf-8")
    ).items()
}
BOUNDS = tuple(dict.fromkeys(name for row in SURROGATES.values() for name in row.reads))
"""Settings of all surrogates. They do nothing where r is 1."""

if TYPE_CHECKING:
    SurrogateName = str
else:
    SurrogateName = Literal[tuple(SURROGATES)]


def markdown_table() -> str:
    """Return the table of surrogates of docs/objectives.md."""
    rows = [f"| {name} | {row.loss} | {row.gradient} |" for name, row in SURROGATES.items()]
    return "\n".join(["| surrogate | loss of a slot | gradient by log p |", "|---|---|---|", *rows])
