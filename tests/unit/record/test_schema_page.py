"""docs/dump_schema.md lists the columns that the code reads, no more and no fewer."""

import re

from reference_pages import with_columns

from onepolicy.record.schema import COLUMNS
from support.paths import ROOT

PAGE = (ROOT / "docs" / "dump_schema.md").read_text(encoding="utf-8")


def table(page):
    """Return the cells of each column's row by the column's name."""
    lines = page[page.index("| column | type |") : page.index("<!-- end of columns")].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines[2:]]
    return {name.strip("`"): cells for name, *cells in rows}


def test_the_table_is_current():
    command = "python benchmarks/reference_pages.py"
    assert with_columns(PAGE) == PAGE, f"write it anew: {command}"


def test_the_page_lists_every_column_and_which_are_required():
    listed = table(PAGE)
    assert set(listed) == set(COLUMNS)
    required = {name for name, (kind, _) in listed.items() if kind.endswith(", required")}
    assert required == {"tokens", "mask", "logp_rollout", "logp_trainer"}
    assert required == {name for name, spec in COLUMNS.items() if spec.required}


def test_types_say_what_a_cell_holds():
    kinds = {name: kind for name, (kind, _) in table(PAGE).items()}
    assert kinds["mask"] == "list of 0 / 1, required"
    assert (kinds["step"], kinds["version"]) == ("int", "int, or list of int")
    assert kinds["routes_rollout"] == "list of int"
    assert all(re.search(r"\w", meaning) for _, meaning in table(PAGE).values())


def test_a_table_that_is_not_current_is_written_anew():
    stale = PAGE.replace("| `entropy` |", "| `entropie` |")
    assert stale != PAGE
    assert with_columns(stale) == PAGE
