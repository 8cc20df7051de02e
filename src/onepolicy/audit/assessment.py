"""The verdict on a dump. If k3 diverges, only the steps from the onset on count."""

from __future__ import annotations

import functools
import math
import operator
import statistics
from dataclasses import dataclass, replace

import numpy as np
import torch

from onepolicy.audit.accumulator import DumpAccumulator, SampledRow
from onepolicy.config.presets import frameworks
from onepolicy.notation import counted, number
from onepolicy.record.schema import Array
from onepolicy.record.statistics import Statistics
from onepolicy.replay.alignment import check_alignment
from onepolicy.replay.checks import RoutingError
from onepolicy.types import RoutingTrace
from onepolicy.verdict.bug_signatures import (
    LOOKED_FOR_BY,
    WITHOUT_ENTROPY,
    Diagnosis,
    diagnose,
)
from onepolicy.verdict.declared import HARMLESS_KL, UNDECLARED, Declared
from onepolicy.verdict.local_faults import FEWEST_SLOTS
from onepolicy.verdict.rules import (
    FEW_ROWS,
    RAW_OR_PROCESSED,
    REPLAY_HELPS,
    Verdict,
    quiet,
    verdict,
)
from onepolicy.verdict.scored_tokens import FEWEST
from onepolicy.verdict.value_faults import missing

ONSET_STEPS, ONSET_FACTOR, ONSET_MIN_STEPS = 5, 4.0, 15
JUMP_STEPS = (2, 3)
"""Fewest steps before a jump and from it on, in a dump of few steps."""
ONSET_RULE = (
    f"the first of {ONSET_STEPS} steps in a row whose k3 is above {ONSET_FACTOR:g} times the "
    f"median, the largest of the first fifth of the steps (at least {ONSET_STEPS}) and "
    f"{HARMLESS_KL:g}; with "
    f"fewer than {ONSET_MIN_STEPS} steps, the first from which all are surely above "
    f"{ONSET_FACTOR:g} times all earlier ones ({JUMP_STEPS[0]} before it, {JUMP_STEPS[1]} from it "
    "on, or more)"
)
COLUMN_CHECKS = {  # column -> the check that needs it
    **LOOKED_FOR_BY,
    "routes_rollout": "differing routes",
    "step": "onset of divergence",
}
NEEDED_FOR_CORRECTION = {  # column -> why no correction may be recommended without it
    "entropy": f"Add the column entropy {WITHOUT_ENTROPY} (one line: docs/audit.md)",
}
OPTIONAL = (
    *("tokens", "tokens_rollout", "logp_previous", "logp_base"),
    *("entropy", "logp_vocabulary", "turn"),
)
"""Columns that a diagnosis takes where there are some, by its arguments' names."""
NOT_OF_AGE = ("fill", "not_log", "constant", "shift", "rows")
"""Causes that are looked for in old tokens too: no update of the weights looks like them."""
TOO_OLD = f"Fewer than {FEWEST} tokens of the weights that trained, too few to see a temperature"
PROCESSED_IN_VLLM = "logprobs_mode=processed_logprobs makes it return processed log-probabilities"
GROWS, LEAST_GAP = 5.0, 1e-4
"""Factor between the first and the last eighth of the rows from which growth is said, and the mean
|log rho| in nats below which an eighth counts as that."""
ROUNDING_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class AuditResult:
    """The verdict on one dump, with the statistics it was reached from."""

    label: str
    accumulated: DumpAccumulator
    verdict: Verdict
    notes: tuple[str, ...]  # how the verdict was reached, in addition to its own reasons
    not_checked: tuple[str, ...]
    onset: int | None  # step
    framework: str = ""  # the trainer of the dump, a name of frameworks.toml; empty: not known


