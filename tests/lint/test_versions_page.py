"""docs/reference/versions.md is written from what ran in the version cells."""

from __future__ import annotations

import re
import tomllib

from support.paths import ROOT
from support.versions.cells import CELLS, FAST, FOLDER
from support.versions.page import DOCS, LICENCES, page


def test_the_page_has_the_results() -> None:
    assert DOCS.read_text(encoding="utf-8").partition(LICENCES)[0] == page(), (
        "run: PYTHONPATH=tests python -m support.versions.cells page"
    )


def test_no_cell_failed() -> None:
    assert "FAILED" not in page()
    rows = [line for line in page().splitlines() if re.match(r"\| `[\w.-]+` \| \d", line)]
    assert rows
    assert all(row.endswith("| 0 |") for row in rows)


def test_the_cells_have_the_oldest_versions_that_are_allowed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = [
        line for line in project["dependencies"] if line.startswith(("torch", "transformers"))
    ]
    installed = [package for cell in CELLS.values() for package in cell["packages"]]
    for line in oldest:
        name, _, version = line.partition(">=")
        assert any(package.startswith(f"{name}=={version}.") for package in installed), line


def test_the_fast_cells_are_an_old_and_a_newer_major() -> None:
    majors = {
        package[len("transformers==")]
        for name in FAST
        for package in CELLS[name]["packages"]
        if package.startswith("transformers==")
    }
    assert majors == {"4", "5"}


def test_every_result_belongs_to_a_cell() -> None:
    assert {path.stem for path in (FOLDER / "results").glob("*.json")} <= set(CELLS)
