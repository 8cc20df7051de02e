"""The change of an engine's log-probabilities that is no sign of other weights."""

from __future__ import annotations


def canary_floor(dtype: str, *, cpu: bool) -> float:
    """Return the change [nats] of a log-probability that is no sign of other weights.

    Two forwards of the same weights on a GPU may add in another order (atomics), rarely enough that
    two canaries do not show it. It is one unit in the last place of a logit: of one up to 16 in
    bfloat16, with room for the layers below it in float32. On a CPU it is 0.
    """
    if cpu:
        return 0.0
    return {"bfloat16": 2.0**-4, "float32": 1e-4}[dtype]
