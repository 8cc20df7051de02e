"""Updates that are skipped because their gradients are not finite (optim.max_skipped)."""

from __future__ import annotations

import math

from onepolicy.config import TrainingError


def count_skipped_update(skipped: int, max_skipped: int, norms: list[float], step: int) -> int:
    """Return the number of updates skipped in a row, after one more.

    norms: of the policy's gradients and, if there is a critic, of the critic's. One is not finite.
    Raises TrainingError if more than `max_skipped` updates in a row would be skipped.
    """
    norm = next(norm for norm in norms if not norm < math.inf)
    if skipped < max_skipped:
        return skipped + 1
    network = ""
    if norms[0] < math.inf:
        network = "of the critic "
    before = ""
    if max_skipped:
        before = f" after {skipped} in a row that were skipped (optim.max_skipped)"
    raise TrainingError(
        f"gradient norm {network}is {norm} in step {step}{before}; this update was not made. Fork "
        "from an earlier checkpoint with a lower optim.lr, and look at mismatch/k3 and "
        "train/entropy before it"
    )
