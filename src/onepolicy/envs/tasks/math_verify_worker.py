"""The process grade.MathGrader talks to: a JSON line in, a JSON line out. Imports nothing but math-verify, and sympy,
which that imports."""

from __future__ import annotations

import json
import logging
import re
import sys
from typing import Any

from math_verify import parse, verify
from sympy import Basic, Eq

RELATIONS = {
    "unequal": re.compile(r"\s*(?:!=|≠|\\neq?(?![a-zA-Z])|\\not\s*=)"),
    "at most": re.compile(r"\s*(?:<=|≤|\\(?:leq?|leqslant)(?![a-zA-Z]))"),
    "at least": re.compile(r"\s*(?:>=|≥|\\(?:geq?|geqslant)(?![a-zA-Z]))"),
    "below": re.compile(r"\s*(?:<(?!=)|\\lt(?![a-zA-Z]))"),
    "above": re.compile(r"\s*(?:>(?!=)|\\gt(?![a-zA-Z]))"),
}
ROUNDED = 0.05
"""Share by which the two sides of an equation may differ: 1/3 = 0.33 is how people round."""


def main() -> None:
    logging.disable(
        logging.CRITICAL
    )  # math-verify warns about the missing time limit; the other side keeps it
    replies, sys.stdout = (
        sys.stdout,
        sys.stderr,
    )  # a library's print must not end up between the replies
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(judge(question) if question else {}), file=replies, flush=True)


def judge(question: dict[str, str]) -> dict[str, bool]:
    """math-verify catches what its parser and sympy raise and returns no expressions, or unequal."""
    gold = parse(question["answer"], parsing_timeout=None)
    given = parse(question["response"], parsing_timeout=None)
    equal = bool(gold) and verify(gold, given, timeout_seconds=None)
    return {
        "readable": bool(gold),
        "equal": equal and relation(given) == relation(gold) and not contradicts(given),
    }


def relation(found: list[Any]) -> str:
    """The relation other than = that the text begins with. math-verify reads \\ne 5 and > 5 as 5."""
    text = next((each for each in found if isinstance(each, str)), "")
    return next((name for name, pattern in RELATIONS.items() if pattern.match(text)), "")


def contradicts(found: list[Any]) -> bool:
    """Whether it is an equation, or has one in a chain, of two numbers that are far apart. Of 4 = 5 math-verify
    compares the 5 alone."""
    links = [
        link
        for each in found
        if isinstance(each, Basic)
        for link in each.atoms(Eq)
        if not link.free_symbols
    ]
    return any(_far_apart(link) for link in links)


def _far_apart(link: Eq) -> bool:
    try:
        left, right = complex(link.lhs), complex(link.rhs)
    except (
        TypeError,
        ValueError,
        ArithmeticError,
        AttributeError,
        RecursionError,
    ):  # sets, intervals, too large
        return False
    return abs(left - right) > ROUNDED * max(abs(left), abs(right))


if __name__ == "__main__":
    main()
