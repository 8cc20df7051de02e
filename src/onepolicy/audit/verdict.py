"""A tally in words: nothing to do, replay routes, correct with a preset, or it is a bug and which one.

Every threshold is a constant of this file; docs/audit.md says where each comes from.
"""

from __future__ import annotations

import functools
import math
import statistics
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from onepolicy.audit.sketch import Sketch
from onepolicy.audit.tally import Tally
from onepolicy.correct.diagnose import FEWEST, Diagnosis, diagnose
from onepolicy.correct.predict import NOMINAL_KL, predict
from onepolicy.correct.presets import preset
from onepolicy.correct.verdict import TOO_FAR
from onepolicy.report.words import number

Kind = Literal["identical", "nothing", "r3", "correction", "bug", "unexplained"]
QUIET_F2 = 1e-3
"""Share of tokens off by more than a factor of 2 that calls for nothing; with k3 below NOMINAL_KL."""
HEAVY_F5 = 1e-3
"""Share of tokens off by more than a factor of 5 from which rejecting them (icepop) is recommended over truncating."""
SHOWN_PRESETS = ("tis", "icepop", "mis", "k3-rs", "geo-rs", "seq-tis", "trl-default")
ONSET_STEPS, ONSET_FACTOR, ONSET_FEWEST = 5, 4.0, 15
ONSET_RULE = (
    f"the first of {ONSET_STEPS} steps in a row whose k3 is above {ONSET_FACTOR:g} times the median, and the "
    f"largest, of the first fifth of the steps (at least {ONSET_STEPS}); looked for in "
    f"dumps of {ONSET_FEWEST} steps or more"
)


@dataclass(frozen=True, slots=True)
class PresetForecast:
    name: str
    keep: float  # share of tokens left in the loss
    attenuation: float  # what the step is multiplied by


@dataclass(frozen=True, slots=True)
class Verdict:
    kind: Kind
    headline: str
    causes: tuple[str, ...]  # of a bug, as correct.diagnose names them
    preset: str | None  # recommended
    basis: tuple[str, ...]
    not_checked: tuple[str, ...]
    forecasts: tuple[PresetForecast, ...]  # Gaussian log-ratio with KL = k3, sequences of the mean length
    onset: int | None  # step


def verdict(found: Tally) -> Verdict:
    """Judged from the onset of divergence on, if there is one."""
    onset = onset_of_divergence({step: sketch.numbers()["k3"] for step, sketch in found.steps.items()})
    numbers = _since(found, onset).numbers()
    where = "" if onset is None else f" (from step {onset} on)"
    diagnosis = _diagnose(found, onset)
    forecasts = _forecasts(numbers["k3"], found.mean_length)
    kind, headline, name = _judge(found, numbers, diagnosis, where)
    return Verdict(
        kind=kind,
        headline=headline,
        causes=tuple(dict.fromkeys(f.cause for f in diagnosis.findings)),
        preset=name,
        basis=tuple(_basis(found, numbers, diagnosis, forecasts, name, onset)),
        not_checked=tuple(_not_checked(found)),
        forecasts=forecasts,
        onset=onset,
    )


def _judge(found: Tally, numbers: dict[str, float], diagnosis: Diagnosis, where: str) -> tuple[Kind, str, str | None]:
    k3, f2, f5 = numbers["k3"], numbers["f2"], numbers["f5"]
    if diagnosis.bug:
        causes = ", ".join(dict.fromkeys(f.cause for f in diagnosis.findings))
        return "bug", f"It is a bug, not mismatch{where}: {causes}. No correction repairs it.", None
    if numbers["max_dlogp"] == 0:
        return "identical", "Nothing to do: both sides agree on every token to the bit.", None
    if k3 < NOMINAL_KL and f2 < QUIET_F2:
        text = f"Nothing to do: k3 = {number(k3)} nats a token is in the range of dense models"
        return "nothing", f"{text}{where}.", None
    if not k3 <= TOO_FAR:
        text = f"k3 = {number(k3)} nats a token is beyond any engine mismatch, and no known bug explains it"
        return "unexplained", f"{text}{where}: look for one before correcting.", None
    name = "icepop" if f5 > HEAVY_F5 else "tis"
    if found.routes is not None and found.routes.routers > 0:
        text = f"Replay the rollout's routes (R3): {number(found.routes.routers, share=True)} of routers differ"
        return "r3", f"{text}, k3 = {number(k3)} nats a token{where}. If you cannot: correct with {name}.", name
    moe = "" if found.routes is not None else " If the model is a mixture of experts, replay its routes (R3) first."
    return "correction", f"Mismatch, k3 = {number(k3)} nats a token{where}: correct it with {name}.{moe}", name


