"""docs/reference has the command line, the metrics and the presets of this code."""

from functools import cache

import reference_pages

from onepolicy.config.presets import offered_corrections
from onepolicy.correct.equations import NAMED
from onepolicy.run.log import METRICS
from support.paths import ROOT

FOLDER = ROOT / "docs" / "reference"
pages = cache(reference_pages.pages)


def test_the_pages_are_current():
    """Spaces do not count: Python's versions break lines of help in other places."""
    for name in ("command_line.md", "metrics.md", "presets.md"):
        written = (FOLDER / name).read_text(encoding="utf-8").split()
        assert written == pages()[name].split(), (
            "write it anew: python benchmarks/reference_pages.py"
        )


def test_nothing_is_left_out():
    text = pages()
    assert all(f"\n| `{name}` |" in text["metrics.md"] for name in METRICS)
    offered = [name for names in offered_corrections().values() for name in names]
    assert all(f"\n#### {name}\n" in text["presets.md"] for name in offered)
    assert all(f"\n### {title}\n" in text["presets.md"] for title in NAMED.values())
    commands = ("train", "compare", "measure", "audit", "engine serve", "engine check", "plan")
    assert all(f"\n## onepolicy {name}\n" in text["command_line.md"] for name in commands)
