"""How old the tokens of a dump were when they were trained on, as it declares (`trained_version`), and k3 by that age.

Sampling while learning makes tokens old on purpose: that is a reason for their gap, and not a bug.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from onepolicy.audit.schema import Array
from onepolicy.correct.pairs import EXPLAINED, FEWEST
from onepolicy.measure.attribution import k3_terms
from onepolicy.report.words import number

OLDEST = 64  # and beyond


@dataclass(slots=True)
class Ages:
    found: dict[int, tuple[int, float]] = field(default_factory=dict)  # age: tokens, sum of k3 [nats]

    def add(self, age: Array, trainer: Array, rollout: Array) -> None:
        """age [n] int64, in updates; log-probabilities [n] float64."""
        terms = k3_terms(torch.from_numpy(trainer), torch.from_numpy(rollout)).numpy()
        age = age.clip(0, OLDEST)
        for each in np.unique(age).tolist():
            tokens, total = self.found.get(each, (0, 0.0))
            self.found[each] = tokens + int((age == each).sum()), total + float(terms[age == each].sum())

    @property
    def k3(self) -> dict[int, float]:
        """By age."""
        return {age: total / tokens for age, (tokens, total) in sorted(self.found.items())}

    @property
    def old(self) -> bool:
        """Any token is."""
        return max(self.found, default=0) > 0

    @property
    def explain(self) -> bool:
        """Most of the gap: the newest tokens, if there are enough, have less than EXPLAINED of the k3 of all."""
        if not self.old:
            return False
        tokens, total = (sum(values) for values in zip(*self.found.values(), strict=True))
        return self.found.get(0, (0, 0.0))[0] < FEWEST or self.k3[0] < EXPLAINED * total / tokens

    def text(self) -> str:
        tokens = sum(count for count, _ in self.found.values())
        of_age = (
            f"{number(k3)} at {age} ({self.found[age][0] / tokens:.0%} of the tokens)" for age, k3 in self.k3.items()
        )
        return f"k3 by age, in updates: {', '.join(of_age)}."