def _basis(
    found: Tally,
    numbers: dict[str, float],
    diagnosis: Diagnosis,
    forecasts: tuple[PresetForecast, ...],
    name: str | None,
    onset: int | None,
) -> list[str]:
    lines = [f"{finding.cause}: {finding.evidence}." for finding in diagnosis.findings]
    part = "" if onset is None else f"from step {onset} on, "
    lines.append(
        f"{part}{int(numbers['tokens']):,} tokens in {int(numbers['sequences']):,} sequences: "
        f"k3 {number(numbers['k3'])} +- {number(numbers['k3_error'])}, "
        f"k1 {number(numbers['k1'])}, F(2) {number(numbers['f2'], share=True)}."
    )
    mean, error = numbers["mean_rho"], numbers["rho_error"]
    if not diagnosis.bug and math.isfinite(mean) and abs(mean - 1) > max(6 * error, 0.005):
        lines.append(f"Mean rho is {mean:.4f} +- {number(error)}; under mismatch alone it is 1. Look at the sampler.")
    chosen = next((each for each in forecasts if each.name == name), None)
    if chosen is not None:
        lines.append(
            f"{name} is predicted to keep {chosen.keep:.1%} of the tokens and to multiply the step by "
            f"{chosen.attenuation:.3g} (normal log-ratio with KL = k3; {found.mean_length} tokens a sequence)."
        )
    if found.total is not None and found.total.tokens < FEWEST:
        lines.append(f"Only {found.total.tokens} tokens: bugs are looked for from {FEWEST} on.")
    if found.sample.tokens < found.entries:
        lines.append(f"Bugs were looked for in {len(found.sample.heap):,} rows drawn at random.")
    if onset is not None:
        lines.append(f"k3 diverges at step {onset}: {ONSET_RULE}.")
    return lines


def _not_checked(found: Tally) -> list[str]:
    missing = {
        "entropy": "another temperature, and narrowed sampling (top-p, top-k) reported as if not",
        "version": "stale weights by version",
        "logp_previous": "an update the engine did not take",
        "routes_rollout": "differing routes",
        "step": "onset of divergence",
    }
    return [f"{what}: no column {name}" for name, what in missing.items() if name not in found.columns]


def _diagnose(found: Tally, onset: int | None) -> Diagnosis:
    """Of the sampled rows, from step `onset` on if given."""
    rows = sorted((row for row in found.sample.heap if onset is None or row[2] >= onset), key=lambda row: row[1])
    if not any(columns["mask"].any() for *_, columns in rows):
        return Diagnosis(math.nan, ())
    tensors = {name: torch.from_numpy(np.concatenate([columns[name] for *_, columns in rows])) for name in rows[0][3]}
    lengths = torch.tensor([len(columns["mask"]) for *_, columns in rows])
    segment = torch.arange(len(rows)).repeat_interleave(lengths)
    version = tensors.get("version")
    if version is not None:  # against the newest of the same step: older steps are no staleness
        newest = torch.tensor([found.newest.get(step, 0) for _, _, step, _ in rows])
        version = version - newest.repeat_interleave(lengths)
    return diagnose(
        tensors["logp_trainer"],
        tensors["logp_rollout"],
        tensors["mask"],
        segment=segment,
        tokens=tensors["tokens"],
        tokens_rollout=tensors.get("tokens_rollout"),
        version=version,
        logp_previous=tensors.get("logp_previous"),
        entropy=tensors.get("entropy"),
    )


def _since(found: Tally, onset: int | None) -> Sketch:
    """Of the whole dump, or of the steps from `onset` on."""
    assert found.total is not None
    if onset is None:
        return found.total
    return functools.reduce(Sketch.merge, (sketch for step, sketch in sorted(found.steps.items()) if step >= onset))


def _forecasts(kl: float, length: int) -> tuple[PresetForecast, ...]:
    if not 0 < kl <= TOO_FAR:
        return ()
    found = {name: predict(preset(name), kl, length) for name in SHOWN_PRESETS}
    return tuple(PresetForecast(name, each.keep, each.attenuation) for name, each in found.items())


def onset_of_divergence(k3: dict[int, float]) -> int | None:
    """ONSET_RULE."""
    if len(k3) < ONSET_FEWEST:
        return None
    steps = sorted(k3)
    first = [k3[step] for step in steps[: max(ONSET_STEPS, len(steps) // 5)]]
    bound = max(ONSET_FACTOR * statistics.median(first), *first)  # small steps are heavy-tailed: not the median alone
    high = [k3[step] > bound for step in steps]
    for place in range(len(steps) - ONSET_STEPS + 1):
        if all(high[place : place + ONSET_STEPS]):
            return steps[place]
    return None
