"""A tally as evidence for the one verdict (verdict/rules.py), from the onset of divergence on if there is one."""

from __future__ import annotations

import functools
import math
import statistics
from dataclasses import dataclass

import numpy as np
import torch

from onepolicy.audit.schema import Array
from onepolicy.audit.sketch import Sketch
from onepolicy.audit.tally import Tally
from onepolicy.report.words import number
from onepolicy.types import RoutingTrace
from onepolicy.verdict.bug_signatures import Diagnosis, diagnose
from onepolicy.verdict.rules import FEW_ROWS, Gap, Verdict, verdict
from onepolicy.verdict.scored_tokens import FEWEST

ONSET_STEPS, ONSET_FACTOR, ONSET_FEWEST = 5, 4.0, 15
ONSET_RULE = (
    f"the first of {ONSET_STEPS} steps in a row whose k3 is above {ONSET_FACTOR:g} times the median, and the "
    f"largest, of the first fifth of the steps (at least {ONSET_STEPS}); looked for in "
    f"dumps of {ONSET_FEWEST} steps or more"
)
LOOKS_FOR = {  # column -> what cannot be found without it
    "entropy": "another temperature, and narrowed sampling (top-p, top-k) reported as if not",
    "version": "stale weights by version",
    "logp_previous": "an update the engine did not take",
    "routes_rollout": "differing routes",
    "step": "onset of divergence",
}
NEEDED = {  # column -> what may not be recommended upon without it: a correction repairs none of these
    "entropy": "Add the column entropy before any correction: without it another temperature, and sampling narrowed "
    "but not so reported, look like no gap or like mismatch",
}


@dataclass(frozen=True)
class Audited:
    label: str
    tally: Tally
    verdict: Verdict
    notes: tuple[str, ...]  # how the verdict was reached, beyond what it rests on
    not_checked: tuple[str, ...]
    onset: int | None  # step


def judge(found: Tally, label: str, *, equal_on_purpose: bool = False) -> Audited:
    """equal_on_purpose: both sides are known to have been computed alike, so that equal bits are no copy."""
    onset = onset_of_divergence(
        {step: sketch.numbers()["k3"] for step, sketch in found.steps.items()}
    )
    numbers = _since(found, onset).numbers()
    routes = _misplaced_routes(found, onset)
    diagnosis = _diagnose(
        found, onset, "logp_native" if routes and found.native is not None else "logp_trainer"
    )
    gap = Gap(
        tokens=int(numbers["tokens"]),
        sequences=int(numbers["sequences"]),
        k3=numbers["k3"],
        f2=numbers["f2"],
        f5=numbers["f5"],
        max_dlogp=numbers["max_dlogp"],
        k3_error=numbers["k3_error"],
        mean_rho=numbers["mean_rho"],
        mean_rho_error=numbers["mean_rho_error"],
    )
    said = verdict(
        gap,
        diagnosis,
        routers=_routers(found),
        routes=routes,
        since="" if onset is None else f" from step {onset} on",
        aged=found.ages.explain,
        unchecked=_unchecked(found, gap),
        copies=not equal_on_purpose,
    )
    missing = [
        f"{what}: no column {name}" for name, what in LOOKS_FOR.items() if name not in found.columns
    ]
    if "step" in found.columns and len(found.steps) < ONSET_FEWEST:
        missing.append(f"{LOOKS_FOR['step']}: fewer than {ONSET_FEWEST} steps")
    return Audited(label, found, said, tuple(_notes(found, onset)), tuple(missing), onset)


def _unchecked(found: Tally, gap: Gap) -> list[str]:
    """Causes that could explain the gap, or hide behind a small one, and were not looked for."""
    out = [text for name, text in NEEDED.items() if name not in found.columns]
    if gap.sequences < FEW_ROWS and not gap.quiet:
        out.append(
            f"{gap.sequences} rows are too few to see a part of them that is wrong: dump {FEW_ROWS} or more"
        )
    return out


def _routers(found: Tally) -> float | None:
    """Share that differ and could be replayed; 0 where the trainer replays already: what is left is not routing."""
    if found.native is not None:
        return 0.0
    return found.routes.routers if found.routes is not None and found.routes.slots else None


def _notes(found: Tally, onset: int | None) -> list[str]:
    notes = _grids(found)
    if found.native is not None:
        notes.append(
            f"Without replay k3 is {number(found.native.numbers()['k3'])} nats a token over the whole dump."
        )
    if found.ages.old:
        notes.append(found.ages.text())
    if found.sample.size < found.entries:
        notes.append(f"Bugs were looked for in {len(found.sample.heap):,} rows drawn at random.")
    if onset is not None:
        notes.append(f"k3 diverges at step {onset}: {ONSET_RULE}.")
    return notes


