"""benchmarks/sample_checks.py counts what it says that it counts."""

import argparse

import pytest
import sample_checks
from sample_checks import FORMS, LAYERS, WRONG, Trainer, clean, planted


@pytest.mark.full
def test_planted_rows_stop_their_forward_and_small_ones_may_not(monkeypatch):
    draw = sample_checks.Batch.draw
    monkeypatch.setattr(sample_checks.Batch, "draw", lambda samples, *more: draw(4, *more))
    args = argparse.Namespace(sizes=[0.5, 0.01], runs=5)
    head, half, one_row = planted(args)
    assert head == ["rows that are wrong", *WRONG, "clean forwards stopped"]
    assert half == ["50%", *["1 of 1"] * len(WRONG), "0"]
    assert one_row == ["1%", *["0 of 1"] * len(WRONG), "0"]


def test_every_form_carries_the_same_routes():
    trainer = Trainer("bf16", 16, 4, seed=1)
    batch = sample_checks.Batch.draw(2, sample_checks.torch.Generator().manual_seed(0))
    payloads = trainer.captured(batch)
    first, *others = [trainer.traces(payloads, form) for form in FORMS]
    assert all(other == first for other in others)
    assert first[0].ids.shape == (batch.lengths[0], LAYERS, 4)


@pytest.mark.full
def test_clean_counts_a_forward_that_stops(monkeypatch):
    kinds = [("bf16", 16, 4), ("pressure", 16, 4)]
    monkeypatch.setattr(sample_checks, "CLEAN", {kind[0]: kind for kind in kinds})
    args = argparse.Namespace(forwards=2, samples=2, seed=0)
    assert [row[1:] for row in clean(args)][1:] == [["1", "2", "0"]] * 2
    monkeypatch.setattr(Trainer, "replay", lambda *_: "stopped")
    assert [row[1:] for row in clean(args)][1:] == [["1", "2", "1"]] * 2
