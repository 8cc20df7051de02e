"""The report in headless Chromium: every figure is drawn, no script fails, nothing is loaded."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_run import make_fixture_run

from needs import need
from onepolicy.report.html import write_report

# Written into the page ahead of everything else; the results are read from the dumped DOM.
COLLECTOR = """<script>
  const errors = [];
  const note = (text) => { errors.push(text); document.documentElement.dataset.errors = errors.join(" | "); };
  addEventListener("error", (event) => note(event.message || "failed to load " + event.target.src), true);
  addEventListener("unhandledrejection", (event) => note(String(event.reason)));
  addEventListener("load", () => {
    document.documentElement.dataset.loaded = performance.getEntriesByType("resource").map((e) => e.name).join(" ");
    document.documentElement.dataset.overflow = document.documentElement.scrollWidth - innerWidth;
  });
</script>"""

PLOTLY = re.compile(r'<script id="plotly">.*?</script>', re.S)

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


class Drawn(HTMLParser):
    """Counts element classes inside every figure's div, and keeps the attributes of html and body."""

    VOID = frozenset({"meta", "br", "link", "img", "input", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.marks: dict[str, dict[str, int]] = {}
        self.roots: dict[str, dict[str, str | None]] = {}
        self._figure, self._depth = "", 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("html", "body"):
            self.roots.setdefault(tag, values)
        name = values.get("id") or ""
        if not self._figure and name.startswith("fig-"):
            self._figure, self._depth = name.removeprefix("fig-"), 0
            self.marks[self._figure] = {}
        if self._figure:
            self._depth += tag not in self.VOID
            counts = self.marks[self._figure]
            for each in [f"<{tag}>", *(values.get("class") or "").split()]:
                counts[each] = counts.get(each, 0) + 1

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._figure and tag not in self.VOID:
            self._depth -= 1
            if self._depth == 0:
                self._figure = ""


def chromium() -> str:
    """The report is tested in a real browser."""
    need("chromium")
    found = shutil.which("chromium")
    assert found is not None
    return found


@dataclass
class Page:
    """One page being opened; `drawn` waits for it."""

    process: subprocess.Popen

    def drawn(self) -> Drawn:
        dom, errors = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, errors
        found = Drawn()
        # the library's own source is no part of what was drawn, and slow to parse
        found.feed(PLOTLY.sub("", dom))
        return found


@contextmanager
def opened(html: str, folder: Path, *, width: int) -> Iterator[Page]:
    folder.mkdir()
    page = folder / "page.html"
    page.write_text(
        html.replace('<meta charset="utf-8">', f'<meta charset="utf-8">{COLLECTOR}', 1),
        encoding="utf-8",
    )
    quiet = [
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
    ]
    command = [chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-sync", *quiet]
    command += [
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width},3000",
        "--virtual-time-budget=5000",
    ]
    process = subprocess.Popen(
        [*command, "--dump-dom", page.as_uri()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Page(process)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Drawn]:
    """Three pages, opened at once: a full run, a dense one on a phone, and a report that is broken on purpose."""
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
    """The collector itself: a page without plotly must fail the tests above."""
    assert pages["broken"].roots["html"].get("data-errors")
    assert "data-figures" not in pages["broken"].roots["body"]
