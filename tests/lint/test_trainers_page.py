"""The tables of docs/trainers.md and README are written from the tests of each capability."""

from __future__ import annotations

from support.capabilities import PAGE, README, TRAINERS, marks, page, readme
from support.paths import ROOT


def test_the_table_is_current():
    command = "PYTHONPATH=tests python -m support.capabilities"
    for path, text in ((PAGE, page()), (README, readme())):
        assert path.read_text(encoding="utf-8") == text, f"write it anew: {command}"


def test_every_trainer_of_the_table_has_a_page():
    for trainer in {trainer for trainer, _, _ in marks()}:
        assert (ROOT / "docs" / TRAINERS[trainer].partition("#")[0]).is_file()
