"""benchmarks/house.py counts the files that a run imports, and a plain run imports few."""

import house

MOST_FILES, MOST_LINES = 115, 15_600
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


def test_a_run_imports_few_files_as_it_is_loaded():
    known = house.modules()
    names = house.closure("onepolicy.run.train", house.eager_graph(known))
    assert len(names) <= MOST_FILES
    assert house.lines([known[name] for name in names]) <= MOST_LINES


def test_imports_of_an_option_do_not_count(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(CODE)
    eager = {"onepolicy.types", "onepolicy.run.step"}
    lazy = {f"onepolicy.run.{name}" for name in ("loop", "resume", "recovery")}
    assert house.imported(path, house.modules(), lazy=False) == eager
    assert house.imported(path, house.modules(), lazy=True) == eager | lazy


def test_a_module_comes_with_its_packages_and_what_it_imports():
    graph = {"a": {"d"}, "a.b": {"c"}, "c": set(), "d": set(), "a.other": set()}
    assert house.closure("a.b", graph) == {"a", "a.b", "c", "d"}
