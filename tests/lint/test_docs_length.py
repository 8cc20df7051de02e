"""README and docs are short enough to be read: whoever adds a paragraph takes one out."""

from support.paths import ROOT

WORDS = 60_000
"""Of README and docs together, counted as `wc -w` does."""
PAGES = 35


def words(path):
    return len(path.read_text(encoding="utf-8").split())


def test_the_docs_have_at_most_so_many_words_and_pages():
    pages = sorted((ROOT / "docs").rglob("*.md"), key=words, reverse=True)
    total = sum(map(words, [ROOT / "README.md", *pages]))
    found = f"{total:,} words in {len(pages)} pages; the longest: "
    found += ", ".join(f"{page.name} {words(page):,}" for page in pages[:8])
    assert total <= WORDS, found
    assert len(pages) <= PAGES, found
