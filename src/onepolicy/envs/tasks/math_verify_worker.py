"""Worker process of math_grader.MathGrader: reads questions and writes replies, one JSON line each.

It imports only math-verify, and sympy, which math-verify imports.
"""

from __future__ import annotations

import json
import logging
import re
import resource
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
MAX_RELATIVE_ERROR = 0.05
"""Relative difference that the two sides of an equation may have, as in 1/3 = 0.33."""
MEMORY_BYTES = 2**29
"""Address space beyond that of the imports. Ordinary responses take 4 MiB."""


def main() -> None:
    limit_memory()
    # math-verify warns that it has no time limit; the grader's process has one.
    logging.disable(logging.CRITICAL)
    # A library's print must not end up between the replies.
    replies, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        question = json.loads(line)
        reply: dict[str, bool] = {}
        if question:
            try:
                reply = compare_answers(question)
            except MemoryError:  # where math-verify does not catch it
                reply = {"readable": False, "equal": False}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def limit_memory() -> None:
    """Let a response that needs more than MEMORY_BYTES fail. On other systems than Linux not."""
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))


def compare_answers(question: dict[str, str]) -> dict[str, bool]:
    """Return whether the answer is readable and whether the response equals it.

    math-verify catches the errors of its parser and of sympy. It then finds no expression, or
    returns unequal.
    """
    gold = parse(question["answer"], parsing_timeout=None)
    given = parse(question["response"], parsing_timeout=None)
    equal = bool(gold) and verify(gold, given, timeout_seconds=None)
    return {
        "readable": bool(gold),
        "equal": equal
        and leading_relation(given) == leading_relation(gold)
        and not has_false_equation(given),
    }


def leading_relation(found: list[Any]) -> str:
    r"""Return the relation other than = that the text begins with, or an empty string.

    math-verify reads \ne 5 and > 5 as 5.
    """
    text = next((each for each in found if isinstance(each, str)), "")
    return next((name for name, pattern in RELATIONS.items() if pattern.match(text)), "")


def has_false_equation(found: list[Any]) -> bool:
    """Return whether any equation in the expressions is between two numbers that are far apart.

    Of 4 = 5 math-verify compares the 5 alone.
    """
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
    # sets, intervals and numbers that are too large
    except (TypeError, ValueError, ArithmeticError, AttributeError, RecursionError):
        return False
    return abs(left - right) > MAX_RELATIVE_ERROR * max(abs(left), abs(right))


if __name__ == "__main__":
    main()