GRIDS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def _grids(found: Tally) -> list[str]:
    """Sides whose values were rounded: that is no bug, but a part of the gap that a finer dump would not have."""
    out = []
    for side in ("logp_rollout", "logp_trainer"):
        parts = [row.columns[side][row.columns["mask"]] for row in found.sample.rows(None)]
        values = torch.from_numpy(np.concatenate(parts)) if parts else torch.zeros(0)
        values = values[values < -0.01]
        for name, dtype in GRIDS.items():
            if len(values) >= FEWEST and bool((values.to(dtype).double() == values).all()):
                out.append(
                    f"{side} was rounded to {name}: its values lie on that grid. That is no bug."
                )
                break
    return out


def _diagnose(found: Tally, onset: int | None, trainer: str) -> Diagnosis:
    """Of the sampled rows, from step `onset` on if given. trainer: its score to use; wrong routes hide other bugs."""
    rows = found.sample.rows(onset)
    if not any(row.columns["mask"].any() for row in rows):
        return Diagnosis(math.nan, ())
    tensors = {
        name: torch.from_numpy(np.concatenate([row.columns[name] for row in rows]))
        for name in rows[0].columns
    }
    lengths = torch.tensor([len(row.columns["mask"]) for row in rows])
    segment = torch.arange(len(rows)).repeat_interleave(lengths)
    version, mask = tensors.get("version"), tensors["mask"]
    group = (
        torch.tensor([row.step for row in rows]).repeat_interleave(lengths)
        if len(found.steps) > 1
        else None
    )
    if (
        version is not None and "trained_version" in tensors
    ):  # old tokens are declared: bugs show in the newest
        newest_weights = mask & (version == tensors["trained_version"])
        if int(newest_weights.sum()) >= FEWEST:
            mask = newest_weights
        else:
            tensors.pop(
                "entropy", None
            )  # what updates do to log-probabilities looks like another temperature
            group = version  # weights of one age have one size of the gap
        version = None
    elif version is not None:  # against the newest of the same step: older steps are no staleness
        newest = torch.tensor([found.newest.get(row.step, 0) for row in rows])
        version = version - newest.repeat_interleave(lengths)
    return diagnose(
        tensors[trainer],
        tensors["logp_rollout"],
        mask,
        segment=segment,
        tokens=tensors["tokens"],
        tokens_rollout=tensors.get("tokens_rollout"),
        version=version,
        logp_previous=tensors.get("logp_previous"),
        entropy=tensors.get("entropy"),
        turn=tensors.get("turn"),
        group=group,
    )


def _misplaced_routes(found: Tally, onset: int | None) -> str:
    """Why the two sides' routes cannot be those of the same tokens; empty if they can, or are not in the dump."""
    rows = found.routes_sample.rows(onset)
    if not rows:
        return ""
    from onepolicy.replay.alignment import check_alignment  # loads transformers
    from onepolicy.replay.checks import RoutingError

    rollout, trainer = (
        np.concatenate([row.columns[name] for row in rows])
        for name in ("routes_rollout", "routes_trainer")
    )
    bounds = np.concatenate([[0], np.cumsum([len(row.columns["routes_rollout"]) for row in rows])])
    valid = torch.from_numpy(~((rollout < 0) | (trainer < 0)).any((1, 2)))
    if not valid.any():
        return ""
    experts = int(max(rollout.max(), trainer.max())) + 1
    try:
        check_alignment(
            _trace(rollout, valid, experts),
            _trace(trainer, valid, experts),
            torch.from_numpy(bounds),
        )
    except RoutingError as error:
        oldest = max(found.ages.found, default=0)
        return f"{error}" + (f". Or they are too old: by up to {oldest} updates" if oldest else "")
    return ""


def _trace(ids: Array, valid: torch.Tensor, experts: int) -> RoutingTrace:
    narrow = np.uint8 if experts <= 256 else np.uint16
    layers = tuple(range(ids.shape[1]))
    return RoutingTrace(torch.from_numpy(np.maximum(ids, 0).astype(narrow)), valid, layers, experts)


def _since(found: Tally, onset: int | None) -> Sketch:
    """Of the whole dump, or of the steps from `onset` on."""
    assert found.total is not None
    if onset is None:
        return found.total
    return functools.reduce(
        Sketch.merge, (sketch for step, sketch in sorted(found.steps.items()) if step >= onset)
    )


def onset_of_divergence(k3: dict[int, float]) -> int | None:
    """ONSET_RULE."""
    if len(k3) < ONSET_FEWEST:
        return None
    steps = sorted(k3)
    first = [k3[step] for step in steps[: max(ONSET_STEPS, len(steps) // 5)]]
    bound = max(
        ONSET_FACTOR * statistics.median(first), *first
    )  # small steps are heavy-tailed: not the median alone
    high = [k3[step] > bound for step in steps]
    for place in range(len(steps) - ONSET_STEPS + 1):
        if all(high[place : place + ONSET_STEPS]):
            return steps[place]
    return None
