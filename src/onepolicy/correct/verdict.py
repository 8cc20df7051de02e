"""What to do about a measured gap: nothing, replay the routes, correct, or mend a bug; and what that rests on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onepolicy.config import CorrectionConfig
from onepolicy.correct.diagnose import FEWEST, Diagnosis
from onepolicy.correct.predict import NOMINAL_KL, predict

Action = Literal["nothing", "replay", "correct", "bug", "unclear"]
HARMLESS_KL = 1e-4
"""k3 below which nothing is worth changing [nats a token]: a tenth of what dense models train well with (R3 paper,
section 3: 6.4e-4 for an 8B dense model)."""
REPLAY_HELPS = 1.5
"""Least factor by which replay must cut k3 to be recommended (R3 paper, section 5: about 2)."""
TOO_FAR = 1.0
"""k3 that is left, above which no correction is recommended: two policies, not one with noise."""
CAUSES = {
    "fill": "missing log-probabilities are filled in",
    "not_log": "values are probabilities, not their logarithms",
    "shift": "the two sides are one token apart",
    "retokenised": "the two sides scored different tokens",
    "temperature": "the engine samples at another temperature than the trainer scores at",
    "support": "sampling is narrowed (top-p, top-k)",
    "stale": "the engine holds other weights than the trainer",
    "routes": "the replayed routes are not those of these tokens",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    action: Action
    causes: tuple[str, ...]  # of a bug: names from CAUSES; else routing, numerics or none
    sentence: str
    setting: str  # what to set; empty if nothing
    basis: tuple[str, ...]  # the measurements it rests on

    def text(self) -> str:
        lines = [self.sentence, *([f"Set {self.setting}."] if self.setting else []), *self.basis]
        return "\n".join(lines)


def verdict(
    diagnosis: Diagnosis, *, k3: float, tokens: int, length: float, k3_replay: float | None = None, routes: str = ""
) -> Verdict:
    """k3: of the two sides as they are, without replay [nats a token]; length: mean trained tokens of a sequence.

    k3_replay: of the same tokens with the rollout's routes replayed (None: not measured, or a dense model); routes: why
    they could not be (an alignment error), empty if they could.
    """
    found = {f.cause: f.evidence for f in diagnosis.findings} | ({"routes": routes} if routes else {})
    measured: tuple[str, ...] = (f"k3 is {k3:.3g} nats a token over {tokens:,} tokens",)
    if found:
        named = "; ".join(CAUSES[cause] for cause in found)
        return Verdict(
            "bug",
            tuple(found),
            f"A bug, not mismatch: {named}. Mend it; no correction repairs it.",
            "",
            tuple(f"{cause}: {text}" for cause, text in found.items()) + measured,
        )
    if tokens < FEWEST:
        few = f"Only {tokens} tokens: too few for a verdict; measure {FEWEST} or more."
        return Verdict("unclear", (), few, "", measured)
    if k3 < HARMLESS_KL:
        small = f"Nothing to do: the gap is below {HARMLESS_KL:g} nats a token."
        return Verdict("nothing", (), small, "", measured)
    left, causes, setting = k3, ("numerics",), ""
    if k3_replay is not None:
        measured += (f"with the rollout's routes replayed it is {k3_replay:.3g}",)
        if k3 > REPLAY_HELPS * k3_replay:
            left, causes, setting = k3_replay, ("routing",), "replay.mode=r3"
    if left > TOO_FAR:
        far = f"No known bug, but {left:.3g} nats a token is no mismatch of one policy: look for a bug."
        return Verdict("unclear", (), far, setting, measured)
    if left > NOMINAL_KL:
        return _correct(left, length, causes, setting, measured)
    if setting:
        cut = f"{1 - k3_replay / k3:.0%} of it" if k3_replay else "all of it"
        text = f"Mismatch, {cut} from routing: replay the rollout's routes; what is left needs no correction."
        return Verdict("replay", causes, text, setting, measured)
    text = f"Mismatch from numerics, no more than dense models train with ({NOMINAL_KL:g} nats a token): nothing to do."
    return Verdict("nothing", causes, text, "", measured)


def _correct(kl: float, length: float, causes: tuple[str, ...], setting: str, measured: tuple[str, ...]) -> Verdict:
    """Token-level truncation: its keep-rate and size of step do not depend on the length of the sequences."""
    config = CorrectionConfig.model_validate({"preset": "tis"})
    found = predict(config, kl, max(1, round(length)))
    first = "Mismatch from routing: replay the rollout's routes, and truncate" if setting else "Mismatch: truncate"
    text = f"{first} the importance weights of what is left ({kl:.3g} nats a token)."
    kept = f"tis is predicted to keep {found.keep:.0%} of the slots and to multiply the step by {found.attenuation:.3f}"
    both = " ".join(part for part in (setting, "correction.preset=tis") if part)
    return Verdict("correct", causes, text, both, (*measured, kept))
