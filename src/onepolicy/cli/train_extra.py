"""The check that the extra `train` is installed, for commands that train, measure or plan.

The library (`import onepolicy`, `onepolicy audit`) runs on older versions than these commands.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from onepolicy.config import UsageError

TRAIN_EXTRA = (
    "torch>=2.11",
    "transformers>=5.19,<6",
    "safetensors>=0.5",
    "numpy>=1.26",
    "pydantic>=2.11",
    "rich>=13.9",
    "tomlkit>=0.13",
)
"""The extra's requirements, as in pyproject.toml."""


def check_train_extra(requirements: Sequence[str] = TRAIN_EXTRA) -> None:
    """Raise UsageError if a package is missing or of a version that the commands do not run on.

    Only releases are compared: 2.13.0a0+gitabc of a vendor's container counts as 2.13. Nothing is
    imported.
    """
    problems = [found for found in map(_problem, requirements) if found is not None]
    if problems:
        raise UsageError(
            f"this command needs {'; '.join(problems)}; pip install 'onepolicy[train]', in a "
            "venv of its own if your trainer pins other versions. The library (import onepolicy) "
            "and `onepolicy audit` run on what is installed"
        )


def _problem(requirement: str) -> str | None:
    """Return `torch>=2.11 (2.6.0 is installed)`, None if the requirement is met."""
    name = re.split("[<>]", requirement)[0]
    try:
        installed = version(name)
    except PackageNotFoundError:
        return f"{requirement} (not installed)"
    bounds = re.findall(r"(>=|<)([\d.]+)", requirement)
    if all(_meets(installed, operator, limit) for operator, limit in bounds):
        return None
    return f"{requirement} ({installed} is installed)"


def _meets(installed: str, operator: str, limit: str) -> bool:
    if operator == ">=":
        return _release(installed) >= _release(limit)
    return _release(installed) < _release(limit)


def _release(text: str) -> tuple[int, ...]:
    """Return the numbers of a version, `2.13.0+cpu` -> (2, 13, 0)."""
    found = re.match(r"\d+(\.\d+)*", text)
    assert found is not None, text
    return tuple(int(part) for part in found[0].split("."))
