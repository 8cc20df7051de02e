"""The numbers of an audit, and what differs between two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from onepolicy.audit.judge import Audited
from onepolicy.report.words import number

Z95 = 1.959964


def numbers(each: Audited) -> dict[str, float]:
    """Overall statistics by name."""
    tally = each.tally
    assert tally.total is not None
    found = tally.total.numbers()
    if tally.routes is not None and tally.routes.slots:
        found |= {"routers": tally.routes.routers, "tokens_routed": tally.routes.tokens / tally.routes.slots}
    return found


@dataclass(frozen=True)
class Difference:
    """Of a mean between two dumps, the second less the first, with its 95% interval (normal, by sequences)."""

    value: float
    low: float
    high: float

    def text(self, *, share: bool = False) -> str:
        low, high = (number(bound, share=share) for bound in (self.low, self.high))
        return f"{number(self.value, share=share)} [{low}, {high}]"


def differences(a: Audited, b: Audited) -> dict[str, Difference]:
    """By statistic, of those whose standard error is known on both sides."""
    first, second = numbers(a), numbers(b)
    found = {}
    for name in first:
        error = math.hypot(first.get(f"{name}_error", math.nan), second.get(f"{name}_error", math.nan))
        if math.isfinite(error):
            value = second[name] - first[name]
            found[name] = Difference(value, value - Z95 * error, value + Z95 * error)
    return found


def compared(audited: Sequence[Audited]) -> str:
    """What the difference of k3 says, in a sentence; empty for one dump."""
    if len(audited) < 2 or (found := differences(*audited).get("k3")) is None:
        return ""
    a, b = audited
    if found.low <= 0 <= found.high:
        return f"k3 of {b.label} less that of {a.label} is {found.text()} nats a token: no difference is shown."
    word = "larger" if found.value > 0 else "smaller"
    return f"k3 is {word} in {b.label} than in {a.label}: {found.text()} nats a token."
