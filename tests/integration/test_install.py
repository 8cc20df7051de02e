"""Installed beside a trainer, the library moves nothing that the trainer pins."""

import tomllib

from packaging.requirements import Requirement

from support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OLDEST = {
    "torch": "2.6.0",
    "transformers": "4.51.3",
    "numpy": "1.26.4",
    "pydantic": "2.10.6",
    "safetensors": "0.5.3",
    "rich": "13.7.1",
}
"""What a trainer of the spring of 2025 has installed."""


def unmet(requirements: list[str]) -> list[str]:
    """Return the names of those that would move one of these versions, or bring another package."""
    found = []
    for each in map(Requirement, requirements):
        if each.name not in OLDEST or OLDEST[each.name] not in each.specifier:
            found.append(each.name)
    return found


def test_the_library_is_satisfied_with_what_a_trainer_has() -> None:
    assert unmet(PROJECT["dependencies"]) == []


def test_the_extra_train_is_not() -> None:
    assert "transformers" in unmet(PROJECT["optional-dependencies"]["train"])
