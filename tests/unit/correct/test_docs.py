"""docs/corrections.md holds the current preset table and predicted numbers."""

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
