"""Every command in the README and the docs: of blocks, indented lines and backticks."""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple

from support.paths import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("onepolicy", "python", "python3", "pytest", "make", "torchrun", "pip", "ray", "uv")
ENVIRONMENT = re.compile(r"^[A-Z_]+=\S* ")
FENCED = re.compile(r"^```(?:bash|sh)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ANY_FENCE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)


class Command(NamedTuple):
    """A command line of a page, without its comment and environment."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)[:70]}"


def written(text: str) -> list[str]:
    """Return the lines of a page that may be commands."""
    lines = "\n".join(FENCED.findall(text)).replace("\\\n", " ").splitlines()
    prose = ANY_FENCE.sub("", text)
    lines += re.findall(r"^    (\S.*)$", prose, re.MULTILINE)
    lines += [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)]
    return lines


def commands() -> list[Command]:
    """Return every command once a page; those with `...` or a bare program name are prose."""
    found = {}
    for page in PAGES:
        for line in written(page.read_text(encoding="utf-8")):
            for part in re.split(r"&&|\|\s|;\s", re.sub(r"\s#.*", "", line)):
                words = split(part.strip())
                if len(words) > 1 and words[0] in PROGRAMS:
                    found[Command(page.name, tuple(words))] = None
    return list(found)


def split(line: str) -> list[str]:
    """Return the words of a command; none if it is elided or no command."""
    while ENVIRONMENT.match(line):
        line = ENVIRONMENT.sub("", line, count=1)
    if "..." in line or line.startswith("onepolicy in "):  # the title of an adapter's report
        return []
    try:
        return shlex.split(line)
    except ValueError:  # an apostrophe of prose
        return []
