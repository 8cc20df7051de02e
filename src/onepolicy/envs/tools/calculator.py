"""Exact arithmetic on an expression. It parses and never evaluates Python; sizes are bounded before computing."""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Callable
from fractions import Fraction

from onepolicy.config import CalculatorTool

LONGEST = 400  # characters of an expression
MAX_BITS = 4096  # of a numerator or denominator, about 1,200 digits
Value = Fraction

FUNCTIONS: dict[str, Callable[..., Value]] = {
    "abs": lambda x: abs(x),
    "max": lambda *xs: max(xs),
    "min": lambda *xs: min(xs),
    "gcd": lambda *xs: Fraction(math.gcd(*map(_whole, xs))),
    "lcm": lambda *xs: Fraction(math.lcm(*map(_whole, xs))),
}


class Calculator:
    name, argument = "calculator", "expression"

    def __init__(self, config: CalculatorTool) -> None:
        self.operations = config.operations
        one = (
            "" if self.operations is None else f", at most {self.operations} operation(s) at a time"
        )
        self.description = (
            f"Exact arithmetic: + - * / // % **, parentheses, abs, max, min, gcd, lcm{one}."
        )

    async def call(self, text: str) -> str:
        return calculate(text, operations=self.operations)

    def sources(self) -> tuple[str, ...]:
        return ()


def calculate(text: str, *, operations: int | None = None) -> str:
    """The value of an expression as an integer, a decimal that ends, or a fraction; else `error: ` and why."""
    try:
        if len(text) > LONGEST:
            raise _Refused(f"longer than {LONGEST} characters")
        with warnings.catch_warnings():  # of digits before a word: the policy's slip, nobody's news
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(text.strip(), mode="eval")
        used = sum(isinstance(node, ast.BinOp | ast.Call) for node in ast.walk(tree))
        if operations is not None and used > operations:
            raise _Refused(f"{used} operations; at most {operations} at a time")
        return _shown(_value(tree.body))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return "error: not an expression"
    except ZeroDivisionError:
        return "error: division by zero"
    except _Refused as error:
        return f"error: {error}"


class _Refused(Exception):
    pass


def _value(node: ast.expr) -> Value:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return _small(Fraction(number))
        case ast.Constant(value=float() as number):
            return _small(
                Fraction(ast.unparse(node))
                if math.isfinite(number)
                else _refuse("not a finite number")
            )
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=operator, right=right):
            return _small(_apply(operator, _value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as arguments, keywords=[]) if (
            name in FUNCTIONS
        ):
            if name == "abs" and len(arguments) != 1:
                raise _Refused("abs takes one number")
            return _small(FUNCTIONS[name](*map(_value, arguments)))
    raise _Refused("only numbers, + - * / // % **, parentheses and " + ", ".join(FUNCTIONS))


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
            return _power(left, _whole(right))
    raise _Refused("only + - * / // % **")


def _power(base: Value, exponent: int) -> Value:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits > 1 and abs(exponent) * (bits - 1) > MAX_BITS:
        raise _Refused("too large")
    return Fraction(1) if exponent == 0 else base**exponent


def _whole(value: Value) -> int:
    if value.denominator != 1:
        raise _Refused(f"{_shown(value)} is not a whole number")
    return value.numerator


def _small(value: Value) -> Value:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise _Refused("too large")
    return value


def _refuse(why: str) -> Value:
    raise _Refused(why)


def _shown(value: Value) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    rest, twos, fives = value.denominator, 0, 0
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    places = max(twos, fives)
    if rest != 1 or places > 30:
        return f"{value.numerator}/{value.denominator}"
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
