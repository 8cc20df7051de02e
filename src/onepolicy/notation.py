"""Measured numbers as text, the same on every page and on every line of the terminal."""

from __future__ import annotations

import math

DASH = "\N{EN DASH}"
"""The text in the place of a value that there is not."""


def number(value: float | None, *, share: bool = False) -> str:
    """Return a value with three significant digits: 0.0123, 1.76e-3, 12,300; DASH if none.

    With `share` a value of 1 is 100%.
    """
    if value is None or math.isnan(value):
        return DASH
    if share:
        percent = 100 * value
        if 0 < abs(percent) < 0.01:
            return "<0.01%"
        return f"{percent:.3g}%"
    size = abs(value)
    if value == 0 or 1e-2 <= size < 999.5:
        return f"{value:.3g}"
    if 999.5 <= size < 1e5:
        return f"{value:,.0f}"
    if math.isinf(value):
        return f"{value}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def with_error(value: float, error: float) -> str:
    """Return 1.0500 +- 0.0020 or (1.760 +- 0.046)e-3; without an error above 0 the value alone."""
    if not math.isfinite(value) or not math.isfinite(error) or error <= 0:
        return number(value)
    size, exponent = max(abs(value), error), 0
    if not 1e-2 <= size < 1e5:
        exponent = math.floor(math.log10(size))
    value, error = value / 10**exponent, error / 10**exponent
    decimals = min(9, max(0, 1 - math.floor(math.log10(error))))  # two digits of the error
    text = f"{value:,.{decimals}f} +- {error:,.{decimals}f}"
    return f"({text})e{exponent}" if exponent else text


def counted(count: int, noun: str) -> str:
    """Return a number of things: 1 step, 12,300 steps, 2 batches."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"1 {noun}" if count == 1 else f"{count:,} {noun}{ending}"
