"""Checks of a trainer's settings before its first step, in one readable report."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from onepolicy.config.rules import Check, require


@dataclass(slots=True)
class Preflight:
    """The requirements of onepolicy on one trainer. `str()` gives the report.

    preflight = Preflight("TRL")
    preflight.require("router loss off", coef == 0, found=f"coef {coef}", fix="set it to 0.0")
    preflight.note("an aligned step has no scoring forward; onepolicy adds one")
    preflight.finish()
    """

    trainer: str
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def require(self, name: str, met: bool, *, found: str, fix: str) -> None:
        """Add a requirement. `found` and `fix` are shown if it is not met."""
        self.checks.append(Check(name, bool(met), found, fix))

    def note(self, text: str) -> None:
        """Add a line that needs no change."""
        self.notes.append(text)

    def finish(self) -> None:
        """Raise UsageError that names every requirement that is not met."""
        require(self.checks, f"{self.trainer} cannot run with onepolicy as set:")

    def log_notes(self) -> None:
        """Log the notes, where a trainer shows no report."""
        for text in self.notes:
            logging.getLogger("onepolicy").warning("%s: %s", self.trainer, text)

    def __str__(self) -> str:
        lines = [f"onepolicy in {self.trainer}"]
        for check in self.checks:
            line = f"  no  {check.name}: {check.found}"
            if check.passed:
                line = f"  ok  {check.name}"
            lines.append(line)
        return "\n".join([*lines, *(f"  note {text}" for text in self.notes)])
