"""A gate in front of graders that evaluate the response as Python or sympy source."""

from __future__ import annotations

import ast
import re

NAMES = frozenset(
    ("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "sqrt", "Abs", "pi")
)
LEAVES = (ast.Expression, ast.Constant, ast.Load, ast.operator, ast.unaryop)
LARGEST_EXPONENT = 64
HIGHEST_TOWER = 2
PLAIN = re.compile(r"[\w\s,.-]*")


def harmless(answer: str) -> bool:
    """True if evaluating `answer` could at most do quick arithmetic or build a list.

    No attributes, subscripts or names but one letter and elementary functions; no exponent above 64, no more than two
    powers inside each other, no factorials (sympy reads `!` as one), no arithmetic on lists or strings.
    """
    if "!" in answer:
        return False
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return PLAIN.fullmatch(answer) is not None  # words and numbers: evaluating them only fails
    nodes = list(ast.walk(tree))
    arithmetic = any(isinstance(node, ast.BinOp) for node in nodes)
    return _tower(tree) <= HIGHEST_TOWER and all(_allowed(node, arithmetic) for node in nodes)


def _allowed(node: ast.AST, arithmetic: bool) -> bool:
    match node:
        case ast.Name(id=name):
            return len(name) == 1 or name in NAMES
        case ast.Call(func=ast.Name(id=name), keywords=[]):
            return name in NAMES
        case ast.BinOp(op=ast.Pow(), right=exponent):
            return _small(exponent)
        case ast.BinOp(op=op):
            return not isinstance(op, ast.LShift | ast.RShift | ast.MatMult)
        case ast.Constant(value=str() | bytes()) | ast.List() | ast.Tuple():
            return not arithmetic
    return isinstance(node, (*LEAVES, ast.UnaryOp))


def _small(exponent: ast.expr) -> bool:
    match exponent:
        case ast.Constant(value=int() | float() as value):
            return value <= LARGEST_EXPONENT
        case ast.UnaryOp(operand=operand):
            return _small(operand)
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Div(), left=left, right=right):
            return _small(left) and _small(right)
        case ast.Name():
            return True  # a symbol
    return False


def _tower(node: ast.AST) -> int:
    """Powers inside powers, counted along the deepest path."""
    below = max((_tower(child) for child in ast.iter_child_nodes(node)), default=0)
    return below + (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow))
