"""The table of docs/trainers.md is written from the tests that show each capability."""

from __future__ import annotations

from support.capabilities import PAGE, TRAINERS, marks, page
from support.paths import ROOT


def test_the_table_is_current():
    command = "PYTHONPATH=tests python -m support.capabilities"
    assert PAGE.read_text(encoding="utf-8") == page(), f"write it anew: {command}"


def test_every_trainer_of_the_table_has_a_page():
    for trainer in {trainer for trainer, _, _ in marks()}:
        assert (ROOT / "docs" / TRAINERS[trainer].partition("#")[0]).is_file()
