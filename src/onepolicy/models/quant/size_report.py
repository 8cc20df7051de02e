"""What the parts of a model take before and after quantisation: counted, printed at the start, kept in run.json."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any

from onepolicy.config.quant import QuantFormat

ROUTER_NAMES = frozenset({"gate", "router", "shared_expert_gate"})
"""Last names of modules that route, in checkpoints and in engines."""


@dataclass(frozen=True, slots=True)
class PartSize:
    part: str
    parameters: int
    bytes_before: int  # in the engine's dtype
    bytes_after: int


def sum_by_part(sizes: Iterable[PartSize]) -> list[PartSize]:
    """One per part, largest first."""
    found: dict[str, PartSize] = {}
    for size in sizes:
        found[size.part] = _add(found[size.part], size) if size.part in found else size
    return sorted(found.values(), key=lambda size: -size.parameters)


def _add(a: PartSize, b: PartSize) -> PartSize:
    return PartSize(a.part, *(x + y for x, y in zip(astuple(a)[1:], astuple(b)[1:], strict=True)))


@dataclass(frozen=True, slots=True)
class SizeReport:
    """Of an engine's weights under rollout.quant."""

    config: QuantFormat
    parts: list[PartSize]  # as `summed` returns them
    method: str = ""  # what the engine makes of the format, where it is not ours

    def as_json(self) -> dict[str, Any]:
        """JSON-ready, for run.json."""
        totals = PartSize(
            "all", *(sum(getattr(p, f.name) for p in self.parts) for f in fields(PartSize)[1:])
        )
        about = self.config.model_dump(mode="json") | (
            {"method": self.method} if self.method else {}
        )
        return about | {"parts": [asdict(part) for part in [*self.parts, totals]]}

    def describe(self) -> str:
        sizes = ", ".join(f"{p.part} {p.bytes_before:,} to {p.bytes_after:,}" for p in self.parts)
        made = f" ({self.method})" if self.method else ""
        return f"rollout.quant {self.config.format}{made}, bytes in the engine: {sizes}"


def part_name(name: str) -> str:
    """The kind of part that a weight or module belongs to, by its path."""
    if ROUTER_NAMES & set(name.split(".")):
        return "router"
    words = name.replace("_", ".").split(".")
    for part, marks in (
        ("norms", {"norm", "layernorm", "ln"}),
        ("experts", {"experts", "expert"}),
        ("attention", {"attn", "attention", "self"}),
        ("embeddings", {"embed", "embeddings", "wte"}),
        ("lm_head", {"head"}),
    ):
        if marks & set(words):
            return part
    return "mlp" if {"mlp", "feed", "ffn"} & set(words) else "other"
