"""Measured numbers are written in one notation, by src/onepolicy/notation.py."""

import ast

import pytest

from support.paths import ROOT
from support.sources import nodes_of

ROOMS = ("report", "verdict", "audit", "measure", "engine_check")
PLAIN = {"g", ".0f", ",.0f", ".0%"}
"""A setting as it was given, a count, a share in whole percent."""
ALLOWED = {
    "report/comparison.py": {".{digits}f", "+.{digits}f", ".2f"},  # accuracies, with their interval
    "report/figures/tokens.py": {".6f", ".1g"},  # a correlation near 1; the end of an axis
    "report/page.py": {".6g"},  # a picture's data
    "report/words.py": {".4f"},  # values near 1
    "audit/conformance.py": {".7g"},  # what a reader of another dump must reach
    "verdict/value_faults.py": {".6g"},  # one value that many tokens share
}


def specs_of(nodes):
    """Yield line and specification of every number that an f-string or `format` writes."""
    for node in nodes:
        spec = None
        if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
            spec = ast.unparse(node.format_spec)[2:-1]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "format" and node.args[1:]:
            spec = ast.unparse(node.args[1]).strip("'")
        if spec is not None and spec[-1:] in tuple("eEfFgG%") and spec not in PLAIN:
            yield node.lineno, spec


@pytest.mark.parametrize("room", ROOMS)
def test_no_other_notation(room):
    folder = ROOT / "src/onepolicy"
    stray = []
    for path in sorted((folder / room).rglob("*.py")):
        name = str(path.relative_to(folder))
        for line, spec in specs_of(nodes_of(path)):
            if spec not in ALLOWED.get(name, ()):
                stray.append(f"{name}:{line} writes :{spec}; call number() of notation.py")
    assert stray == []


def test_each_exception_is_used():
    folder = ROOT / "src/onepolicy"
    used = {name: {spec for _, spec in specs_of(nodes_of(folder / name))} for name in ALLOWED}
    assert used == ALLOWED


def test_a_stray_format_is_found():
    text = 'f"{k3:.2e} of {share:.2%} and {tau:g}, {count:,.0f}: {x}" + format(k3, ".3f")'
    assert {spec for _, spec in specs_of(ast.walk(ast.parse(text)))} == {".2e", ".2%", ".3f"}
