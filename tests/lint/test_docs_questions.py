"""Questions of newcomers: the site has the accepted answers, two clicks from the README."""

import re
import tomllib

import pytest

from support.paths import ROOT

DOCS = ROOT / "docs"
QUESTIONS = tomllib.loads((ROOT / "tests/support/questions.toml").read_text())["question"]


def links(path):
    """Return the pages that a page links to."""
    text = path.read_text(encoding="utf-8")
    found = re.findall(r"\]\(([\w./-]+\.md)(?:#[\w-]+)?\)", text)
    return {(path.parent / target).resolve() for target in found}


def test_there_are_twenty():
    assert len({question["asked"] for question in QUESTIONS}) == 20


@pytest.mark.parametrize("question", QUESTIONS, ids=[q["asked"] for q in QUESTIONS])
def test_the_page_says_what_is_accepted(question):
    page = (DOCS / question["page"]).resolve()
    text = " ".join(page.read_text(encoding="utf-8").split())
    assert question["said"]
    for words in question["said"]:
        assert words in text
    first = links(ROOT / "README.md")
    assert page in first | {target for link in first for target in links(link)}


def test_names_that_answers_use_are_explained_where_the_readme_first_uses_them():
    """k3 at its first sentence; F(2) stands on the page that explains it before others use it."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    sentence = next(
        s for s in re.split(r"(?<=[.:])\s", readme) if re.search(r"\bk3\b estimates", s)
    )
    assert "KL divergence" in sentence
    assert "F(2)" not in readme
    guide = (DOCS / "measure.md").read_text(encoding="utf-8")
    assert "F(2) is the share of tokens" in guide
