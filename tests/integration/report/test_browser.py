"""The report in headless Chromium: every figure is drawn, no script fails, nothing is loaded."""

import pytest

from onepolicy.report.html import write_report
from support.browser import PLOTLY, Drawn, opened
from support.report_run import make_fixture_run

# figure -> (class of one drawn mark, at least this many)
MARKS = {
    "reward": ("js-line", 2),
    "length": ("js-line", 1),
    "entropy": ("js-line", 1),
    "grad_norm": ("js-line", 1),
    "k3": ("js-line", 2),
    "turns": ("js-line", 2),
    "f_tau": ("js-line", 2),
    "scatter": ("point", 300),
    "scatter_native": ("point", 300),
    "routers": ("point", 4),
    "tokens": ("point", 4),
    "sequences": ("point", 8),
    "layers": ("point", 16),
    "gate-mass": ("point", 8),
    "time": ("js-fill", 5),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Drawn]:
    """Open three pages at once: a full run, a dense one on a phone, and a report that is broken on
    purpose."""
    folder = tmp_path_factory.mktemp("browser")
    full = write_report(
        make_fixture_run(folder / "full", steps=60, tokens=400, turns=True)
    ).read_text(encoding="utf-8")
    dense = make_fixture_run(
        folder / "dense", steps=3, tokens=40, replay=False, moe=False, evaluation=False
    )
    small = write_report(dense).read_text(encoding="utf-8")
    broken = PLOTLY.sub("", small)
    with (
        opened(full, folder / "wide", width=1280) as wide,
        opened(small, folder / "phone", width=500) as phone,
        opened(broken, folder / "broken", width=500) as third,
    ):
        return {"full": wide.drawn(), "dense on a phone": phone.drawn(), "broken": third.drawn()}


@pytest.mark.parametrize("page", ["full", "dense on a phone"])
def test_no_script_error(pages, page):
    assert "data-errors" not in pages[page].roots["html"]
    assert pages[page].roots["body"]["data-figures"] == "drawn"


@pytest.mark.parametrize("page", ["full", "dense on a phone"])
def test_nothing_is_loaded_and_nothing_sticks_out(pages, page):
    root = pages[page].roots["html"]
    assert root["data-loaded"] == ""
    assert int(root["data-overflow"] or "1") <= 0  # the page never scrolls sideways


@pytest.mark.parametrize("name", MARKS)
def test_figure_is_drawn(pages, name):
    mark, least = MARKS[name]
    found = pages["full"].marks[name]
    assert found["<svg>"] >= 1
    assert found.get(mark, 0) >= least, found


def test_no_other_figure(pages):
    assert set(pages["full"].marks) == set(MARKS)
    dense = pages["dense on a phone"].marks
    assert set(dense) == {
        "reward",
        "length",
        "entropy",
        "grad_norm",
        "k3",
        "time",
    }  # 3 steps: no probe
    assert all(found["<svg>"] >= 1 for found in dense.values())


def test_a_script_error_is_seen(pages):
    """A page without plotly must fail the tests above, or the error collector does not work."""
    assert pages["broken"].roots["html"].get("data-errors")
    assert "data-figures" not in pages["broken"].roots["body"]
