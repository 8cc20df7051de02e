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
