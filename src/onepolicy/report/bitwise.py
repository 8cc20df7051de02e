"""`onepolicy measure --numerics on-policy` in the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.text import Text

from onepolicy.notation import counted, number
from onepolicy.report.page import Table
from onepolicy.report.terminal import told

Tree = dict[str, Any]  # Bitwise of measure/bitwise.py, as in bitwise.json
HELD = "Engine and trainer are one policy, to the last bit."


def summary(tree: Tree) -> list[RenderableType]:
    """Return the table of differences and a line with the first one."""
    tokens = f"{tree['tokens']:,} of {counted(tree['sequences'], 'sequence')}"
    alone = "one sequence at a time"
    rows = [
        ("log-probabilities, engine against trainer", f"{tree['differing']:,}", tokens),
        ("the trainer against itself, packed otherwise", f"{tree['trainer_again']:,}", tokens),
        (f"the engine against itself, {alone}", f"{tree['engine_alone']:,}", f"{tree['alone']:,}"),
    ]
    if tree["routers"] is not None:
        differ = number(tree["routers"], share=True)
        rows.append(("routes, engine against trainer", differ, "all tokens and layers"))
    rows.append(("k3", number(tree["k3"]), "nats per token"))
    title = f"{tree['model']}, {tree['dtype']}"
    table = told(Table(("to the bit", "differ", "of"), rows, title))
    if tree["holds"]:
        return [table, Text(HELD, style="bold green")]
    return [table, Text(first_difference(tree), style="bold red")]


def first_difference(tree: Tree) -> str:
    """Return the reason why both sides are not one policy to the bit."""
    text = "Not the same to the bit"
    if tree["cannot_claim"]:
        text += f": {tree['cannot_claim']}"
    if tree["where"]:
        text += f". First log-probability: {tree['where']}"
    first = tree["first"]
    if first is not None:
        text += f". First number on the way there: slot {first['slot']}, {first['operator']}"
        text += f", off by up to {number(first['largest'])}"
    elif tree["where"]:
        text += ". Played again, nothing on the way there differs"
    return text + "."
