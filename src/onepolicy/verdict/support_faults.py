"""Signs of values that are not over the sets that the tokens were drawn from (top-p, top-k)."""

from __future__ import annotations

from onepolicy.verdict.scored_tokens import FEWEST, Finding, Pairs

LEAST_GAP = 1e-3
"""Nats: mean |log rho| below which sets explain nothing that matters."""
LARGE, ONE_SIDE = 0.05, 0.93
"""Nats from which log rho counts, and its share on one side: the sets of one side hold more.

Mismatch is on both sides of 0.
"""
SAME = 1e-5
"""Nats: the largest distance of the trainer's values from its own over the whole vocabulary."""
WHOLE = 0.985
"""Probability from which a set counts as the whole vocabulary."""


def over_other_sets(pairs: Pairs) -> Finding | None:
    """Return a finding if a side's values are over the whole vocabulary, or over other sets.

    A softmax over a set that holds the probability m adds -log m to the log-probability over the
    whole vocabulary, so each side's values say how much its sets hold. Sets of another top-p, top-k
    or min-p move every uncertain token to the same side.
    """
    whole = pairs.vocabulary
    if whole is None or len(pairs.old) < FEWEST or float(pairs.gap.mean()) <= LEAST_GAP:
        return None
    log_rho, scored_raw = pairs.old - pairs.rollout, (pairs.old - whole).abs() <= SAME
    large = log_rho.abs() > LARGE
    if int(large.sum()) < FEWEST:
        return None
    above = float((log_rho[large] > 0).double().mean())
    if max(above, 1 - above) < ONE_SIDE:
        return None
    if scored_raw.all():
        return Finding(
            "support",
            f"the trainer's values are over the whole vocabulary, the engine's over sets: rho is "
            f"below 1 at {1 - above:.0%} of the tokens whose log rho is above {LARGE} nats. Score "
            "over the supports (docs/supports.md)",
        )
    held = [float((whole - side)[large].median().exp()) for side in (pairs.rollout, pairs.old)]
    how = "they were cut by another top-p, top-k or min-p"
    if held[0] > WHOLE:
        how = "the engine's values are raw, as before top-p, top-k and min-p"
    return Finding(
        "support",
        f"where log rho is above {LARGE} nats the engine's values are over sets that hold "
        f"{held[0]:.0%} of the trainer's probability, the trainer's over sets that hold "
        f"{held[1]:.0%}: {how}",
    )
