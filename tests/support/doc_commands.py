"""Every command in the README and the docs: of blocks, indented lines and backticks."""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple

import yaml

from support.paths import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("onepolicy", "python", "python3", "pytest", "make", "torchrun", "pip", "ray", "uv")
PROGRAMS += ("trl", "examples/verl_ppo.sh")
ENVIRONMENT = re.compile(r"^[A-Z_]+=\S* ")
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
SHELL = ("", "bash", "sh")
OPTIONS = ("audit.md",)
"""Pages of the reference whose commands are executed as those of a guide are."""


class Command(NamedTuple):
    """A command line of a page, without its comment and environment."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)[:70]}"


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of a page in a language."""
    return [body for found, body in FENCE.findall(text) if found == language]


def written(text: str) -> list[str]:
    """Return the lines of a page that may be commands."""
    blocks = [body for language, body in FENCE.findall(text) if language in SHELL]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    prose = FENCE.sub("", text)
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
                if words and words[0] in PROGRAMS and (len(words) > 1 or "/" in words[0]):
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


def guides() -> set[str]:
    """Return the names of the README, of the guides in the site's menu, and of OPTIONS."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    menu = yaml.safe_load(text[text.index("\nnav:\n") :])["nav"]
    [parts] = [part["Guides"] for part in menu if isinstance(part, dict) and "Guides" in part]
    return {"README.md", *OPTIONS, *re.findall(r"[\w/]+\.md", str(parts))}


def commands_of_guides() -> dict[tuple[str, ...], list[str]]:
    """Return every command of README and guides with the pages that print it."""
    names = guides()
    pages: dict[tuple[str, ...], list[str]] = {}
    for command in commands():
        if command.page in names:
            pages.setdefault(command.words, []).append(command.page)
    return pages
