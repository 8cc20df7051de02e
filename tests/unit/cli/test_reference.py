"""docs/reference has the command line and the metrics of this code."""

from functools import cache

import reference_pages

from onepolicy.run.log import METRICS
from support.paths import ROOT

FOLDER = ROOT / "docs" / "reference"
pages = cache(reference_pages.pages)


def test_the_pages_are_current():
    """Spaces do not count: Python's versions break lines of help in other places."""
    for name in ("command_line.md", "metrics.md"):
        written = (FOLDER / name).read_text(encoding="utf-8").split()
        assert written == pages()[name].split(), (
            "write it anew: python benchmarks/reference_pages.py"
        )


def test_nothing_is_left_out():
    text = pages()
    for name in METRICS:
        shown = f"\n- `{name}`: "
        if name.startswith("counterfactual/"):
            shown = f" `{name.partition('/')[2]}`"
        assert shown in text["metrics.md"], name
    commands = ("train", "compare", "measure", "audit", "engine serve", "engine check", "plan")
    assert all(f"\n## onepolicy {name}\n" in text["command_line.md"] for name in commands)
