"""docs/corrections.md holds the current preset table and predicted numbers."""

import re

from onepolicy.config.presets import correction_presets
from onepolicy.correct.equations import markdown_table
from onepolicy.correct.predict import predict
from onepolicy.correct.presets import preset
from support.paths import ROOT

PAGE = (ROOT / "docs" / "corrections.md").read_text()
KLS, LENGTHS = (1e-4, 1e-3, 1e-2), (500, 2000, 8000)


def predicted_table() -> str:
    head = "| preset | nats a slot | " + " | ".join(f"{length} slots" for length in LENGTHS) + " |"
    lines = [head, "| --- " * (len(LENGTHS) + 2) + "|"]
    for name in ("tis", "icepop", "trl-default", "seq-tis", "geo-rs", "k3-rs"):
        for kl in KLS:
            cells = [f"{predict(preset(name), kl, length).attenuation:.2f}" for length in LENGTHS]
            lines.append(f"| {name} | {kl:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_the_page_is_current():
    for table in (markdown_table(), predicted_table()):
        assert table in PAGE, f"docs/corrections.md is not current; it should contain\n{table}"


def test_pages_name_presets_that_one_can_choose():
    """corrections.md lists the names of other frameworks, the evidence has the arms of old runs."""
    translated = {name for name, row in correction_presets().items() if "question" not in row}
    pages = sorted((ROOT / "docs").glob("*.md"))
    found = {
        f"{page.name}: {name}"
        for page in pages
        if page.name not in ("corrections.md", "evidence.md", "evidence_tables.md")
        for name in re.findall(r"[`\"=]([\w-]+\*?)[`\" ]", page.read_text(encoding="utf-8"))
        if name in translated or name.endswith("-centering*")
    }
    assert not found
