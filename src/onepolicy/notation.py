"""Measured numbers as text, the same on every page and on every line of the terminal."""

from __future__ import annotations

import math
import re

DASH = "\N{EN DASH}"
"""The text in the place of a value that there is not."""
ROUNDING = 1e-9
"""Relative difference within which a value counts as one of at most two digits."""


def number(value: float | None, *, share: bool = False) -> str:
    """Return a value with three significant digits: 0.120, 1.70e-3, 12,300; DASH if none.

    A whole number and one of at most two digits, as limits are, are written as they are: 12, 5e-4.
    With `share` a value of 1 is 100%.
    """
    if value is None or math.isnan(value):
        return DASH
    if share:
        percent = 100 * value
        if 0 < abs(percent) < 0.01:
            return "<0.01%"
        if 99.95 <= percent < 100:  # three digits would say all
            return ">99.9%"
        return f"{_digits(percent)}%"
    size = abs(value)
    if value == 0 or 1e-2 <= size < 999.5:
        return _digits(value)
    if 999.5 <= size < 1e5:
        return f"{value:,.0f}"
    if math.isinf(value):
        return f"{value}"
    mantissa, exponent = f"{value:.2e}".split("e")
    if _is_short(value):
        mantissa = f"{float(mantissa):g}"
    return f"{mantissa}e{int(exponent)}"


def _digits(value: float) -> str:
    if _is_short(value) or math.isclose(value, round(value), rel_tol=ROUNDING):
        return f"{value:.3g}"
    return f"{value:#.3g}".removesuffix(".")


def _is_short(value: float) -> bool:
    """Return whether the value has at most two digits."""
    return math.isclose(value, float(f"{value:.2g}"), rel_tol=ROUNDING)


def ends(first: float | None, last: float | None) -> tuple[str, str]:
    """Return two values of one curve as text, up to three decimals as many in both: 0.45, 0.90."""
    texts = number(first), number(last)
    if not all(re.fullmatch(r"-?[0-9]+(\.[0-9]{1,3})?", text) for text in texts):
        return texts
    most = max(len(text.partition(".")[2]) for text in texts)
    return f"{first:.{most}f}", f"{last:.{most}f}"


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
