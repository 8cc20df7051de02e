"""The documentation site: it is whole, and nothing of it comes from another machine.

`make test-release` runs it in a venv of its own. mkdocs itself checks links, anchors and the menu.
"""

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LOADED = re.compile(r"<(?:script|img|link|iframe|source)\b[^>]*?\b(?:src|href)=\"([^\"]+)\"")
PAGE_METADATA = re.compile(r'<link [^>]*rel="(?:canonical|prev|next)"[^>]*>')

pytestmark = [pytest.mark.release, pytest.mark.process]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_page_is_there(site):
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    assert len(pages) > 20
    assert all((site / page).with_suffix(".html").is_file() for page in pages)


def test_nothing_is_loaded_from_elsewhere(site):
    """Scripts, styles, fonts and pictures are files of the site."""
    for page in site.rglob("*.html"):
        text = PAGE_METADATA.sub("", page.read_text(encoding="utf-8"))
        for target in LOADED.findall(text):
            assert not re.match(r"(https?:)?//", target), f"{page.name}: {target}"
            if not target.startswith(("data:", "#")) and page.name != "404.html":
                path = html.unescape(target).partition("?")[0].partition("#")[0]
                assert (page.parent / path).exists(), f"{page.name}: {target}"


def test_the_reference_of_the_library_has_its_names(site):
    text = (site / "library.html").read_text(encoding="utf-8")
    names = ("bind_routers", "RoutingTrace", "check_alignment", "reweight", "mismatch", "diagnose")
    assert all(re.search(rf'<h\d id="[\w.]*\b{name}"', text) for name in names)
