"""Bytes of the parts of a model before and after quantisation, for the log and for run.json."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from onepolicy.config.quant import QuantFormat

ROUTER_NAMES = frozenset({"gate", "router", "shared_expert_gate"})
"""The last names of routers' modules, in checkpoints and in engines."""


# Part and the words in a path that mark it; the first match counts
_PARTS = (
    ("norms", {"norm", "layernorm", "ln"}),
    ("experts", {"experts", "expert"}),
    ("attention", {"attn", "attention", "self"}),
    ("embeddings", {"embed", "embeddings", "wte"}),
    ("lm_head", {"head"}),
    ("mlp", {"mlp", "feed", "ffn"}),
)


@dataclass(frozen=True, slots=True)
class PartSize:
    """The size of one part of a model, such as its experts."""

    part: str
    parameters: int
    bytes_before: int  # in the engine's dtype
    bytes_after: int


def sum_by_part(sizes: Iterable[PartSize]) -> list[PartSize]:
    """Return one size per part, largest first."""
    by_part: dict[str, list[PartSize]] = {}
    for size in sizes:
        by_part.setdefault(size.part, []).append(size)
    sums = [_sum(part, sizes_of_part) for part, sizes_of_part in by_part.items()]
    return sorted(sums, key=lambda size: -size.parameters)


def _sum(name: str, sizes: Sequence[PartSize]) -> PartSize:
    return PartSize(
        name,
        parameters=sum(size.parameters for size in sizes),
        bytes_before=sum(size.bytes_before for size in sizes),
        bytes_after=sum(size.bytes_after for size in sizes),
    )


@dataclass(frozen=True, slots=True)
class SizeReport:
    """The sizes of an engine's weights under rollout.quant."""

    config: QuantFormat
    parts: list[PartSize]  # as `sum_by_part` returns them
    method: str = ""  # an engine's own name of the format

    def as_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict for run.json."""
        report = self.config.model_dump(mode="json")
        if self.method:
            report["method"] = self.method
        report["parts"] = [asdict(part) for part in [*self.parts, _sum("all", self.parts)]]
        return report

    def describe(self) -> str:
        """Return the line that is printed at the start."""
        method = ""
        if self.method:
            method = f" ({self.method})"
        sizes = ", ".join(f"{p.part} {p.bytes_before:,} to {p.bytes_after:,}" for p in self.parts)
        return f"rollout.quant {self.config.format}{method}, bytes in the engine: {sizes}"


def part_name(name: str) -> str:
    """Return the part that a weight or module belongs to. `name` is its path."""
    if ROUTER_NAMES & set(name.split(".")):
        return "router"
    words = set(name.replace("_", ".").split("."))
    for part, marks in _PARTS:
        if marks & words:
            return part
    return "other"
