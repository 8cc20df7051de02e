"""Statistics as a test states them: the numbers that a verdict reads."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StatedGap:
    """A gap in the place of `Statistics`. NaN: not known."""

    tokens: int
    sequences: int
    k3: float
    f2: float
    f5: float
    max_dlogp: float
    k3_error: float = math.nan
    mean_rho: float = math.nan
    mean_rho_error: float = math.nan

    def standard_error(self, name):
        return {"k3": self.k3_error, "excess": self.mean_rho_error}[name]
