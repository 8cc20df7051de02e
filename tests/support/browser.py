"""Pages in headless Chromium: the errors they raise and the figures they draw."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from support.needs import need

# Written into the page ahead of everything else; the results are read from the dumped DOM.
COLLECTOR = """<script>
  const errors = [];
  const collected = document.documentElement.dataset;
  const note = (text) => { errors.push(text); collected.errors = errors.join(" | "); };
  const noteFailure = (event) => note(event.message || "failed to load " + event.target.src);
  addEventListener("error", noteFailure, true);
  addEventListener("unhandledrejection", (event) => note(String(event.reason)));
  addEventListener("load", () => {
    collected.loaded = performance.getEntriesByType("resource").map((e) => e.name).join(" ");
    collected.overflow = document.documentElement.scrollWidth - innerWidth;
  });
</script>"""
PLOTLY = re.compile(r'<script id="plotly">.*?</script>', re.S)


class Drawn(HTMLParser):
    """A parser that counts element classes inside every figure's div and keeps the attributes of
    html and body."""

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
    """Return the path of the browser that the report is tested in."""
    need("chromium")
    found = shutil.which("chromium")
    assert found is not None
    return found


def headless(folder: Path) -> list[str]:
    """Return the command of a browser with a profile of its own in the folder."""
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-sync", "--no-first-run"]
    return [chromium(), "--headless", *quiet, f"--user-data-dir={folder / 'profile'}"]


def with_script(html: str, script: str) -> str:
    """Return the page with a script ahead of everything else."""
    return html.replace('<meta charset="utf-8">', f'<meta charset="utf-8">{script}', 1)


@dataclass
class Page:
    """One page being opened. `drawn` waits for it."""

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
    page.write_text(with_script(html, COLLECTOR), encoding="utf-8")
    command = [*headless(folder), f"--window-size={width},3000", "--virtual-time-budget=5000"]
    command += ["--disable-quic", "--disable-background-networking", "--disable-component-update"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*command, "--dump-dom", page.as_uri()], **pipes)
    try:
        yield Page(process)
    finally:
        process.kill()
        process.communicate()
