"""The tools of an episode: exact answers, errors as text. The Python tool's tests are in
test_sandbox.py."""

import ast
import asyncio
import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepolicy.config import CalculatorTool, SearchTool, UsageError
from onepolicy.envs.tools import Calculator, Search, build_tools, function_schema
from onepolicy.envs.tools.calculator import calculate
from support.examples import examples

# --- calculator -----------------------------------------------------------------------------------
VALUES = {
    "813 * 92": "74796",
    "2 ** 10 - 24": "1000",
    "1 / 8": "0.125",
    "-1 / 8": "-0.125",
    "1 / 3": "1/3",
    "0.1 + 0.2": "0.3",
    "-7 // 2": "-4",
    "-7 % 3": "2",
    "gcd(84, 36) + lcm(4, 6)": "24",
    "max(3, min(9, 5))": "5",
    "abs(-3.50)": "3.5",
    "2 ** -2": "0.25",
    "0.12345678901234567890123": "0.12345678901234567890123",
    " (10.00000000000000000001 - 1_0.) * 1E20": "1",
    "1e400 / 1e399": "10",
    "1e-400 * 1e400": "1",
}
REFUSED = """
1 / 0; 0 ** -1; 9 ** 9 ** 9; 2 ** 100000; 10 ** 1000 * 10 ** 1000; gcd(1/2, 3); abs(1, 2); x
__import__('os').system('id'); (lambda: 1)(); [1] * 10 ** 9; 'a' * 3; True + 1; 1 if 2 else 3
1e9999; 1e-9999; 1e99999999999; 1 +; 2 ** 0.5
"""


def test_values():
    assert {text: calculate(text) for text in VALUES} == VALUES


def test_a_refusal_of_the_tool_is_an_answer(subtests):
    for text in (*REFUSED.strip().replace("\n", "; ").split("; "), "", "(" * 300, "1" * 401, "\0"):
        with subtests.test(text=text):
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
@examples(300)
def test_agrees_with_python_on_whole_numbers(text):
    """The calculator finds the same integers as Python (in fractions, so that / is exact)."""

    class Exact(ast.NodeTransformer):
        def visit_Constant(self, node):
            return ast.parse(f"Fraction({ast.unparse(node)!r})", mode="eval").body

    try:
        tree = ast.fix_missing_locations(Exact().visit(ast.parse(text.strip(), mode="eval")))
        if any(isinstance(n, ast.Pow) for n in ast.walk(tree)):
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
def searched(path, content, **settings):
    path.write_text(content, encoding="utf-8")
    return Search(SearchTool(corpus=str(path), **settings))


def test_search_ranks_by_bm25(tmp_path):
    heron, mountain = "The heron eats fish.", "A mountain of granite."
    fish = "Fish swim in rivers; the heron waits."
    lines = "".join(json.dumps({"text": text}) + "\n" for text in (heron, mountain, fish))
    tool = searched(tmp_path / "corpus.jsonl", lines, passages=2)
    assert call(tool, "granite") == f"[1] {mountain}"
    assert call(tool, "heron").splitlines() == [f"[1] {heron}", f"[2] {fish}"]
    assert call(tool, "rivers heron").splitlines()[0] == f"[1] {fish}"
    for nothing in ("zeppelin", "", "?!"):
        assert call(tool, nothing) == "nothing found"


def test_bad_corpus(tmp_path, subtests):
    for content, message in (
        ('{"text": "a"}\n{"txt": "b"}\n', r"corpus.jsonl:2: expected .*txt"),
        ("oops\n", r"corpus.jsonl:1: expected"),
        ('{"text": " "}\n', r"corpus.jsonl:1: expected"),
        ("", r"is empty"),
        ("[" * 5000, r"corpus.jsonl:1: expected"),
        ('{"text": ' + "1" * 5000 + "}", r"corpus.jsonl:1: expected"),
        ('{"text": "\\ud800"}', r"corpus.jsonl:1: expected"),
        ('{"text": "?!"}\n', r"corpus.jsonl: no passage has a word"),
    ):
        with subtests.test(content=content[:40]), pytest.raises(UsageError, match=message):
            searched(tmp_path / "corpus.jsonl", content)
    with pytest.raises(UsageError, match="cannot read its corpus"):
        Search(SearchTool(corpus=str(tmp_path / "none.jsonl")))


def test_a_passage_may_contain_any_unicode_line_separator(tmp_path):
    text = "one\u2028two\x85three"
    line = json.dumps({"text": text}, ensure_ascii=False) + "\n"
    assert call(searched(tmp_path / "corpus.jsonl", line), "two") == f"[1] {text}"


def test_tools_by_name():
    tools = build_tools([CalculatorTool(operations=1)])
    assert list(tools) == ["calculator"]
    assert isinstance(tools["calculator"], Calculator)
    schema = function_schema(tools["calculator"])["function"]
    assert schema["parameters"]["required"] == ["expression"]
