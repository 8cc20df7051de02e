"""The tables of trainers and capabilities in docs/trainers.md and README, from the tests.

A test says so with `@capability("miles", "R3", how="contract")`, where `capability` is
`pytest.mark.capability`. `PYTHONPATH=tests python -m support.capabilities` writes the table anew.
"""

from __future__ import annotations

import ast

from support.paths import ROOT

PAGE, README = ROOT / "docs" / "trainers.md", ROOT / "README.md"
SHORT = ("measured", "fixed corrections", "R3")
"""Those of the README."""
START, END = "<!-- capabilities -->", "<!-- end of capabilities -->"
TRAINERS = {
    **{"TRL": "trainers.md#trl", "verl": "trainers.md#verl"},
    "Megatron": "other_trainers.md#megatron-core",
    **{"SkyRL": "other_trainers.md#skyrl", "prime-rl": "other_trainers.md#prime-rl"},
    **dict.fromkeys(("slime", "miles"), "other_trainers.md#slime-and-miles"),
    "OpenRLHF": "other_trainers.md#openrlhf",
}
CAPABILITIES = ("measured", "fixed corrections", "live corrections", "R3")
CAPABILITIES += ("detector", "dump", "preflight")
HOW = ("live", "contract")  # the first is the stronger
NONE = "-"
OWN = {("slime", "R3"), ("SkyRL", "R3"), ("prime-rl", "R3")}
"""What a trainer does itself, on some of its backends; a test of ours goes before it."""


def marks():
    """Return (trainer, capability, how) of every decorated test."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        if "@capability(" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            found += [_mark(d) for d in getattr(node, "decorator_list", []) if _is_mark(d)]
    return found


def _is_mark(decorator):
    return isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "capability"


def _mark(decorator):
    trainer, name = map(ast.literal_eval, decorator.args)
    (how,) = [ast.literal_eval(k.value) for k in decorator.keywords if k.arg == "how"]
    assert trainer in TRAINERS, trainer
    assert name in CAPABILITIES, name
    assert how in HOW, how
    return trainer, name, how


def table(capabilities=CAPABILITIES, folder=""):
    """Return the lines of the table. `folder`: where the trainers' pages are."""
    known = set(marks())
    lines = [f"| trainer | {' | '.join(capabilities)} |", "|---" * (len(capabilities) + 1) + "|"]
    for trainer, page in TRAINERS.items():
        cells = [_cell(known, trainer, name) for name in capabilities]
        if any(cell in HOW for cell in cells):
            lines.append(f"| [{trainer}]({folder}{page}) | " + " | ".join(cells) + " |")
    return lines


def _cell(known, trainer, name):
    for how in HOW:
        if (trainer, name, how) in known:
            return how
    return "own" if (trainer, name) in OWN else NONE


def page():
    """Return docs/trainers.md with the table of now."""
    return _written(PAGE, table())


def readme():
    """Return README with its shorter table of now."""
    return _written(README, table(SHORT, "docs/"))


def _written(path, lines):
    head, _, rest = path.read_text(encoding="utf-8").partition(START)
    _, _, tail = rest.partition(END)
    return "\n".join([head + START, *lines, END + tail])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    README.write_text(readme(), encoding="utf-8")
