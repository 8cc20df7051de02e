"""benchmarks/house.py counts imports, and few of them are hidden in functions."""

import house

MOST_LAZY = 200
CODE = """
from typing import TYPE_CHECKING
import onepolicy.types
from onepolicy.run import step
if TYPE_CHECKING:
    from onepolicy.run.loop import TrainingLoop
def option():
    from onepolicy.run.resume import resume_run
class Lazy:
    def method(self):
        import onepolicy.run.recovery
"""


def test_few_imports_are_hidden_in_functions():
    assert sum(house.lazy_imports(path) for path in house.modules().values()) <= MOST_LAZY


def test_imports_of_an_option_do_not_count(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(CODE)
    eager = {"onepolicy.types", "onepolicy.run.step"}
    lazy = {f"onepolicy.run.{name}" for name in ("loop", "resume", "recovery")}
    assert house.imported(path, house.modules(), lazy=False) == eager
    assert house.imported(path, house.modules(), lazy=True) == eager | lazy
    assert house.lazy_imports(path) == 2  # not the one for types


def test_a_module_comes_with_its_packages_and_what_it_imports():
    graph = {"a": {"d"}, "a.b": {"c"}, "c": set(), "d": set(), "a.other": set()}
    assert house.closure("a.b", graph) == {"a", "a.b", "c", "d"}
