"""benchmarks/house.py counts own imports inside functions, of which there are few, and more.

tests/integration/test_lazy_imports.py counts the files that a step runs.
"""

import house

MOST_INSIDE = 36
CODE = """
from typing import TYPE_CHECKING
import onepolicy.types
from onepolicy.run import step
if TYPE_CHECKING:
    from onepolicy.run.loop import TrainingLoop
def option():
    import torch
    from onepolicy.run.resume import resume_run
class Lazy:
    def method(self):
        def inner():
            import onepolicy.run.recovery
"""


def test_few_own_imports_are_inside_functions():
    assert house.imports_inside_functions(house.modules()) <= MOST_INSIDE


def test_which_imports_are_inside_functions(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(CODE)
    assert house.imports_inside_functions({"module": path}) == 2
    eager = {"onepolicy.types", "onepolicy.run.step"}
    lazy = {f"onepolicy.run.{name}" for name in ("loop", "resume", "recovery")}
    assert house.imported(path, house.modules(), lazy=False) == eager
    assert house.imported(path, house.modules(), lazy=True) == eager | lazy


def test_what_counts_as_a_line_of_code():
    """No docstring, comment or blank line."""
    text = '"""A."""\n\n# b\nx = 1  # c\n\n\ndef f():\n    """D\n    E."""\n    return x\n'
    assert house.code_lines(text) == 3


def test_files_that_one_file_imports(tmp_path):
    """`a` and `b` import `c`, and `a` alone imports `d` and the package `e`."""
    graph = {"a": {"c", "d", "e"}, "b": {"c"}, "c": set(), "d": set(), "e": set()}
    known = {name: tmp_path / f"{name}.py" for name in "abcd"} | {"e": tmp_path / "__init__.py"}
    assert house.one_importer(graph, known) == ["d"]