def assess(
    accumulated: DumpAccumulator,
    label: str,
    *,
    declared: Declared = UNDECLARED,
    claims_equality: bool = False,
    framework: str = "",
) -> AuditResult:
    """Reach the verdict on a dump.

    declared: what is known of the two sides; the dump itself says how old tokens are. framework:
    the trainer of the dump, a name of frameworks.toml; empty: the one that the dump names.
    claims_equality: both sides were computed alike, so equal bits do not mean that one side is a
    copy of the other.
    """
    onset = divergence_onset(
        {step: stats.k3 for step, stats in accumulated.steps.items()},
        {step: stats.standard_error("k3") for step, stats in accumulated.steps.items()},
    )
    gap = _stats_since(accumulated, onset)
    route_error = _route_error(accumulated, onset)
    trainer = "logp_trainer"
    if route_error and accumulated.native is not None:
        trainer = "logp_native"  # wrong routes would hide other bugs
    since = ""
    if onset is not None:
        since = f" from step {onset} on"
    by_routes, sets = None, ""
    if accumulated.supports is not None:
        sets = accumulated.supports.fault
    if accumulated.routes is not None:
        by_routes = accumulated.routes.k3
    found = _diagnose_whole(accumulated, onset, trainer)
    too_old = "entropy" in accumulated.columns and "entropy" in found.not_given
    reached = verdict(
        gap,
        found,
        routers=_replayable_routers(accumulated),
        by_routes=by_routes,
        routes=route_error,
        sets=sets,
        since=since,
        aged=accumulated.ages.explains_gap,
        declared=_aged(declared, accumulated),
        unchecked=_unchecked_causes(accumulated, onset, gap, too_old=too_old),
        copies=not claims_equality,
    )
    ages = [name for name in ("version", "trained_version") if name not in accumulated.columns]
    if "stale" in reached.causes and ages:
        or_age = f"Or the run samples while it learns: then add {' and '.join(ages)}."
        reached = replace(reached, sentence=f"{reached.sentence} {or_age}")
    not_checked = [
        f"{check}: no column {name}"
        for name, check in COLUMN_CHECKS.items()
        if name not in accumulated.columns
    ]
    if "step" in accumulated.columns and len(accumulated.steps) < sum(JUMP_STEPS):
        not_checked.append(f"{COLUMN_CHECKS['step']}: fewer than {sum(JUMP_STEPS)} steps")
    if too_old:
        not_checked.append(f"{LOOKED_FOR_BY['entropy']}: {TOO_OLD[0].lower()}{TOO_OLD[1:]}")
    notes = _notes(accumulated, onset)
    if not framework and accumulated.framework in frameworks():
        framework = accumulated.framework
    if any(cause in RAW_OR_PROCESSED for cause in reached.causes):
        notes.append(_processed_note(framework, temperature="temperature" in reached.causes))
    return AuditResult(
        label, accumulated, reached, tuple(notes), tuple(not_checked), onset, framework
    )


def _processed_note(framework: str, *, temperature: bool) -> str:
    """Return which side to mend. The engine's setting is said as the trainer's users know it."""
    setting = frameworks().get(framework, {}).get("processed")
    engine = f"if the engine is vLLM, {PROCESSED_IN_VLLM}"
    if setting:
        engine = f"with {setting} the engine returns processed log-probabilities"
    trainer = ""
    if temperature:
        trainer = (
            "Divide the trainer's logits by the sampling temperature. If it does that already: "
        )
    note = f"{trainer}{engine}."
    return note[0].upper() + note[1:]


def _aged(declared: Declared, accumulated: DumpAccumulator) -> Declared:
    """Add the age of the oldest tokens, if age is most of the gap."""
    if not accumulated.ages.explains_gap:
        return declared
    return replace(declared, age=max(accumulated.ages.by_age))


def _unchecked_causes(
    accumulated: DumpAccumulator, onset: int | None, gap: Statistics, *, too_old: bool
) -> list[str]:
    """Return the checks that were not possible, of causes that a correction does not repair.

    Where age explains the gap it is only asked that rows were looked at. too_old: the entropy says
    nothing of the tokens that were looked at.
    """
    drawn = accumulated.sample.rows(onset)
    rows, newest = len(drawn), _rows_of_newest_weights(drawn)
    if rows and accumulated.ages.explains_gap:
        return []
    texts = [
        text for name, text in NEEDED_FOR_CORRECTION.items() if name not in accumulated.columns
    ]
    if too_old:
        texts.append(f"{TOO_OLD}: let samples be younger")
    if rows and (min(rows, newest) >= FEW_ROWS or quiet(gap)):
        return texts
    found, fix = counted(rows, "row"), f"dump {FEW_ROWS} or more"
    if rows < gap.sequences:
        found = f"{rows} of {counted(gap.sequences, 'row')} were drawn"
        fix = f"audit a dump of the steps from {onset} on alone"
    if rows >= FEW_ROWS:
        found = f"{counted(newest, 'row')} of {rows} with tokens of the weights that trained"
        fix = "let samples be younger"
    return [*texts, f"{found}, too few to see a part of them that is wrong: {fix}"]


def _rows_of_newest_weights(rows: list[SampledRow]) -> int:
    """Return in how many of the rows `_diagnose` looks at enough tokens to see that one is odd."""
    newest = [
        row.columns["mask"] & (row.columns["version"] == row.columns["trained_version"])
        for row in rows
        if {"version", "trained_version"} <= row.columns.keys()
    ]
    tokens = [int(each.sum()) for each in newest]
    if sum(tokens) < FEWEST or sum(tokens) == sum(int(row.columns["mask"].sum()) for row in rows):
        return len(rows)  # it looks at all tokens
    return sum(each >= FEWEST_SLOTS for each in tokens)


