"""docs/corrections.md holds the current presets and predicted numbers."""

import re

from onepolicy.config.presets import correction_presets
from onepolicy.correct.equations import markdown_lists
from onepolicy.correct.predict import predict
from onepolicy.correct.presets import preset
from support.paths import ROOT

PAGE = (ROOT / "docs" / "corrections.md").read_text()
KLS, LENGTHS = (1e-4, 1e-3, 1e-2), (500, 2000, 8000)


def predicted(name: str, kl: float) -> list[str]:
    return [f"{predict(preset(name), kl, length).attenuation:.2f}" for length in LENGTHS]


def predicted_table() -> str:
    """Rows that are 1.00 throughout are left out."""
    head = "| preset | nats a slot | " + " | ".join(f"{length} slots" for length in LENGTHS) + " |"
    lines = [head, "|---" * (len(LENGTHS) + 2) + "|"]
    for name in ("trl-default", "seq-tis", "geo-rs", "k3-rs"):
        for kl in KLS:
            cells = predicted(name, kl)
            if set(cells) != {"1.00"}:
                lines.append(f"| {name} | {kl:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_weights_of_single_tokens_leave_the_step_as_it_is():
    assert {each for name in ("tis", "icepop") for kl in KLS for each in predicted(name, kl)} == {
        "1.00"
    }


def test_the_page_is_current():
    for table in (markdown_lists(), predicted_table()):
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
