"""Style of the sources, counted: room to breathe, docstrings that begin with a verb, plain words.

The limits are near the best of nano-vllm, mini-sglang, prime-rl and torchtitan. `PYTHONPATH=tests
python tests/lint/test_style.py [FOLDER]` prints them, so that two commits can be compared.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.sources import nodes_of, text_of

SOURCES = Path(__file__).parents[2] / "src"
NO_FIRST_WORD = {"what", "of", "whether", "which", "where", "how", "who", "whose", "why"}
VERBS = """
Abort Accept Accumulate Add Admit Append Apply Assign Attend Audit Await Broadcast Build Calibrate
Call Cancel Cast Change Check Clip Close Combine Compare Compute Concatenate Configure Connect
Continue Convert Copy Count Create Declare Decode Decorate Delete Describe Diagnose Discard Divide
Draw Drop Encode End Evaluate Extrapolate Fail Feed Fill Find Fit Fix Flatten Format Forward Give
Handle Import Initialise Join Keep Kill Listen Load Lock Lower Make Mark Measure Merge Move
Multiply Name Note Number Open Pack Parse Pass Pause Place Play Prefill Prepare Print Push Put
Quantise Raise Reach Read Rebuild Receive Recompute Record Refuse Release Remove Rename Renumber
Replace Replay Report Request Reserve Reset Restart Restore Return Round Run Sample Save Scale
Score Select Send Serve Set Shard Share Sort Split Start Step Stop Store Suggest Swap Switch Take
Tell Train Turn Update Use Wait Write Yield
"""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Source:
    """One file, parsed."""

    def __init__(self, path: Path):
        self.path = path
        self.lines = text_of(path).splitlines()
        self.nodes = nodes_of(path)

    def of_type(self, kind) -> list[ast.AST]:
        return [node for node in self.nodes if isinstance(node, kind)]

    def at(self, node: ast.AST) -> str:
        return f"{self.path}:{node.lineno}"


def read(folder: Path) -> list[Source]:
    return [Source(path) for path in sorted(folder.rglob("*.py"))]


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    return read(SOURCES)


def per_thousand_lines(sources: list[Source], kind) -> float:
    return 1000 * sum(len(s.of_type(kind)) for s in sources) / sum(len(s.lines) for s in sources)


def ternaries_in_calls(sources: list[Source]) -> list[str]:
    found = []
    for source in sources:
        for call in source.of_type(ast.Call):
            values = [*call.args, *(keyword.value for keyword in call.keywords)]
            found += [source.at(value) for value in values if isinstance(value, ast.IfExp)]
    return found


def function_lengths(sources: list[Source]) -> list[int]:
    """Return the lines of every function, sorted."""
    functions = (f for source in sources for f in source.of_type(Function))
    return sorted(f.end_lineno - f.lineno + 1 for f in functions)


def percentile(values: list[int], share: float) -> int:
    return values[int(share * len(values))]


def docstrings(sources: list[Source], kind) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield place, node and text of every docstring of nodes of this kind."""
    for source in sources:
        for node in source.of_type(kind):
            text = ast.get_docstring(node)
            if text:
                place = f"{source.path}:{getattr(node, 'lineno', 1)}"
                yield place, node, text


def first_word(text: str) -> str:
    return text.split()[0].strip(",.:;")


def is_property(function: Function) -> bool:
    """Return whether a docstring may be a noun phrase, as that of an attribute is."""
    names = {ast.unparse(decorator).split(".")[-1] for decorator in function.decorator_list}
    return bool(names & {"property", "cached_property", "setter"})


def without_verb(sources: list[Source], *, public: bool) -> tuple[list[str], int]:
    """Return functions whose docstring does not begin with a verb, and how many have one."""
    found, total, verbs = [], 0, set(VERBS.split())
    for place, function, text in docstrings(sources, Function):
        if is_property(function) or (public and function.name.startswith("_")):
            continue
        total += 1
        if first_word(text) not in verbs:
            found.append(f"{place} {first_word(text)}")
    return found, total


def what_per_thousand_words(sources: list[Source]) -> float:
    texts = [
        text for *_, text in docstrings(sources, (*Function.__args__, ast.ClassDef, ast.Module))
    ]
    words = sum(len(re.findall(r"[A-Za-z']+", text)) for text in texts)
    return 1000 * sum(len(re.findall(r"\bwhat\b", text, re.I)) for text in texts) / words


def test_expressions_have_room(sources):
    assert per_thousand_lines(sources, ast.IfExp) < 4.8  # torchtitan
    assert per_thousand_lines(sources, ast.NamedExpr) < 0.1  # torchtitan; nano-vllm has none
    assert ternaries_in_calls(sources) == []


def test_functions_and_files_are_short(sources):
    lengths = function_lengths(sources)
    assert percentile(lengths, 0.95) <= 31  # nano-vllm
    assert lengths[-1] <= 70
    assert {str(s.path): len(s.lines) for s in sources if len(s.lines) > 500} == {}


def test_docstrings_of_functions_begin_with_a_verb(sources):
    found, total = without_verb(sources, public=True)
    assert len(found) < 0.05 * total, found


def test_no_docstring_begins_with_a_relative_clause(sources):
    kinds = (*Function.__args__, ast.ClassDef, ast.Module)
    assert [
        place
        for place, _, text in docstrings(sources, kinds)
        if first_word(text).lower() in NO_FIRST_WORD
    ] == []


def test_docstrings_name_the_thing(sources):
    assert what_per_thousand_words(sources) < 1


def main(folder: str = str(SOURCES)) -> None:
    """Print all counts of a folder."""
    sources = read(Path(folder))
    lengths = function_lengths(sources)
    missing, total = without_verb(sources, public=True)
    share = 100 * (1 - len(missing) / max(1, total))
    print(f"files {len(sources)}, lines {sum(len(source.lines) for source in sources):,}")
    print(f"ternaries per 1,000 lines {per_thousand_lines(sources, ast.IfExp):.1f}")
    print(f"ternaries inside a call {len(ternaries_in_calls(sources))}")
    print(f"walrus per 1,000 lines {per_thousand_lines(sources, ast.NamedExpr):.2f}")
    print(f"public functions' docstrings that begin with a verb {share:.1f}% of {total}")
    print(f"'what' per 1,000 words of docstrings {what_per_thousand_words(sources):.1f}")
    print("function lines p50, p95, p99, max", end=" ")
    print(*(percentile(lengths, share) for share in (0.5, 0.95, 0.99)), lengths[-1])


if __name__ == "__main__":
    main(*sys.argv[1:])
