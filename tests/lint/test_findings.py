"""The table of what strangers found: each mend and each test that it names is in the tree."""

import csv

import pytest

from support.paths import ROOT
from support.sources import names_of

TABLE = ROOT / "tests/findings.csv"
COLUMNS = ["issue", "finding", "class", "mend", "test"]


def rows():
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, strict=True))


def faults_of(row):
    """Return what is wrong with a row, in words."""
    faults = [f"{name} is empty" for name in COLUMNS if not row[name]]
    if not (ROOT / row["mend"]).exists():
        faults.append(f"there is no {row['mend']}")
    path, _, name = row["test"].partition("::")
    if not (ROOT / path).is_file():
        faults.append(f"there is no {path}")
    elif name not in names_of(ROOT / path):
        faults.append(f"{path} has no {name}")
    return faults


def test_every_mend_and_test_is_there(subtests):
    for row in rows():
        with subtests.test(row["finding"]):
            assert faults_of(row) == []


def test_the_table_is_sorted_and_says_each_thing_once():
    issues = [int(row["issue"]) for row in rows()]
    assert issues == sorted(issues)
    findings = [row["finding"] for row in rows()]
    assert len(set(findings)) == len(findings) > 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mend", "src/onepolicy/gone.py"),
        ("test", "tests/lint/gone.py::test_it"),
        ("test", "tests/lint/test_findings.py::test_gone"),
        ("test", "tests/lint/test_findings.py"),
        ("class", ""),
    ],
)
def test_a_row_that_names_nothing_is_red(field, value):
    good = {
        "issue": "49",
        "finding": "a finding",
        "class": "its class",
        "mend": "tests/support/sources.py",
        "test": "tests/lint/test_findings.py::test_a_row_that_names_nothing_is_red",
    }
    assert faults_of(good) == []
    assert faults_of({**good, field: value})
