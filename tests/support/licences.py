"""Licences of everything that an install of onepolicy brings, read from the packages' metadata.

PYTHONPATH=src:tests .venv/bin/python -m support.licences   # into docs/data/licences.csv
"""

from __future__ import annotations

import csv
import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.paths import ROOT
from support.versions.page import DOCS as PAGE
from support.versions.page import LICENCES

LISTED = ROOT / "docs" / "data" / "licences.csv"
COLUMNS = ["package", "licence", "comes with"]
EXTRAS = ("", "train", "report", "audit", "lora", "qlora", "server", "envs", "wandb", "ray")
"""Those that `make test` installs; "" is the library alone."""
CLASSIFIER = "License :: OSI Approved :: "
SHORT = {
    "Apache Software License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache": "Apache-2.0",
    "Apache-2": "Apache-2.0",
    "MIT License": "MIT",
    "BSD License": "BSD",
    "BSD 3-Clause": "BSD-3-Clause",
    "BSD 3-Clause License": "BSD-3-Clause",
    "3-Clause BSD License": "BSD-3-Clause",
    "Python Software Foundation License": "PSF-2.0",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "ISC License (ISCL)": "ISC",
    "The Unlicense (Unlicense)": "Unlicense",
}
PERMISSIVE = {
    *("Apache-2.0", "MIT", "MIT-0", "BSD", "BSD-2-Clause", "BSD-3-Clause", "0BSD", "ISC", "Zlib"),
    *(
        "Apache-2.0 WITH LLVM-exception",
        "PSF-2.0",
        "Python-2.0",
        "Unlicense",
        "HPND",
        "MIT-CMU",
        "CNRI-Python",
        "BSL-1.0",
        "CC0-1.0",
    ),
}
FIRST_WORDS = {"MIT License": "MIT", "BSD style": "BSD", "Apache License": "Apache-2.0"}
HEAD = """
onepolicy is Apache-2.0. Its wheel contains no code of others. The packages that an install brings,
each under its own licence, are in [licences.csv](../data/licences.csv), as their metadata says
(`PYTHONPATH=src:tests .venv/bin/python -m support.licences` reads the venv of `make test`;
`tests/lint/test_licences.py` compares). Not listed: NVIDIA's CUDA libraries, which PyPI's torch
brings on Linux under NVIDIA's own terms; the extras `vllm`, `adam8bit` and `trackio`; tools of the
tests.
"""


class Row(NamedTuple):
    """A package of the list."""

    name: str
    licence: str
    brought_by: str  # the first extra that needs it


def licence_of(package: Distribution) -> str:
    """Return the licence of a package's metadata: SPDX where it gives one, else its classifiers."""
    meta = package.metadata
    if meta["License-Expression"]:
        return str(meta["License-Expression"])
    marks = [
        c.removeprefix(CLASSIFIER) for c in meta.get_all("Classifier") or () if CLASSIFIER in c
    ]
    text = (meta["License"] or "").strip()
    if text and len(text) < 60 and "\n" not in text and marks in ([], ["BSD License"]):
        return SHORT.get(text, text)  # says which BSD
    return " AND ".join(sorted({SHORT.get(mark, mark) for mark in marks})) or _of_file(package)


def _of_file(package: Distribution) -> str:
    """Return the licence that the first words of a package's licence file name."""
    names = [file for file in package.files or () if re.search("LICEN[CS]E", file.name)]
    words = " ".join(file.read_text()[:200] for file in names)
    named = [licence for mark, licence in FIRST_WORDS.items() if mark in words]
    return " AND ".join(named) or "see the package"


def installed(extra: str) -> set[str]:
    """Return the packages that onepolicy with this extra needs and that are installed here."""
    found, todo = set(), [("onepolicy", frozenset({extra}))]
    seen = set()
    while todo:
        name, extras = todo.pop()
        try:
            package = distribution(name)
        except PackageNotFoundError:  # of another platform
            continue
        found.add(canonicalize_name(name))
        for requirement in map(Requirement, package.requires or ()):
            wanted = any(
                not requirement.marker or requirement.marker.evaluate({"extra": extra})
                for extra in extras | {""}
            )
            step = (requirement.name, frozenset(requirement.extras))
            if wanted and step not in seen:
                seen.add(step)
                todo.append(step)
    return found - {"onepolicy"}


def rows() -> list[Row]:
    """Return a row for every package, by extra and name."""
    listed, found = [], set()
    for extra in EXTRAS:
        for name in sorted(installed(extra) - found):
            package = distribution(name)
            found.add(name)
            listed.append(Row(name, licence_of(package), extra or "the library"))
    return listed


def is_permissive(licence: str) -> bool:
    """Return whether every part of an SPDX expression is one of the permissive licences."""
    words = re.split(r"\s+(?:AND|OR)\s+|[()]", licence)
    return all(word.strip() in PERMISSIVE for word in words if word.strip())


def part(listed: list[Row]) -> str:
    """Return what the page says of licences: where all are, and which to read first."""
    special = [f"{row.name} ({row.licence})" for row in listed if not is_permissive(row.licence)]
    return f"{HEAD}\n**Read these first**, not plainly permissive: {', '.join(special)}.\n"


def listed_packages() -> list[Row]:
    """Return the rows of the list in the tree."""
    with LISTED.open(encoding="utf-8", newline="") as file:
        return [Row(*cells) for cells in list(csv.reader(file))[1:]]


def write() -> None:
    """Write the list, and what the page says of it."""
    listed = rows()
    with LISTED.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        table.writerows(listed)
    before, _, _ = PAGE.read_text(encoding="utf-8").partition(LICENCES)
    PAGE.write_text(before + LICENCES + part(listed), encoding="utf-8")


if __name__ == "__main__":
    write()
