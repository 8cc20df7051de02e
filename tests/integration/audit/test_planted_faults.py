"""Verdicts of clean and of faulty dumps: a clean one keeps its recommendation, a fault never gets
one."""

from __future__ import annotations

import re

import pytest
import torch

from onepolicy.verdict.declared import Declared
from support.audit_faults import (
    FAULTS,
    GAPS,
    MOE,
    ROUNDINGS,
    ROWS,
    SMALL,
    blind,
    clean,
    growing,
    logp,
    outcome,
    outcomes,
    routed,
    stale,
    swapped,
    table,
    uneven,
    world,
)
from support.paths import ROOT

SEEDS = range(20)
LIST = ROOT / "docs" / "data" / "planted_faults.txt"
RECOMMENDED = ("nothing", "correct", "replay")
OTHER_GAPS = {  # noise of every logit, share of tokens whose experts differ, noise of their logits
    "even": (0.15, 0.0, 0.0),
    "large": (0.4, 0.0, 0.0),
    "heavy tail": (0.03, 0.02, 2.0),
}


def judged(found):
    return found.verdict.action, found.verdict.setting


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_clean_dumps_keep_their_verdict(seed) -> None:
    assert judged(clean(seed, SMALL)) == ("nothing", "")
    assert judged(clean(seed, MOE)) == ("correct", "correction.preset=tis")
    replayed = clean(seed, MOE, routes=True).verdict
    assert (replayed.action, replayed.setting) == ("replay", "replay.mode=r3")
    assert "where a route differs" in replayed.text()


@pytest.mark.parametrize("seed", [0, 1])
def test_routes_that_differ_beside_the_gap_are_not_replayed(seed) -> None:
    """Noise grows along the answer, and 15% of the tokens have another expert, near or far."""
    w = world(seed)
    growing(w, 0.8)
    routed(w, torch.rand(w.place.shape, generator=w.generator) < 0.15)
    said = w.audited(Declared("4bit")).verdict
    assert said.action == "correct", said.text()
    assert said.setting.startswith("correction.preset="), said.text()
    assert "the gap is as large where they agree" in said.sentence
    assert "where a route differs" in said.text()


@pytest.mark.slow
@pytest.mark.parametrize(("gap", "wanted"), [(SMALL, "nothing"), (MOE, "correct")])
@pytest.mark.parametrize(
    "settings", [{}, {"rows": 24}, {"rows": 64, "longest": 300}, {"version": False}]
)
def test_nineteen_of_twenty_clean_dumps_keep_their_verdict(gap, wanted, settings) -> None:
    found = [clean(seed, gap, **settings).verdict for seed in SEEDS]
    assert sum(each.action == wanted for each in found) >= 19, [each.text() for each in found]
    if wanted == "correct":
        assert all(each.setting in ("correction.preset=tis", "") for each in found)


@pytest.mark.parametrize("gap", OTHER_GAPS)
@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_clean_gaps_of_other_kinds_are_corrected(gap, seed, monkeypatch) -> None:
    monkeypatch.setitem(GAPS, gap, OTHER_GAPS[gap])
    said = clean(seed, gap).verdict
    assert said.action == "correct", said.text()


@pytest.mark.parametrize("gap", [SMALL, MOE])
def test_a_coarse_grid_is_noted_and_is_no_bug(gap, subtests) -> None:
    for name, rounding in ROUNDINGS.items():
        w = world(3, gap)
        rounding(w)
        found = w.audited()
        with subtests.test(name):
            expected = {SMALL: "nothing", MOE: "correct"}[gap]
            assert found.verdict.action == expected, found.verdict.text()
            assert [note for note in found.notes if f"rounded to {name}" in note]


