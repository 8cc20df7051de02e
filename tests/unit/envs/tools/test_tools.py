"""The tools of an episode: exact answers, errors as text. The Python tool's tests are in
test_sandbox.py."""

from __future__ import annotations

import ast
import asyncio
import json
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onepolicy.config import CalculatorTool, SearchTool, UsageError
from onepolicy.envs.tools import Calculator, Search, build_tools, function_schema
from onepolicy.envs.tools.calculator import calculate


# --- calculator -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("813 * 92", "74796"),
        ("2 ** 10 - 24", "1000"),
        ("1 / 8", "0.125"),
        ("-1 / 8", "-0.125"),
        ("1 / 3", "1/3"),
        ("0.1 + 0.2", "0.3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("gcd(84, 36) + lcm(4, 6)", "24"),
        ("max(3, min(9, 5))", "5"),
        ("abs(-3.50)", "3.5"),
        ("2 ** -2", "0.25"),
    ],
)
def test_values(text, value):
    assert calculate(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "1 / 0",
        "0 ** -1",
        "9 ** 9 ** 9",
        "2 ** 100000",
        "10 ** 1000 * 10 ** 1000",
        "gcd(1/2, 3)",
        "abs(1, 2)",
        "__import__('os').system('id')",
        "(lambda: 1)()",
        "[1] * 10 ** 9",
        "'a' * 3",
        "True + 1",
        "x",
        "1 if 2 else 3",
        "1e999",
        "1 +",
        "",
        "(" * 300,
        "1" * 401,
        "\0",
        "2 ** 0.5",
    ],
)
def test_a_refusal_of_the_tool_is_an_answer(text):
    assert calculate(text).startswith("error: ")


def test_reading_an_expression_prints_no_warnings(recwarn):
    assert calculate("12or 3").startswith("error: ")
    assert not recwarn.list


def test_operations_can_be_rationed():
    assert calculate("1 + 2", operations=1) == "3"
    assert calculate("-1 + +2", operations=1) == "1"
    assert calculate("1 + 2 + 3", operations=1) == "error: 2 operations; at most 1 at a time"
    assert calculate("gcd(1 + 2, 3)", operations=1).startswith("error: 2")


@given(st.text("0123456789+-*/%() .", max_size=24))
@settings(max_examples=300, deadline=None)
def test_agrees_with_python_on_whole_numbers(text):
    """The calculator finds the same integers as Python (in fractions, so that / is exact)."""

    class Exact(ast.NodeTransformer):
        def visit_Constant(self, node):
            return ast.parse(f"Fraction({ast.unparse(node)!r})", mode="eval").body

    try:
        tree = ast.fix_missing_locations(Exact().visit(ast.parse(text.strip(), mode="eval")))
        if sum(isinstance(n, ast.Pow) for n in ast.walk(tree)):
            return
        expected = eval(compile(tree, "", "eval"), {"Fraction": Fraction})
    except (SyntaxError, ValueError, ZeroDivisionError, TypeError):
        assert calculate(text).startswith("error: ")
        return
    if isinstance(expected, Fraction | int) and Fraction(expected).denominator == 1:
        assert calculate(text) == str(Fraction(expected).numerator)


def call(tool, text):
    return asyncio.run(tool.call(text))


# --- search ---------------------------------------------------------------------------------------
@pytest.fixture
def corpus(tmp_path):
    passages = [
        "The heron eats fish.",
        "A mountain of granite.",
        "Fish swim in rivers; the heron waits.",
    ]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in passages))
    return path


def test_search_ranks_by_bm25(corpus):
    tool = Search(SearchTool(corpus=str(corpus), passages=2))
    assert call(tool, "granite") == "[1] A mountain of granite."
    assert call(tool, "heron").splitlines() == [
        "[1] The heron eats fish.",
        "[2] Fish swim in rivers; the heron waits.",
    ]
    assert call(tool, "rivers heron").splitlines()[0] == "[1] Fish swim in rivers; the heron waits."
    for nothing in ("zeppelin", "", "?!"):
        assert call(tool, nothing) == "nothing found"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"txt": "b"}\n', r"corpus.jsonl:2: expected .*txt"),
        ("oops\n", r"corpus.jsonl:1: expected"),
        ('{"text": " "}\n', r"corpus.jsonl:1: expected"),
        ("", r"is empty"),
        ("[" * 5000, r"corpus.jsonl:1: expected"),
        ('{"text": ' + "1" * 5000 + "}", r"corpus.jsonl:1: expected"),
        ('{"text": "\\ud800"}', r"corpus.jsonl:1: expected"),
        ('{"text": "?!"}\n', r"corpus.jsonl: no passage has a word"),
    ],
)
def test_bad_corpus(tmp_path, content, message):
    path = tmp_path / "corpus.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        Search(SearchTool(corpus=str(path)))
    with pytest.raises(UsageError, match="cannot read its corpus"):
        Search(SearchTool(corpus=str(tmp_path / "none.jsonl")))


def test_a_passage_may_contain_any_unicode_line_separator(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text(
        json.dumps({"text": "one\u2028two\x85three"}, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    assert call(Search(SearchTool(corpus=str(path))), "two") == "[1] one\u2028two\x85three"


def test_tools_by_name():
    tools = build_tools([CalculatorTool(operations=1)])
    assert list(tools) == ["calculator"]
    assert isinstance(tools["calculator"], Calculator)
    assert function_schema(tools["calculator"])["function"]["parameters"]["required"] == [
        "expression"
    ]
