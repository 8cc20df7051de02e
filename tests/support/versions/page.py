"""docs/reference/versions.md, made from the results of the version cells.

What comes after LICENCES is written by support.licences.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from packaging.version import Version

from support.paths import ROOT

FOLDER = Path(__file__).parent
DOCS = ROOT / "docs" / "reference" / "versions.md"

LICENCES = "<!-- written by support.licences -->\n"

_HEAD = """\
# Versions and licences

For whoever installs it beside other packages. After this page you know which versions were tried,
and what licences come with it. The library (`import onepolicy`, `onepolicy audit`) runs on torch
{torch} and later and transformers {transformers} and later, beside whatever your trainer pins.
Commands that train, measure or plan need newer ones: `pip install 'onepolicy[train]'` (until the
first release: the path of a clone in the name's place).

Each row is a venv in which the library's tests ran on a CPU (*tests*: the row of
`tests/support/versions/cells.toml`). `make test-versions` runs them, some minutes a row,
`make test-versions-fast` a part in {fast}; `PYTHONPATH=tests python -m
support.versions.cells page` writes this page from the results.

| cell | Python | torch | transformers | tests | passed | skipped | failed |
|---|---|---|---|---|---|---|---|
"""
_FAMILIES = """
## Model families

`tests/integration/replay/test_versions.py`, one tiny model a family: its own routes, random ones,
rows without a route, under both kinds of activation checkpointing
([what holds](../replay.md#model-families)).

"""
_REFUSED = """
`record(weights=True)` needs a router that returns the combine weights. It raises, with that reason,
where the block selects the experts itself: on 4.x Qwen3-MoE, Qwen2-MoE, Mixtral and OLMoE, on 5.0
to 5.12 DeepSeek-V2, DeepSeek-V3 and GLM-4.5. So does gpt-oss on 4.x, whose router returns the
weights spread over all experts.

Why tests are skipped is in `tests/support/versions/results`.
"""
_LICENCES = """
## Licences
"""


def page() -> str:
    """Return the page's text before its licences."""
    table = tomllib.loads((FOLDER / "cells.toml").read_text(encoding="utf-8"))
    cells: dict[str, Any] = table["cells"]
    results = {name: _read(name) for name in cells if _file(name).is_file()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = dict(line.split(">=") for line in project["dependencies"])
    fast = " and ".join(f"`{name}`" for name in cells if cells[name].get("fast"))
    parts = [
        _HEAD.format(torch=oldest["torch"], transformers=oldest["transformers"], fast=fast),
        *(_row(name, results.get(name)) for name in cells),
        f"\nPython {_span(results, 'python')}, numpy {_span(results, 'numpy')}, "
        f"pydantic {_span(results, 'pydantic')}.\n",
        _FAMILIES,
        _families(results),
        _REFUSED,
        _LICENCES,
    ]
    return "".join(parts)


def write() -> None:
    """Write the page; its licences stay."""
    _, _, licences = DOCS.read_text(encoding="utf-8").partition(LICENCES)
    DOCS.write_text(page() + LICENCES + licences, encoding="utf-8")


def _span(results: dict[str, dict[str, Any]], package: str) -> str:
    """Return the oldest and the newest version of the cells."""
    found = sorted({each[package] for each in results.values()}, key=Version)
    return f"{found[0]} to {found[-1]}"


def _file(name: str) -> Path:
    return FOLDER / "results" / f"{name}.json"


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_file(name).read_text(encoding="utf-8"))
    return found


def _row(name: str, found: dict[str, Any] | None) -> str:
    if found is None:
        return f"| `{name}` | not run yet |{' |' * 6}\n"
    keys = ("python", "torch", "transformers", "tests")
    versions = [found[key] for key in keys]
    counts = [found["passed"], sum(found["skipped"].values()), len(found["failed"])]
    return f"| `{name}` | {' | '.join(map(str, [*versions, *counts]))} |\n"


def _families(results: dict[str, dict[str, Any]]) -> str:
    families = list(next(iter(results.values()))["families"])
    text = f"{'; '.join(families)}: ok in every cell but"
    other: dict[tuple[str, str], list[str]] = {}
    for name, found in results.items():
        states = {family: _state(found["families"][family]) for family in families}
        for state in dict.fromkeys(states.values()):
            named = "; ".join(family for family in families if states[family] == state)
            if state != "ok":
                other.setdefault((named, state), []).append(f"`{name}`")
    rows = [f"| {', '.join(c)} | {named} | {state} |" for (named, state), c in other.items()]
    return "\n".join([text, "", "| cells | families | |", "|---|---|---|", *rows]) + "\n"


def _state(state: str) -> str:
    if state.startswith("transformers has no"):
        return "not there yet"
    if state.startswith("its own forward fails"):
        return "transformers' own forward fails"
    return state
