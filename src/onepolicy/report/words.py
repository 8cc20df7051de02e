"""The words that all pages and tables share: names of quantities, badges, courses of curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from onepolicy.notation import DASH, ends, number

Tree = dict[str, Any]

ARROW = "\N{RIGHTWARDS ARROW}"
TIMES = "\N{MULTIPLICATION SIGN}"

WOULD = "routes that would differ"
RAN = "experts that ran"
"""Experts that compute under replay: the rollout's, whatever the trainer's router would choose."""
ROLLOUTS_OWN = "100% the rollout's"
WHOLE = ("r3", "weights")
"""Modes of replay in which only the rollout's experts compute."""
STEADY, STRAYS = 0.1, 2.0
"""A curve is level if its ends differ by at most the first share and no value is beyond them by the
second factor."""
FEWEST_POINTS = 10
"""Fewest values of a curve whose ends show a direction."""
QUANTITIES = {  # metric -> (name, is a share)
    "mismatch/k3": ("k3, nats per token", False),
    "mismatch/k3_error": ("its standard error (by sequences)", False),
    "mismatch/k1": ("k1 = mean -log rho, nats per token", False),
    "mismatch/k2": ("k2, nats\N{SUPERSCRIPT TWO} per token", False),
    "mismatch/chi2": ("chi2", False),
    "mismatch/ess": ("Effective share of tokens", True),
    "mismatch/mean_rho": ("Mean rho", False),
    "mismatch/f1.25": ("F(1.25), tokens off by more than 1.25" + TIMES, True),
    "mismatch/f2": ("F(2), tokens off by more than 2" + TIMES, True),
    "mismatch/f5": ("F(5), tokens off by more than 5" + TIMES, True),
    "mismatch/max_dp": ("Largest difference of probability", False),
    "mismatch/max_dlogp": ("Largest |log rho|, nats", False),
    "mismatch/pearson": ("Correlation of probabilities", False),
    "mismatch/ppl_ratio": ("Perplexity, trainer / rollout", False),
    "routing/routers": (WOULD.capitalize(), True),
    "routing/tokens": ("Tokens with such a route", True),
    "routing/sequence": ("Such routes per token", False),
}
"""Every quantity of a gap, as all pages and tables name it, in their order."""
BADGES = {  # action of a verdict -> badge
    "bug": "bug",
    "nothing": "nothing to do",
    "replay": "replay the routes",
    "correct": "correct it",
    "unclear": "unclear: look first",
}
ALARMING = ("bug", "unclear")
"""Actions of a verdict that are shown in red."""
NEAR_ONE = ("mismatch/mean_rho", "mismatch/pearson", "mismatch/ppl_ratio")
HOW_FAR = "How far apart are the engine that samples and the one that learns?"
WHERE_ROUTES = "Where do the two choose different experts?"
FORECAST_HEADER = ("Preset", "Tokens kept", "Step multiplied by")


def show(metric: str, value: float | None) -> str:
    """Return a value of one of QUANTITIES as text."""
    if value is not None and metric in NEAR_ONE:
        return f"{value:.4f}"
    return number(value, share=QUANTITIES[metric][1])


def forecast_rows(forecasts: Sequence[Tree]) -> list[tuple[str, str, str]]:
    """Return the rows under FORECAST_HEADER: predicted effects of presets on the gap."""
    return [
        (each["preset"], number(each["keep"], share=True), number(each["attenuation"]))
        for each in forecasts
    ]


def factor(ratio: float | None) -> str:
    """Return a ratio as a factor, such as 2.5\u00d7; a dash if there is none."""
    if ratio is None:
        return DASH
    return f"{number(ratio)}{TIMES}"


def course(values: Sequence[float], unit: str = "") -> str:
    """Describe a curve in the words that follow its name in a title.

    First and last are means of the same windows as in the summary.
    """
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "is not known"
    of_unit = ""
    if unit:
        of_unit = f" {unit}"
    low, high = min(known), max(known)
    if len(known) == 1:
        return f"is {number(low)}{of_unit}, measured once"
    if low == high:
        return f"is {number(low)}{of_unit} throughout"
    window = max(1, min(5, len(known) // 2))
    first, last = statistics.fmean(known[:window]), statistics.fmean(known[-window:])
    low_end, high_end = sorted((first, last))
    if high_end - low_end <= STEADY * max(abs(first), abs(last)):
        if high > STRAYS * high_end or low < low_end / STRAYS:
            return (
                f"ends where it began, near {number(last)}{of_unit}, but was {number(low)} to "
                f"{number(high)} between"
            )
        return f"stays near {number(last)}{of_unit}"
    if len(known) < FEWEST_POINTS:
        return f"goes from {' to '.join(ends(known[0], known[-1]))}{of_unit}"
    verb, times = "falls", ""
    if last > first:
        verb = "rises"
    if low_end > 0 and high_end >= STRAYS * low_end:
        times = f" {number(high_end / low_end)}-fold,"
    return f"{verb}{times} from {' to '.join(ends(first, last))}{of_unit}"
