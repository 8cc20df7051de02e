"""examples/megatron_replay.py as a reader runs it, on a CPU."""

from __future__ import annotations

import runpy

import pytest

from support.paths import ROOT

pytestmark = pytest.mark.megatron


@pytest.mark.smoke
def test_replay_lowers_k3(capsys):
    runpy.run_path(str(ROOT / "examples" / "megatron_replay.py"), run_name="__main__")
    without, replayed, routers = capsys.readouterr().out.splitlines()[-3:]
    assert without.startswith("without replay")
    assert float(replayed.split()[3]) < float(without.split()[3]) / 2
    assert 0 < float(routers.split()[-1].rstrip("%")) < 10
