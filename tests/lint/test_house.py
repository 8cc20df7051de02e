"""benchmarks/house.py counts own imports inside functions, and there are few.

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
