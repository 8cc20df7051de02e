"""The pictures of docs/healthy.md are those of the runs in the tree."""

import healthy
import pytest

from support.paths import ROOT


def test_every_run_is_of_its_arm_and_has_every_step():
    runs = healthy.finished_runs()
    assert list(runs) == list(healthy.ARMS)
    for name, run in runs.items():
        assert run["settings"] == [*healthy.COMMON, *healthy.ARMS[name].settings]
        assert run["status"] == 0
        assert {len(curve) for curve in run["curves"].values()} == {120}


@pytest.mark.parametrize("name", [name for name in healthy.ARMS if name != "healthy"])
def test_a_picture_is_that_of_its_run(name):
    drawn = healthy.drawn(name, healthy.finished_runs())
    assert healthy.figure_of(name).read_text(encoding="utf-8") == drawn
    assert f"figures/sick_{name}.svg" in (ROOT / "docs" / "healthy.md").read_text()
