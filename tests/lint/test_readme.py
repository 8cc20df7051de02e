"""The README is short, and its links lead somewhere. tests/integration/test_docs_run.py runs its
code."""

import re

import pytest

from support.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_short():
    assert len(README.split()) <= 1000


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_every_link_of_the_readme_leads_to_a_file(target):
    assert (ROOT / target).exists()
