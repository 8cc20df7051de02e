"""The README is short, its links lead somewhere, and its claims have data and a test.

tests/integration/test_docs_run.py runs its code.
"""

import csv
import re

import pytest

from onepolicy.config.presets import correction_presets, objective_presets
from support.paths import ROOT
from support.sources import names_of

README = (ROOT / "README.md").read_text(encoding="utf-8")
TABLE = re.compile(r"<!-- (?:table: .*?<!-- end|capabilities -->.*?<!-- end of \w+) -->", re.DOTALL)
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
CLAIMS = ROOT / "tests" / "readme_claims.csv"
NAMES = r"\bR3\b|\bk3\b|FSDP2|Apache-2\.0"  # with a digit, which is no number


def test_it_is_short():
    assert len(README.split()) <= 800


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_every_link_of_the_readme_leads_to_a_file(target):
    assert (ROOT / target).exists()


def prose(text=README, *, code=False):
    """Return the text on one line, without what is written from data, code and links' targets."""
    text = TABLE.sub("", text)
    if not code:
        text = CODE.sub("", text)
    return " ".join(re.sub(r"\]\([^)]*\)", "]", text).split())


def claims():
    with CLAIMS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, strict=True))


def test_every_claim_has_its_data_and_its_test(subtests):
    for row in claims():
        path, _, name = row["test"].partition("::")
        with subtests.test(row["claim"]):
            assert row["claim"] in prose(code=True)
            assert (ROOT / row["data"]).is_file()
            assert name in names_of(ROOT / path)


def numbers_beside_claims(text):
    """Return the numbers of a text that stand in no claim of the table."""
    for row in claims():
        text = text.replace(row["claim"], "")
    return re.findall(r"[\w.-]*\d[\w.-]*", re.sub(NAMES, "", text))


def test_every_number_stands_in_a_claim():
    assert numbers_beside_claims(prose()) == []
    assert numbers_beside_claims(f"{prose()} It is 3.5 times faster.") == ["3.5"]


def test_no_preset_is_said_to_be_missing():
    (missing,) = re.findall(r"are presets \(not ([^)]*)\)", prose())
    names = {*correction_presets(), *objective_presets()}
    for name in missing.split(", "):
        assert not any(name.lower() in preset for preset in names), name
