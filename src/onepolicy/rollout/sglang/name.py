"""What we call the weights of a SGLang server. It is the only thing that a server keeps for us, and it comes with every
completion."""

from __future__ import annotations

import base64
import dataclasses
import re
from dataclasses import dataclass
from typing import Self

import numpy as np

from onepolicy.rollout.body import Malformed, shown
from onepolicy.rollout.http import EngineClient

NEVER_NAMED = "default"  # SGLang's name of the weights it started with
FIRST = "first"  # ours
OURS = re.compile(rf"onepolicy\.([^.]*)\.({FIRST}|[0-9]{{1,9}})\.([A-Za-z0-9_=-]*)")  # run, weights, probe


@dataclass(frozen=True, slots=True)
class Name:
    run: str = ""  # who gave the weights, or connected last
    weights: str = FIRST  # version, or FIRST for those the server was started with
    probe: str = ""  # base64 of float32: log-probabilities of a fixed batch under the first weights

    def __str__(self) -> str:
        return f"onepolicy.{self.run}.{self.weights}.{self.probe}"

    @classmethod
    def of(cls, name: str) -> Self | None:
        """None for a name that is not ours."""
        found = OURS.fullmatch(name)
        if found is None:
            return None
        ours = cls(*found.groups())
        try:
            ours.first_probe()
        except ValueError:  # no base64, or no whole numbers of 4 bytes
            return None
        return ours

    @property
    def version(self) -> int:
        return 0 if self.weights == FIRST else int(self.weights)

    @property
    def key(self) -> str:
        """Prefixes are shared among requests of one key."""
        return f"{self.run}.{self.weights}"

    def first_probe(self) -> list[float] | None:
        if not self.probe:
            return None
        return np.frombuffer(base64.urlsafe_b64decode(self.probe), dtype="<f4").tolist()

    def with_probe(self, values: list[float]) -> Self:
        data = np.asarray(values, dtype="<f4").tobytes()
        return dataclasses.replace(self, probe=base64.urlsafe_b64encode(data).decode())


async def name_of(client: EngineClient) -> str:
    """What the server calls the weights it holds."""

    def parse(reply: object) -> str:
        name = reply.get("weight_version") if isinstance(reply, dict) else None
        if not isinstance(name, str):
            raise Malformed(f"expected a weight_version, got {shown(reply)}")
        return name

    return await client.get("/model_info", parse=parse)
