"""examples/trl_grpo.py as a reader runs it."""

from __future__ import annotations

import runpy

import pytest

from support.paths import ROOT

pytestmark = pytest.mark.trl


def test_replay_lowers_k3_at_every_step(capsys):
    runpy.run_path(str(ROOT / "examples" / "trl_grpo.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    (start,) = (i for i, line in enumerate(lines) if line.startswith("step  reward"))
    table = [line.split() for line in lines[start + 1 :]]
    assert [int(row[0]) for row in table] == list(range(1, 11))
    for _, _, without, replayed, _ in table:
        assert float(replayed) < float(without) / 2