def _replayable_routers(accumulated: DumpAccumulator) -> float | None:
    """Return the share of routes that differ and could be replayed; None if it is not known.

    If the trainer replays already, the share is 0: the remaining gap is not due to routing.
    """
    if accumulated.native is not None or accumulated.replayed:
        return 0.0
    if accumulated.routes is None or not accumulated.routes.slots:
        return None
    return accumulated.routes.routers


def _notes(accumulated: DumpAccumulator, onset: int | None) -> list[str]:
    notes = _rounding_notes(accumulated)
    if accumulated.named:
        notes.append("Steps are those in the names of the files: the dump has no column step.")
    if accumulated.nonfinite.count:
        notes.append(f"{accumulated.nonfinite}.")
    assert accumulated.overall is not None
    if accumulated.native is not None:
        native, left = accumulated.native.k3, accumulated.overall.k3
        taken_off = ""
        if native > REPLAY_HELPS * left:
            taken_off = f"; replay takes off {1 - left / native:.0%} of it"
        k3 = number(native)
        notes.append(f"Without replay k3 is {k3} nats a token over the whole dump{taken_off}.")
    if accumulated.supports is not None:
        notes.append(accumulated.supports.describe())
    columns = [row.columns for row in accumulated.sample.rows(onset)]
    grown = growth([np.abs(c["logp_trainer"] - c["logp_rollout"])[c["mask"]] for c in columns])
    if grown:
        notes.append(f"{grown[0].upper()}{grown[1:]}.")
    if accumulated.ages.has_old_tokens:
        notes.append(accumulated.ages.describe())
    if len(accumulated.sample.heap) < accumulated.overall.sequences:
        notes.append(f"Bugs were looked for in {counted(len(columns), 'row')} drawn at random.")
    if onset is not None:
        notes.append(f"k3 diverges at step {onset}: {ONSET_RULE}.")
    return notes


def growth(gaps: list[Array]) -> str:
    """Return how the gap grows or falls along the rows, by their first and last eighth.

    gaps: |log rho| of each row. Empty if they are not GROWS times apart.
    """
    parts = [np.array_split(gap, 8) for gap in gaps if len(gap) >= 8]
    if len(parts) < FEW_ROWS:
        return ""
    first, last = (float(np.concatenate([part[i] for part in parts]).mean()) for i in (0, -1))
    if max(first, last) <= GROWS * max(min(first, last), LEAST_GAP):
        return ""
    word, times = "grows", last / max(first, LEAST_GAP)
    if first > last:
        word, times = "falls", first / max(last, LEAST_GAP)
    return f"the gap {word} {number(times)} times from the first eighth of the rows to the last"


def _rounding_notes(accumulated: DumpAccumulator) -> list[str]:
    """Return a note for each side whose values were rounded.

    Rounding is no bug, but a part of the gap that a finer dump would not have.
    """
    notes = []
    rows = accumulated.sample.rows(None)
    for side in ("logp_rollout", "logp_trainer"):
        parts = [row.columns[side][row.columns["mask"]] for row in rows]
        if not parts:
            continue
        values = torch.from_numpy(np.concatenate(parts))
        values = values[values < -0.01]
        for name, dtype in ROUNDING_DTYPES.items():
            if len(values) >= FEWEST and bool((values.to(dtype).double() == values).all()):
                notes.append(
                    f"{side} was rounded to {name}: its values lie on that grid. That is no bug."
                )
                break
    return notes


def _diagnose_whole(accumulated: DumpAccumulator, onset: int | None, trainer: str) -> Diagnosis:
    """Return the diagnosis of the sampled rows, with what the whole dump shows."""
    found, lacking = _diagnose(accumulated, onset, trainer), missing(accumulated.nonfinite)
    raw = None
    if accumulated.supports is not None and "logp_vocabulary" not in accumulated.columns:
        raw = accumulated.supports.raw
    kept = [each for each in found.findings if raw is None or each.cause != raw.cause]
    return replace(found, findings=tuple(filter(None, (lacking, *kept, raw))))


