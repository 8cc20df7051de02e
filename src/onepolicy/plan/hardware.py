"""The cluster of a plan, and the constants of its devices with their sources. Imports no torch."""

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
COMMON_ENTRIES = ("gpu", "cpu")  # entries of hardware.json for all GPUs, and for a core


@dataclass(frozen=True, slots=True)
class Constant:
    """A number that a plan uses, and its source."""

    value: float
    unit: str
    origin: Origin
    source: str  # the command that measured it, the cited publication, or the reason to assume it


@dataclass(frozen=True, slots=True)
class Cluster:
    """A number of devices of one kind. A device of a CPU cluster is one core."""

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

    def collective_bandwidth(self, devices: int) -> float:
        """Return the bytes per second of a large collective, per device.

        Inside a node it uses the links, between nodes all network adapters of a node.
        """
        speed = self["link"]
        if devices > self.per_node:
            speed = min(speed, self["network"] * self.per_node)
        return speed * self["link_efficiency"]

    def host_bandwidth(self) -> float:
        """Return the bytes per second between a device and its host, each way at once."""
        return self["pcie"] * self["link_efficiency"]

    def point_to_point_bandwidth(self) -> float:
        """Return the bytes per second from a learner to an engine's device.

        If there are several nodes, the engine is in another one.
        """
        speed = self["network"]
        if self.count <= self.per_node:
            speed = self["link"]
        return speed * self["link_efficiency"]


@cache
def _table() -> dict[str, dict[str, Constant]]:
    tree = json.loads((files("onepolicy.plan") / "hardware.json").read_text(encoding="utf-8"))
    return {
        device: {name: Constant(**fields) for name, fields in constants.items()}
        for device, constants in tree.items()
    }


def known_devices() -> list[str]:
    return [*sorted(set(_table()) - set(COMMON_ENTRIES)), "cpu"]


def parse_cluster(text: str, given: Sequence[str] = ()) -> Cluster:
    """Read `8xH100` or `2xcpu`.

    given: `name=value` texts that replace constants, in their units. Raises UsageError for anything
    else.
    """
    match = re.fullmatch(r"(\d{1,6}) *x *([\w -]+)", text.strip())
    if match is None:
        raise UsageError(f"--cluster: {text!r} is not COUNTxDEVICE; e.g. 8xH100, 512xH200 or 2xcpu")
    count, device = int(match[1]), _find_device(int(match[1]), match[2])
    if count < 1:
        raise UsageError(f"--cluster: {text!r} has no devices; give at least one")
    table = _table()
    constants = table["cpu"]
    if device != "cpu":
        constants = table["gpu"] | table[device]
    cluster = Cluster(count, device, constants | _parse_constants(given, constants))
    if count > cluster.per_node and count % cluster.per_node:
        raise UsageError(
            f"--cluster: {count} devices are no whole number of nodes of {cluster.per_node}; "
            f"use a multiple of {cluster.per_node}, or --constant per_node=..."
        )
    return cluster


def _find_device(count: int, asked: str) -> str:
    name = re.sub(r"[ _-]", "", asked).lower()
    for device in known_devices():
        if device.lower() in (name, f"rtx{name}"):
            return device
    fix = f"known: {', '.join(known_devices())}"
    close = difflib.get_close_matches(asked.upper(), known_devices(), n=1)
    if close:
        fix = f"did you mean {count}x{close[0]}?"
    raise UsageError(
        f"--cluster: {asked!r} is no device known here; {fix} (for another one take the nearest "
        "and give its --constant memory=... flops=... bandwidth=... link=...)"
    )


def _parse_constants(
    texts: Sequence[str], constants: Mapping[str, Constant]
) -> dict[str, Constant]:
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
                f"--constant: {text!r} must be NAME=VALUE with a positive number, "
                f"in {constants[name].unit}"
            )
        found[name] = replace(constants[name], value=number, origin="given", source="--constant")
    return found