@pytest.mark.few(48)
@pytest.mark.parametrize("rows", [ROWS // 2, pytest.param(ROWS, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_never_recommended_upon(name, rows) -> None:
    """In half of the rows every second fault is beside the small gap, the others the large one."""
    worlds = list(enumerate((SMALL, MOE)))
    if rows < ROWS:
        worlds = [worlds[list(FAULTS).index(name) % 2]]
    for seed, gap in worlds:
        action, causes, text = outcome(name, seed, gap, rows)
        assert action not in RECOMMENDED, text
        wanted = FAULTS[name].causes
        assert not wanted or set(wanted) & set(causes), text


@pytest.mark.parametrize(("seed", "gap"), [(7, MOE), (19, SMALL), (26, MOE)])
@pytest.mark.parametrize("side", ["logp_trainer", "logp_rollout"])
def test_two_exchanged_rows_explain_each_other(seed, gap, side) -> None:
    """The rows have unequal length. Most of the longer row is its own, so only the shorter one
    looks strange."""
    w = world(seed, gap)
    swapped(0.0, side)(w)
    said = w.audited().verdict
    assert said.causes == ("rows",), said.text()
    assert "hold the values of another row" in said.text()


@pytest.mark.full
@pytest.mark.parametrize("gap", [SMALL, MOE, *OTHER_GAPS])
@pytest.mark.parametrize(
    "settings", [{"rows": 24}, {"rows": 64, "longest": 300}, {"rows": 300, "longest": 60}]
)
def test_two_exchanged_rows_are_named_in_other_worlds(gap, settings, monkeypatch) -> None:
    if gap in OTHER_GAPS:
        monkeypatch.setitem(GAPS, gap, OTHER_GAPS[gap])
    w = world(0, gap, **settings)
    swapped(0.0)(w)
    said = w.audited().verdict
    assert said.causes == ("rows",), said.text()


def _holds_a_row_of_another_dump(seed, gap, row, **settings):
    """Return a world in which one row has the engine's values of a row of another dump."""
    w, other = world(seed, gap, **settings), world(seed + 1000, gap, **settings)
    here = (w.segment == row) & w.sampled
    w.columns["logp_rollout"][here] = other.columns["logp_rollout"][other.sampled][
        : int(here.sum())
    ]
    return w


@pytest.mark.full
@pytest.mark.parametrize("gap", [SMALL, MOE])
@pytest.mark.parametrize("seed", range(3))
def test_one_unrelated_row_forbids_a_recommendation(seed, gap) -> None:
    """No row explains it, and it is too small a part of the dump to be one of two kinds."""
    said = _holds_a_row_of_another_dump(seed, gap, 5, rows=300, longest=60).audited().verdict
    assert said.action == "unclear", said.text()
    assert "in 1 of 300 rows the two sides do not follow each other" in said.text()


@pytest.mark.parametrize("gap", [SMALL, MOE])
def test_rows_of_other_weights_among_uneven_rows_are_named(gap) -> None:
    """Ranks of the logits saturate, so 5 rows of 96 do not stand out by them where others are
    uneven."""
    w = world(1, gap)
    uneven()(w)
    assert w.audited().verdict.action == {SMALL: "nothing", MOE: "correct"}[gap]
    engine = w.engine.clone()
    blind(5)(w)
    now = w.columns["logp_rollout"] != logp(engine, w.tokens)
    planted = [str(row) for row in w.segment[now].unique().tolist()]
    said = w.audited().verdict
    assert (said.action, said.setting) == ("unclear", ""), said.text()
    assert f"rows {', '.join(planted[:-1])} and {planted[-1]}, at least 5 times" in said.text()


@pytest.mark.parametrize("seed", [0, 2])
def test_rows_of_other_weights_are_counted_and_listed(seed) -> None:
    """20 of 96 rows, among rows that differ in noise: by ranks some more look far."""
    w = world(seed, version=False)
    uneven()(w)
    before = w.engine
    stale(20 / 96, 1.0, version=False)(w)
    moved = (w.columns["logp_rollout"] - logp(before, w.tokens)).abs() > 0.01
    planted = w.segment[moved].unique().tolist()
    assert len(planted) == 20
    said = w.audited().verdict
    assert said.causes == ("stale",), said.text()
    assert "about 20 of 96 rows are" in said.text()
    assert f"(rows {', '.join(map(str, planted[:8]))} and 12 others)" in said.text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_list_of_faults_is_that_of_the_docs() -> None:
    """The list has 20 seeds of each fault; `python tests/support/audit_faults.py` prints it."""
    found = outcomes(SEEDS)
    for name, said in found.items():
        assert not [text for action, _, text in said if action in RECOMMENDED], name
        wanted = set(FAULTS[name].causes)
        right = sum(bool(wanted & set(causes)) for _, causes, _ in said)
        assert not wanted or right >= 0.9 * len(said), (name, right)
    assert table(found) in LIST.read_text(encoding="utf-8")


def test_the_docs_name_every_fault() -> None:
    rows = re.findall(
        r"^- \*\*.*?\*\*(?: \(.*?\))?: (.*)$", LIST.read_text(encoding="utf-8"), re.MULTILINE
    )
    named = {name for row in rows for name in row.split("; ")}
    assert not set(FAULTS) - named