def _diagnose(accumulated: DumpAccumulator, onset: int | None, trainer: str) -> Diagnosis:
    """Diagnose the sampled rows, from step `onset` on. trainer: column of the trainer's score."""
    rows = accumulated.sample.rows(onset)
    if not rows:
        return Diagnosis(math.nan, ())
    tensors = {
        name: torch.from_numpy(np.concatenate([row.columns[name] for row in rows]))
        for name in rows[0].columns
    }
    lengths = torch.tensor([len(row.columns["mask"]) for row in rows])
    mask, group = tensors["mask"], None
    if len({row.step for row in rows}) > 1:
        group = _groups_of_steps(rows).repeat_interleave(lengths)
    given = {name: tensors.get(name) for name in OPTIONAL}
    given["segment"] = torch.tensor([row.dump_row for row in rows]).repeat_interleave(lengths)
    seen = functools.partial(diagnose, tensors[trainer], tensors["logp_rollout"])
    version = tensors.get("version")
    if version is None or "trained_version" not in tensors:
        if version is not None:
            version = version - _newest_versions(accumulated, rows, lengths)
        return seen(mask, **given, version=version, group=group)
    # The dump has the age of every token. Bugs show in the newest tokens.
    newest = mask & (version == tensors["trained_version"])
    if torch.equal(newest, mask):
        return seen(mask, **given, group=group)
    # Tokens of one age have a gap of one size. That of updates looks like another temperature.
    if int(newest.sum()) < FEWEST:
        return seen(mask, **given | {"entropy": None}, group=version)
    found = seen(newest, **given, group=group)
    if found.findings:
        return found
    older = seen(mask & ~newest, **given, group=version)
    marks = [each for each in older.findings if each.sure and each.cause in NOT_OF_AGE]
    return replace(found, findings=tuple(marks))


def _groups_of_steps(rows: list[SampledRow]) -> torch.Tensor:  # [R] int64
    """Return a number for each row's step, the same for steps in a row until FEW_ROWS are together.

    A row that is the only one of its step would be compared with itself.
    """
    _, at, counts = np.unique([row.step for row in rows], return_inverse=True, return_counts=True)
    groups, size, left = [0], 0, len(rows)
    for count in counts.tolist():
        whole = min(size, left) >= FEW_ROWS  # a smaller rest stays with the group before it
        if whole:
            size = 0
        groups.append(groups[-1] + whole)
        size, left = size + count, left - count
    return torch.tensor(groups[1:])[torch.from_numpy(at)]


def _newest_versions(
    accumulated: DumpAccumulator, rows: list[SampledRow], lengths: torch.Tensor
) -> torch.Tensor:  # [T] int64
    """Return the newest version in the step of each token: tokens of older steps are not stale."""
    newest = torch.tensor([accumulated.newest.get(row.step, 0) for row in rows])
    return newest.repeat_interleave(lengths)


def _route_error(accumulated: DumpAccumulator, onset: int | None) -> str:
    """Return why the two sides' routes cannot belong to the same tokens.

    Return an empty text if they can, or if the dump has no routes.
    """
    rows = accumulated.routes_sample.rows(onset)
    if not rows:
        return ""
    rollout = np.concatenate([row.columns["routes_rollout"] for row in rows])
    trainer = np.concatenate([row.columns["routes_trainer"] for row in rows])
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
        oldest = max(accumulated.ages.by_age, default=0)
        if oldest:
            return f"{error}. Or they are too old: by up to {oldest} updates"
        return str(error)
    return ""


def _trace(ids: Array, valid: torch.Tensor, experts: int) -> RoutingTrace:
    dtype = np.uint8 if experts <= 256 else np.uint16
    layers = tuple(range(ids.shape[1]))
    return RoutingTrace(torch.from_numpy(np.maximum(ids, 0).astype(dtype)), valid, layers, experts)


def _stats_since(accumulated: DumpAccumulator, onset: int | None) -> Statistics:
    """Return the statistics of the steps from `onset` on; of the whole dump for None."""
    assert accumulated.overall is not None
    if onset is None:
        return accumulated.overall
    stats = [stats for step, stats in accumulated.steps.items() if step >= onset]
    return functools.reduce(operator.add, stats)


def divergence_onset(k3: dict[int, float], errors: dict[int, float] | None = None) -> int | None:
    """Return the step at which k3 starts to diverge by ONSET_RULE; None if it does not.

    errors: standard errors of k3, which count in dumps of few steps; NaN: not known.
    """
    steps = sorted(k3)
    if len(k3) < ONSET_MIN_STEPS:
        known = errors or {}
        return _jump_between_steps([(k3[each], known.get(each, 0.0)) for each in steps], steps)
    first = [k3[step] for step in steps[: max(ONSET_STEPS, len(steps) // 5)]]
    # Small steps are heavy-tailed, so the median alone is not enough.
    bound = max(HARMLESS_KL, ONSET_FACTOR * statistics.median(first), *first)
    high = [k3[step] > bound for step in steps]
    for i in range(len(steps) - ONSET_STEPS + 1):
        if all(high[i : i + ONSET_STEPS]):
            return steps[i]
    return None


def _jump_between_steps(found: list[tuple[float, float]], steps: list[int]) -> int | None:
    """Return the step from which every k3 is surely above all earlier ones; None if there is none.

    found: k3 and its standard error by step.
    """
    before, since = JUMP_STEPS
    for i in range(before, len(found) - since + 1):
        bound = ONSET_FACTOR * max(HARMLESS_KL, *(k3 for k3, _ in found[:i]))
        if all(k3 - 2 * error > bound for k3, error in found[i:]):  # false for NaN
            return steps[i]
    return None
