"""docs/reference/versions.md, made from the results of the version cells."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from support.paths import ROOT

FOLDER = Path(__file__).parent
DOCS = ROOT / "docs" / "reference" / "versions.md"

_HEAD = """\
# Versions

The library (`import onepolicy`, `onepolicy audit`) runs on torch {torch} and later and transformers
{transformers} and later, beside whatever your trainer pins. Commands that train, measure or plan
need newer ones, the extra `train`: `pip install 'onepolicy[train]'` (until the first release: the
path of a clone in the name's place).

Each row is a venv in which the library's tests ran on a CPU, some minutes a row:

    make test-versions

`PYTHONPATH=tests python -m support.versions.cells page` writes this page from the results of that
run (`tests/support/versions/results/`); a test compares them. `make test-versions-fast` runs a
part of the tests in {fast}.
The column *tests* names the folders and files of `tests/support/versions/cells.toml` that ran.

## What ran

| cell | Python | torch | transformers | numpy | pydantic | tests | passed | skipped | failed |
|---|---|---|---|---|---|---|---|---|---|
"""
_FAMILIES = """
## Model families

`tests/integration/replay/test_versions.py`, one tiny model a family: routes are recorded, replaying
them keeps every bit of logits and gradients, random routes are used and only their experts get
gradients, rows without a route take the router's own, and both kinds of activation checkpointing
recompute with the routes of their forward.

"""
_REFUSED = """
`record(weights=True)` needs a router that returns the combine weights. It raises, with that reason,
where the block selects the experts itself: on 4.x Qwen3-MoE, Qwen2-MoE, Mixtral and OLMoE, on 5.0
to 5.12 DeepSeek-V2, DeepSeek-V3 and GLM-4.5. So does gpt-oss on 4.x, whose router returns the
weights spread over all experts.

## Skipped, by reason

"""


def page() -> str:
    """Return the page's text."""
    table = tomllib.loads((FOLDER / "cells.toml").read_text(encoding="utf-8"))
    cells: dict[str, Any] = table["cells"]
    results = {name: _read(name) for name in cells if _file(name).is_file()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = dict(line.split(">=") for line in project["dependencies"])
    fast = " and ".join(f"`{name}`" for name in cells if cells[name].get("fast"))
    parts = [
        _HEAD.format(torch=oldest["torch"], transformers=oldest["transformers"], fast=fast),
        *(_row(name, results.get(name)) for name in cells),
        _FAMILIES,
        _families(results),
        _REFUSED,
        _skips(results),
    ]
    return "".join(parts)


def _file(name: str) -> Path:
    return FOLDER / "results" / f"{name}.json"


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_file(name).read_text(encoding="utf-8"))
    return found


def _row(name: str, found: dict[str, Any] | None) -> str:
    if found is None:
        return f"| `{name}` | not run yet |{' |' * 8}\n"
    keys = ("python", "torch", "transformers", "numpy", "pydantic", "tests")
    versions = [found[key] for key in keys]
    counts = [found["passed"], sum(found["skipped"].values()), len(found["failed"])]
    return f"| `{name}` | {' | '.join(map(str, [*versions, *counts]))} |\n"


def _families(results: dict[str, dict[str, Any]]) -> str:
    families = list(next(iter(results.values()))["families"])
    lines = [["cell", *families], ["---"] * (1 + len(families))]
    for name, found in results.items():
        lines.append([f"`{name}`", *(_state(found["families"][each]) for each in families)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _state(state: str) -> str:
    if state.startswith("transformers has no"):
        return "not there yet"
    if state.startswith("its own forward fails"):
        return "transformers' own forward fails"
    return state


def _skips(results: dict[str, dict[str, Any]]) -> str:
    reasons = sorted({reason for found in results.values() for reason in found["skipped"]})
    lines = []
    for reason in reasons:
        counts = [
            f"{found['skipped'][reason]} in `{name}`"
            for name, found in results.items()
            if reason in found["skipped"]
        ]
        lines.append(f"- {reason}: {', '.join(counts)}\n")
    return "".join(lines)
