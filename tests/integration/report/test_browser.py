"""The report in headless Chromium: every figure is drawn, no script fails, nothing is loaded."""

import pytest

from onepolicy.report.run_page import write_report
from support.browser import PLOTLY, Drawn, opened
from support.report_run import make_fixture_run

pytestmark = pytest.mark.process
MARKS = dict.fromkeys(("length", "entropy", "grad_norm"), ("js-line", 1))
MARKS |= dict.fromkeys(("reward", "k3", "turns", "f_tau"), ("js-line", 2))
MARKS |= {"scatter": ("point", 300), "scatter_native": ("point", 300), "layers": ("point", 16)}
MARKS |= {"gate-mass": ("point", 8), "time": ("js-fill", 5)}
"""Figure -> (class of one drawn mark, at least this many)."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Drawn]:
    """Open two pages at once: a full run, and a dense one on a phone."""
    folder = tmp_path_factory.mktemp("browser")
    full = make_fixture_run(folder / "full", steps=60, tokens=400, turns=True)
    plain = {"replay": False, "moe": False, "evaluation": False}
    dense = make_fixture_run(folder / "dense", steps=3, tokens=40, **plain)
    full, small = (write_report(run).read_text(encoding="utf-8") for run in (full, dense))
    with (
        opened(full, folder / "wide", width=1280) as wide,
        opened(small, folder / "phone", width=500) as phone,
    ):
        return {"full": wide.drawn(), "dense on a phone": phone.drawn()}


@pytest.mark.few(1)
@pytest.mark.smoke
@pytest.mark.parametrize("page", ["full", "dense on a phone"])
def test_no_script_error_nothing_is_loaded_and_nothing_sticks_out(pages, page):
    root = pages[page].roots["html"]
    assert "data-errors" not in root
    assert pages[page].roots["body"]["data-figures"] == "drawn"
    assert root["data-loaded"] == ""
    assert int(root["data-overflow"] or "1") <= 0  # the page never scrolls sideways


def test_these_figures_are_drawn_and_no_other(pages, subtests):
    full, dense = (pages[page].marks for page in ("full", "dense on a phone"))
    assert set(full) == set(MARKS)
    for name, (mark, least) in MARKS.items():
        with subtests.test(name):
            assert full[name]["<svg>"] >= 1
            assert full[name].get(mark, 0) >= least, full[name]
    drawn = {"reward", "length", "entropy", "grad_norm", "k3", "time"}  # 3 steps: no probe
    assert set(dense) == drawn
    assert all(found["<svg>"] >= 1 for found in dense.values())


@pytest.mark.full
def test_a_script_error_is_seen(tmp_path):
    """A page without plotly must fail the tests above, or the error collector does not work."""
    page = write_report(make_fixture_run(tmp_path / "run", steps=3, tokens=40, evaluation=False))
    text = PLOTLY.sub("", page.read_text(encoding="utf-8"))
    with opened(text, tmp_path / "opened", width=500) as broken:
        roots = broken.drawn().roots
    assert roots["html"].get("data-errors")
    assert "data-figures" not in roots["body"]
