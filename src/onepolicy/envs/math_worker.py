"""The process grade.MathGrader talks to: a JSON line in, a JSON line out. Imports nothing but math-verify."""

from __future__ import annotations

import json
import logging
import sys

from math_verify import parse, verify


def main() -> None:
    logging.disable(logging.CRITICAL)  # math-verify warns about the missing time limit; the other side keeps it
    replies, sys.stdout = sys.stdout, sys.stderr  # a library's print must not end up between the replies
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(judge(question) if question else {}), file=replies, flush=True)


def judge(question: dict[str, str]) -> dict[str, bool]:
    """math-verify catches what its parser and sympy raise and returns no expressions, or unequal."""
    gold = parse(question["answer"], parsing_timeout=None)
    given = parse(question["response"], parsing_timeout=None)
    return {"readable": bool(gold), "equal": bool(gold) and verify(gold, given, timeout_seconds=None)}


if __name__ == "__main__":
    main()
