"""The conformance kit: dumps with their expected verdicts and numbers, for audits of any framework.

A kit is a folder of Parquet dumps with an `expected.json`, an Expectation for each.
benchmarks/conformance.py made that of `conformance/`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, TypeAdapter, ValidationError

from onepolicy.audit.assessment import AuditResult
from onepolicy.audit.report import overall_statistics
from onepolicy.audit.run import audit
from onepolicy.config import UsageError
from onepolicy.console import Console, make_table

EXPECTED = "expected.json"
NUMBERS = ("tokens", "k1", "k3", "chi2", "ess", "f1.25", "f2")
REFUSED = "refused"
TOLERANCE = 1e-5  # relative; sums of float32 columns in another order agree to it


class Expectation(BaseModel):
    """The verdict and the numbers of one dump."""

    made_by: str = ""  # command, or the planted fault
    action: str  # of the verdict, or "refused"
    causes: list[str] = []
    numbers: dict[str, float] = {}
    refused: str = ""  # words of the error, if an audit must refuse the dump

    def judgement(self) -> str:
        """Return `bug: shift`, or the action alone."""
        if not self.causes:
            return self.action
        return f"{self.action}: {', '.join(self.causes)}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One dump of a kit: the expected verdict and the one that was found."""

    dump: str
    expected: str
    found: str
    wrong: tuple[str, ...]  # numbers that differ, `k3 0.1, not 0.2`

    @property
    def conforms(self) -> bool:
        return self.expected == self.found and not self.wrong


def check_conformance(folder: Path) -> list[Outcome]:
    """Audit every dump of a kit.

    Raises UsageError for a folder that is no kit, or a dump that is missing or cannot be read.
    """
    outcomes = []
    for name, expected in read_expectations(folder).items():
        found = judged(folder / name, expected.refused)
        wrong = [
            f"{number} {found.numbers[number]:.7g}, not {value:.7g}"
            for number, value in expected.numbers.items()
            if number in found.numbers
            and not math.isclose(value, found.numbers[number], rel_tol=TOLERANCE, abs_tol=1e-12)
        ]
        outcome = Outcome(name, expected.judgement(), found.judgement(), tuple(wrong))
        outcomes.append(outcome)
    return outcomes


def read_expectations(folder: Path) -> dict[str, Expectation]:
    """Return the content of expected.json. Raises UsageError if it is missing or damaged."""
    path = folder / EXPECTED
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: is a folder, a device or a pipe; take the kit's own file")
    try:
        return TypeAdapter(dict[str, Expectation]).validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}; give the folder of the kit, conformance/ of a clone"
        ) from None
    except ValidationError as error:
        raise UsageError(f"{path}: {error.errors()[0]['msg']}; take the kit's own file") from None


def judged(dump: Path, refused: str = "") -> Expectation:
    """Audit a dump and return its verdict and numbers.

    refused: words of the error with which the audit must refuse it; any other error is raised.
    """
    try:
        return expectation(audit(dump, {}))
    except UsageError as error:
        if not refused or refused not in str(error):
            raise
    return Expectation(action=REFUSED, refused=refused)


def expectation(result: AuditResult) -> Expectation:
    """Return an audit's verdict and numbers."""
    statistics = overall_statistics(result)
    return Expectation(
        action=result.verdict.action,
        causes=list(result.verdict.causes),
        numbers={name: statistics[name] for name in NUMBERS},
    )


def print_outcomes(console: Console, outcomes: list[Outcome]) -> None:
    """Print a row a dump, then how many conform."""
    table = make_table("dump", "expected", "found", "numbers")
    for outcome in outcomes:
        numbers = "; ".join(outcome.wrong) or "equal"
        table.add_row(outcome.dump, outcome.expected, outcome.found, numbers)
    console.print(table)
    conforming = sum(outcome.conforms for outcome in outcomes)
    console.print(f"{conforming} of {len(outcomes)} dumps conform")
