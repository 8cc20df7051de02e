"""The diagnosis of a run's first scored step, as one line in the trainer's log."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from onepolicy.config.presets import frameworks
from onepolicy.correct.equations import in_their_settings
from onepolicy.divergence.logprob import mismatch
from onepolicy.verdict.bug_signatures import diagnose
from onepolicy.verdict.rules import R3, RAW_OR_PROCESSED, correction_for, size_in_words
from onepolicy.verdict.scored_tokens import FEWEST

ENOUGH = 100_000
"""Tokens of whole rows that are judged. More take seconds and say the same."""
GATHERED = 2_000
"""Tokens that are gathered where samples come one at a time."""


class FirstStep:
    """Diagnose the first step in which both sides scored a token, as `op.diagnose` does.

    A step that is not clean is one warning of the logger `onepolicy`: a bug, marks of one, or a gap
    that needs something and of which the trainer's entropy would tell more.

    Attributes:
        due: no step has been seen yet.
    """

    def __init__(self, framework: str, *, replays: bool = False) -> None:
        """Wait for the first step.

        framework: the trainer, by its name in config/frameworks.toml. Advice is in its settings.
        replays: it scores with the rollout's routes already.
        """
        self._replays = replays
        self.due = True
        self._framework = framework
        self._gathered: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def gather(self, logp_old: Tensor, logp_rollout: Tensor, mask: Tensor) -> None:
        """Keep the sampled tokens of one sample [T], and judge the first 2,000 together."""
        if not self.due:
            return
        self._gathered.append((logp_old[mask].cpu(), logp_rollout[mask].cpu()))
        if sum(len(old) for old, _ in self._gathered) < GATHERED:
            return
        pad = torch.nn.utils.rnn.pad_sequence
        old = pad([one for one, _ in self._gathered], batch_first=True)
        rollout = pad([other for _, other in self._gathered], batch_first=True)
        lengths = torch.tensor([len(one) for one, _ in self._gathered])
        self._gathered = []
        self.look(old, rollout, torch.arange(old.shape[1]) < lengths[:, None])

    @torch.no_grad()
    def look(
        self,
        logp_old: Tensor,  # [B, T] float32, trainer before the update
        logp_rollout: Tensor,  # [B, T] float32, rollout engine
        mask: Tensor,  # [B, T] bool, the sampled tokens
        *,
        tokens: Tensor | None = None,  # [B, T] int64
        entropy: Tensor | None = None,  # [B, T] float32
    ) -> None:
        """Judge a step, if it is the first with enough tokens for a verdict."""
        if not self.due:
            return
        mask = mask.bool()
        finite = mask & logp_old.isfinite() & logp_rollout.isfinite()
        known = finite.sum(1)
        if known.sum() < FEWEST:
            return
        self.due = False
        rows = int((known.cumsum(0) - known < ENOUGH).sum())
        fields = [field[:rows] for field in (logp_old, logp_rollout, mask)]
        found = diagnose(*fields, tokens=_part(tokens, rows), entropy=_part(entropy, rows))
        gap = mismatch(logp_old[:rows], logp_rollout[:rows], finite[:rows])
        quiet = size_in_words(gap.k3, gap.f2)
        unseen = entropy is None and not quiet
        if not (found.bug or found.marks or unseen):
            return
        text = found.text().replace("\n", "; ")
        processed = frameworks()[self._framework].get("processed")
        if processed and any(each.cause in RAW_OR_PROCESSED for each in found.findings):
            text += f"; with {processed} its log-probabilities are processed"
        if not (found.bug or found.marks):
            settings = f"correction.preset={correction_for(gap.extreme(5.0))}"
            if not self._replays:
                settings = f"{R3} {settings}"
            text += f"; against mismatch: {in_their_settings(settings, self._framework)}"
        logging.getLogger("onepolicy").warning("the first scored step is not clean: %s", text)


def _part(field: Tensor | None, rows: int) -> Tensor | None:
    if field is None:
        return None
    return field[:rows]
