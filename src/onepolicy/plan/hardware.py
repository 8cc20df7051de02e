"""The cluster a plan is for, and the constants of its devices: where each comes from is part of it. Loads no torch."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Literal

from onepolicy.config import UsageError

Origin = Literal["measured", "cited", "assumed", "given"]
COMMON = ("gpu", "cpu")  # entries of the file: what all GPUs share, a core


@dataclass(frozen=True, slots=True)
class Constant:
    value: float
    unit: str
    origin: Origin
    source: str  # the command that measured it, who is cited, or why it was assumed


@dataclass(frozen=True, slots=True)
class Cluster:
    """`count` devices of one kind. A device of a CPU cluster is one core."""

    count: int
    device: str
    constants: Mapping[str, Constant]

    def __str__(self) -> str:
        return f"{self.count}x{self.device}"

    def __getitem__(self, name: str) -> float:
        return self.constants[name].value

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def per_node(self) -> int:
        return int(self["per_node"])

    def collective(self, devices: int) -> float:
        """Bytes per second of a large collective per device: over links inside a node, else all adapters of a node."""
        speed = (
            self["link"]
            if devices <= self.per_node
            else min(self["link"], self["network"] * self.per_node)
        )
        return speed * self["link_efficiency"]

    def point_to_point(self) -> float:
        """Bytes per second from a learner to an engine's device: in another node if there are several."""
        return (self["link"] if self.count <= self.per_node else self["network"]) * self[
            "link_efficiency"
        ]


@cache
def _table() -> dict[str, dict[str, Constant]]:
    tree = json.loads((files("onepolicy.plan") / "hardware.json").read_text(encoding="utf-8"))
    return {
        device: {name: Constant(**entry) for name, entry in own.items()}
        for device, own in tree.items()
    }


def devices() -> list[str]:
    return [*sorted(set(_table()) - set(COMMON)), "cpu"]


def parse_cluster(text: str, given: Sequence[str] = ()) -> Cluster:
    """`8xH100`, `2xcpu`. given: `name=value` that replace constants, in their units. UsageError for anything else."""
    match = re.fullmatch(r"(\d{1,6})x(\w+)", text.strip())
    if match is None:
        raise UsageError(f"--cluster: {text!r} is not COUNTxDEVICE; e.g. 8xH100, 512xH200 or 2xcpu")
    count, asked = int(match[1]), match[2]
    device = next((name for name in devices() if name.lower() == asked.lower()), None)
    if device is None:
        close = difflib.get_close_matches(asked.upper(), devices(), n=1)
        mend = f"did you mean {count}x{close[0]}?" if close else f"known: {', '.join(devices())}"
        raise UsageError(
            f"--cluster: {asked!r} is no device known here; {mend} (for another one take the nearest and give its "
            "--constant memory=... flops=... bandwidth=... link=...)"
        )
    if count < 1:
        raise UsageError(f"--cluster: {text!r} has no devices; give at least one")
    table = _table()
    constants = table["cpu"] if device == "cpu" else table["gpu"] | table[device]
    cluster = Cluster(count, device, constants | _given(given, constants))
    if count > cluster.per_node and count % cluster.per_node:
        raise UsageError(
            f"--cluster: {count} devices are no whole number of nodes of {cluster.per_node}; use a multiple of "
            f"{cluster.per_node}, or --constant per_node=..."
        )
    return cluster


def _given(texts: Sequence[str], constants: Mapping[str, Constant]) -> dict[str, Constant]:
    found = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if name not in constants:
            raise UsageError(f"--constant: {name!r} is none; known: {', '.join(sorted(constants))}")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not sign or not 0 < number < float("inf"):
            raise UsageError(
                f"--constant: {text!r} reads NAME=VALUE with a positive number, in {constants[name].unit}"
            )
        found[name] = replace(constants[name], value=number, origin="given", source="--constant")
    return found
