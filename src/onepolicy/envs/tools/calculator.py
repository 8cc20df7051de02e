"""Exact arithmetic on an expression.

The expression is parsed and never evaluated as Python. Sizes are bounded before a computation.
"""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Callable
from fractions import Fraction

from onepolicy.config import CalculatorTool

MAX_CHARACTERS = 400  # characters of an expression
MAX_BITS = 4096  # of a numerator or denominator: about 1,200 digits
Value = Fraction

FUNCTIONS: dict[str, Callable[..., Value]] = {
    "abs": lambda x: abs(x),
    "max": lambda *xs: max(xs),
    "min": lambda *xs: min(xs),
    "gcd": lambda *xs: Fraction(math.gcd(*map(_to_int, xs))),
    "lcm": lambda *xs: Fraction(math.lcm(*map(_to_int, xs))),
}


class Calculator:
    """The calculator tool."""

    name, argument = "calculator", "expression"

    def __init__(self, config: CalculatorTool) -> None:
        self.operations = config.operations
        limit = ""
        if self.operations is not None:
            limit = f", at most {self.operations} operation(s) at a time"
        self.description = (
            f"Exact arithmetic: + - * / // % **, parentheses, abs, max, min, gcd, lcm{limit}."
        )

    async def call(self, text: str) -> str:
        return calculate(text, operations=self.operations)

    def reply_texts(self) -> tuple[str, ...]:
        return ()


def calculate(text: str, *, operations: int | None = None) -> str:
    """Return the value of an expression as an integer, a finite decimal or a fraction.

    For a wrong expression, return `error: ` and the reason. operations: the largest number allowed.
    """
    try:
        if len(text) > MAX_CHARACTERS:
            raise _InvalidExpression(f"longer than {MAX_CHARACTERS} characters")
        with warnings.catch_warnings():  # Python warns about digits before a word
            warnings.simplefilter("ignore", SyntaxWarning)
            text = text.strip()
            tree = ast.parse(text, mode="eval")
        used = sum(isinstance(node, ast.BinOp | ast.Call) for node in ast.walk(tree))
        if operations is not None and used > operations:
            raise _InvalidExpression(f"{used} operations; at most {operations} at a time")
        return _format_value(_evaluate(tree.body, text))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return "error: not an expression"
    except ZeroDivisionError:
        return "error: division by zero"
    except _InvalidExpression as error:
        return f"error: {error}"


class _InvalidExpression(Exception):
    """The error of an expression that is not computed."""


def _evaluate(node: ast.expr, text: str) -> Value:
    """Return the value of a part of the expression `text`."""
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return _check_size(Fraction(number))
        case ast.Constant(value=float()):
            return _check_size(_decimal(ast.get_source_segment(text, node) or ""))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, text)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _evaluate(operand, text)
        case ast.BinOp(left=left, op=operator, right=right):
            return _check_size(_apply(operator, _evaluate(left, text), _evaluate(right, text)))
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as arguments, keywords=[]) if (
            name in FUNCTIONS
        ):
            if name == "abs" and len(arguments) != 1:
                raise _InvalidExpression("abs takes one number")
            return _check_size(FUNCTIONS[name](*(_evaluate(each, text) for each in arguments)))
    raise _InvalidExpression(
        "only numbers, + - * / // % **, parentheses and " + ", ".join(FUNCTIONS)
    )


def _decimal(written: str) -> Value:
    """Return the value of a decimal as it is written: Python's own float of it is rounded."""
    exponent = written.lower().partition("e")[2]
    if exponent and abs(int(exponent)) > MAX_BITS:
        raise _InvalidExpression("too large")
    return Fraction(written)


def _apply(operator: ast.operator, left: Value, right: Value) -> Value:
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
        case ast.FloorDiv():
            return Fraction(left // right)
        case ast.Mod():
            return left % right
        case ast.Pow():
            return _power(left, _to_int(right))
    raise _InvalidExpression("only + - * / // % **")


def _power(base: Value, exponent: int) -> Value:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits > 1 and abs(exponent) * (bits - 1) > MAX_BITS:
        raise _InvalidExpression("too large")
    if exponent == 0:
        return Fraction(1)
    return base**exponent


def _to_int(value: Value) -> int:
    if value.denominator != 1:
        raise _InvalidExpression(f"{_format_value(value)} is not a whole number")
    return value.numerator


def _check_size(value: Value) -> Value:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise _InvalidExpression("too large")
    return value


def _format_value(value: Value) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    remainder, twos, fives = value.denominator, 0, 0
    while remainder % 2 == 0:
        remainder, twos = remainder // 2, twos + 1
    while remainder % 5 == 0:
        remainder, fives = remainder // 5, fives + 1
    places = max(twos, fives)
    if remainder != 1 or places > 30:  # no finite decimal, or a long one
        return f"{value.numerator}/{value.denominator}"
    sign = ""
    if value < 0:
        sign = "-"
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    return f"{sign}{digits[:-places]}.{digits[-places:]}"
