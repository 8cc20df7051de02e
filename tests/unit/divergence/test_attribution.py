"""Waterfall and verdicts by hand, the bootstrap against theory, breakdowns."""

import dataclasses
import math
import re
from dataclasses import astuple
from types import SimpleNamespace

import pytest
import torch

from onepolicy.config import UsageError
from onepolicy.divergence.attribution import Level, bootstrap, distance, excess, k3_terms, waterfall
from onepolicy.divergence.breakdown import (
    CLASSES,
    Parts,
    echoed,
    inside_calls,
    places,
    token_class,
)
from onepolicy.divergence.logprob import mismatch
from onepolicy.notation import number
from onepolicy.verdict.bug_signatures import Diagnosis, Finding
from onepolicy.verdict.rules import ByRoutes, verdict
from onepolicy.verdict.scored_tokens import CAUSES
from support.stated_gap import StatedGap

CLEAN = Diagnosis(0.01, ())


def levels(logps, rollout, mask, segment):
    first, *rest = [Level.of("", "", logp, rollout, mask, segment) for logp in logps]
    return first, rest


def test_waterfall_by_hand():
    """log rho is ln 2 in one token of four. The second step removes it, the first nothing."""
    rollout = torch.tensor([-1.0, -1.0, -2.0, -2.0, 99.0])
    start = rollout + torch.tensor([math.log(2), 0.0, 0.0, 0.0, 0.0])
    mask = torch.tensor([True, True, True, True, False])
    segment = torch.tensor([0, 0, 1, 1, 1])
    found = waterfall(*levels([start, start.clone(), rollout.clone()], rollout, mask, segment))
    k3 = (1 - math.log(2)) / 4
    assert found.total.value == pytest.approx(k3, rel=1e-6)
    assert [bar.removed.value for bar in found.bars] == pytest.approx([0.0, k3], rel=1e-6)
    assert found.bars[-1].left.value == 0
    assert math.isnan(found.total.low)  # two sequences
    assert math.isnan(found.total.high)
    assert not found.total.excludes(0)


def test_intervals_begin_with_six_sequences():
    """One of n sequences has the whole gap, so a draw has k of n times it, k binomial: of six the
    tails of a wider t, 0.24%, are 0 (p = 0.33) and 4 of 6; a bar that changes nothing has 0."""
    for count, high in ((5, None), (6, 4.0)):
        start = torch.zeros(count)
        start[0] = math.log(2)
        rollout, mask, segment = torch.zeros(count), torch.ones(count).bool(), torch.arange(count)
        found = waterfall(*levels([start, start.clone()], rollout, mask, segment))
        alone = distance(start, rollout, mask, segment)
        assert alone.value == found.total.value == pytest.approx((1 - math.log(2)) / count)
        if high is None:
            assert (math.isnan(found.total.low), math.isnan(alone.high)) == (True, True)
            continue
        assert (found.total.low, found.total.high) == pytest.approx((0, high * alone.value))
        assert (alone.low, alone.high) == (found.total.low, found.total.high)
        assert (found.bars[0].removed.low, found.bars[0].removed.high) == (0, 0)  # paired


@pytest.mark.full
def test_intervals_of_few_sequences_hold_the_truth_19_times_in_20():
    for count in (6, 12):
        random, held, runs = torch.Generator().manual_seed(count), 0, 400
        for _ in range(runs):
            a, b = torch.randn(2, count, generator=random).double().div(10).unbind()
            found = excess(a, b, torch.zeros(count), torch.ones(count).bool(), torch.arange(count))
            held += not found.excludes(0)
        assert 0.91 <= held / runs <= 0.99, (count, held / runs)


def test_bars_and_remainder_add_up_to_the_k3_of_mismatch():
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(300, generator=generator) - 1
    first, second = (rollout + s * torch.randn(300, generator=generator) for s in (0.2, 0.1))
    mask = torch.rand(300, generator=generator) > 0.3
    segment = torch.arange(300) // 20
    found = waterfall(*levels([first, second], rollout, mask, segment))
    assert found.total.value == pytest.approx(mismatch(first, rollout, mask).k3)
    (bar,) = found.bars
    assert found.total.value == pytest.approx(bar.removed.value + bar.left.value)
    assert found.total.low < found.total.value < found.total.high
    alone = excess(first, second, rollout, mask, segment)
    assert astuple(alone) == pytest.approx(astuple(found.bars[0].removed))
    assert astuple(distance(first, rollout, mask, segment)) == pytest.approx(astuple(found.total))


def test_bootstrap_draws_sequences_and_not_tokens():
    """Tokens repeat sequence means of variance 1: the error is that of 400 draws, not 4000."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(400, generator=generator, dtype=torch.float64).repeat_interleave(10)
    draws = bootstrap([(values, torch.arange(400).repeat_interleave(10))])[1:, 0]
    assert float(draws.std()) == pytest.approx(1 / 400**0.5, rel=0.1)
    assert float(draws.mean()) == pytest.approx(float(values.mean()), abs=0.01)


def test_bootstrap_weighs_tokens():
    values = torch.tensor([1.0, 1.0, 1.0, 5.0], dtype=torch.float64)
    draws = bootstrap([(values, torch.tensor([3, 3, 3, 7]))], draws=50)
    assert float(draws[0, 0]) == 2.0
    assert set(draws[1:, 0].tolist()) == {1.0, 2.0, 5.0}


def test_bootstrap_draws_the_same_sequences_for_all_series():
    """The second series differs in the number of tokens only, so its draws are the same."""
    first = torch.tensor([1.0, 5.0]), torch.tensor([3, 7])
    second = torch.tensor([1.0, 1.0, 5.0, 5.0]), torch.tensor([3, 3, 7, 7])
    draws = bootstrap([first, second], draws=50)
    assert torch.equal(draws[:, 0], draws[:, 1])


def test_bootstrap_without_tokens():
    with pytest.raises(UsageError, match="no tokens"):
        bootstrap([(torch.zeros(0), torch.zeros(0, dtype=torch.int64))])


def test_breakdowns_split_k3():
    rollout = torch.tensor([-0.1, -1.0, -3.0, -0.001])
    trainer = rollout + torch.tensor([0.5, -0.5, 0.2, 0.0])
    parts = Parts(trainer, rollout, torch.tensor([0, 0, 1, 1]))
    rows = parts.by_edges(rollout.exp(), (0.0, 0.1, 0.5, 0.99))
    names = ["0 to 0.1", "0.1 to 0.5", "0.5 to 0.99", "from 0.99"]
    assert [(row.name, row.tokens) for row in rows] == [(name, 1) for name in names]
    terms = k3_terms(trainer, rollout)
    shares = (terms[[2, 1, 0, 3]] / terms.sum()).tolist()
    assert [row.share for row in rows] == pytest.approx(shares)
    assert [row.mean_dlogp for row in rows] == pytest.approx([0.2, 0.5, 0.5, 0.0], abs=1e-6)
    only = parts.by_label(torch.full((4,), CLASSES.index("end")), CLASSES)
    assert [(row.name, row.share) for row in only] == [("end", 1.0)]


def test_an_edge_belongs_to_the_bin_above():
    same = torch.zeros(3)
    parts = Parts(same, same, torch.zeros(3, dtype=torch.int64))
    rows = parts.by_edges(torch.tensor([0.0, 8.0, 9.0]), (0, 8))
    found = [(row.name, row.tokens, row.share) for row in rows]
    assert found == [("0 to 8", 1, 0.0), ("from 8", 2, 0.0)]


def test_places_count_within_a_response():
    mask = torch.tensor([False, True, True, False, True, True, True])
    assert places(mask, torch.tensor([0, 0, 0, 1, 1, 1, 1])).tolist() == [0, 1, 0, 1, 2]


def test_token_class():
    for text, marks, name in (
        (" 12", {}, "digits"),
        ("+=", {}, "punctuation"),
        ("a1", {}, "other"),
        (" ", {}, "other"),
        ("", {"end": True}, "end"),
        ("7", {"echo": True}, "prompt echo"),
        ("7", {"echo": True, "call": True}, "tool call"),
        ("7", {"end": True, "echo": True, "call": True}, "end"),
    ):
        found = token_class(text, **{"end": False} | marks)
        assert CLASSES[found] == name, (text, marks)


def test_an_echo_repeats_four_given_tokens():
    given, own = False, True
    path = [1, 2, 3, 4, 5, 9, 2, 3, 4, 5, 2, 3, 4, 9]
    found = echoed(path, [given] * 5 + [own] * 9)
    # 2 3 4 5; the second 2 3 4 ends otherwise
    assert [i for i, echo in enumerate(found) if echo] == [9]
    assert not any(echoed([1, 2, 3, 4, 1, 2, 3, 4], [own] * 8))  # its own words are no echo
    tool = echoed([7, 1, 2, 3, 4, 1, 2, 3, 4], [own] + [given] * 4 + [own] * 4)
    assert tool == [False] * 8 + [True]


def test_tokens_of_a_tool_call():
    texts = ["so ", "<tool", "_call>", "{x}", "</tool_call>", " end", "<|tool_call|>", "y"]
    assert inside_calls(texts) == [False, True, True, True, True, False, True, True]
    assert inside_calls(["a<b", " and", " c>d"]) == [False, False, False]
    called = inside_calls(["so", "\nAct", "ion: x[1]", "\n", "y"])
    assert called == [False, True, True, False, False]


def gap(k3, *, f2=0.0, f5=0.0, tokens=1000, error=math.nan):
    return StatedGap(
        tokens, tokens // 50 or 1, k3, f2, f5, max_dlogp=1.0 if k3 else 0.0, k3_error=error
    )


R3, TIS, BOTH = "replay.mode=r3", "correction.preset=tis", "replay.mode=r3 correction.preset=tis"
VERDICTS = [  # gap, the gap with replay, share of routes that differ -> action, cause, setting
    (gap(0.0), None, None, "nothing", "", ""),
    (gap(5e-5), gap(1e-6), None, "nothing", "", ""),
    (gap(9e-4), None, 0.0, "nothing", "", ""),  # what dense models train with
    (gap(9e-4, f2=2e-3), None, 0.0, "correct", "numerics", TIS),  # but for its tail
    (gap(2e-3), gap(1.9e-3), None, "correct", "numerics", TIS),  # replay helps too little
    (gap(2e-3), gap(0.0), None, "replay", "routing", R3),  # bitwise with the same routes
    (gap(2e-3), gap(5e-4), None, "replay", "routing", R3),
    (gap(2e-3), gap(5e-4, f2=2e-3), None, "correct", "routing", BOTH),
    (gap(2e-2), gap(5e-3), None, "correct", "routing", BOTH),
    (gap(2e-2), None, 0.1, "replay", "routing", R3),  # not replayed, but the routes are known
    (gap(2e-3), None, 0.0, "correct", "numerics", TIS),  # dense
    (gap(2e-3), None, None, "correct", "", TIS),
    (gap(2e-2, f5=2e-3), None, None, "correct", "", "correction.preset=icepop"),
    (gap(3.0), None, None, "unclear", "", ""),
    (gap(math.inf), None, None, "unclear", "", ""),
    (gap(3.0), gap(1.5), None, "unclear", "", R3),
    (gap(0.1, tokens=31), None, None, "unclear", "", ""),
]


def test_verdict_without_a_bug(subtests):
    for found, replayed, routers, action, cause, setting in VERDICTS:
        with subtests.test(found=found, replayed=replayed, routers=routers):
            said = verdict(found, CLEAN, replayed=replayed, routers=routers, since=" from step 7")
            assert (said.action, said.causes) == (action, (cause,) if cause else ())
            assert said.setting == setting
            assert "from step 7" in said.sentence
            assert (f"k3 is {number(found.k3)} nats a token over" in said.text()) == (found.k3 > 0)
            _, _, name = setting.rpartition("correction.preset=")
            if "correction" in setting:
                assert re.search(rf"^{name} would keep (>?9|100)", said.effect)
                assert said.effect in said.text()
                assert "would keep" not in " ".join(said.basis)
            asks = "If the model is a mixture of experts" in said.sentence
            assert asks == (action == "correct" and replayed is None and routers is None)


@pytest.mark.parametrize("beside", [None, gap(1e-2), gap(1e-5)])
def test_a_mean_of_rho_off_one_is_always_a_mark(beside):
    off = dataclasses.replace(gap(2e-2), mean_rho=1.05, mean_rho_error=0.002)
    said = verdict(off, CLEAN, replayed=beside)
    assert (said.action, said.setting) == ("unclear", "")
    assert "mean rho is 1.0500 +- 0.0020" in said.basis[0]
    if beside is not None:
        under = dataclasses.replace(beside, mean_rho=0.9, mean_rho_error=0.002)
        assert verdict(gap(2e-2), CLEAN, replayed=under).action == "unclear"
    # slack; noise; not known
    for mean, error in ((1.009, 0.0), (1.05, 0.009), (1.05, math.nan), (math.nan, 0.0)):
        fine = dataclasses.replace(gap(2e-2), mean_rho=mean, mean_rho_error=error)
        assert verdict(fine, CLEAN).action == "correct"


def test_a_gap_that_needs_nothing_says_what_replay_takes_off() -> None:
    for k3, left, causes, said in (
        (5e-4, 5e-5, ("routing",), "models. Replaying the rollout's routes (R3) takes off 90%."),
        (5e-4, 4e-4, (), "published dense models."),  # helps too little
        (5e-4, 9e-4, (), "published dense models."),  # makes it worse
        (5e-5, 5e-6, (), "too small to matter."),
    ):
        found = verdict(gap(k3), CLEAN, replayed=gap(left), routers=0.1)
        assert (found.action, found.causes) == ("nothing", causes)
        assert found.sentence.endswith(said)


def test_verdict_gives_the_share_of_routing_and_the_remainder():
    said = verdict(gap(4e-2, error=1e-3), CLEAN, replayed=gap(1e-2, f5=2e-3))
    assert "75% of it from routing: replay the rollout's routes (R3)" in said.sentence
    assert "the 0.01 nats a token that are left with icepop." in said.sentence
    assert said.basis[0].startswith("k3 is 0.0400 +- 0.0010 nats a token over 1,000 tokens in 20")
    assert said.basis[0].endswith("F(2) is 0%")
    assert {f.preset: f.keep for f in said.forecasts}["tis"] == pytest.approx(1)  # it truncates


def test_verdict_names_every_bug_and_recommends_no_setting():
    bugs = Diagnosis(0.5, (Finding("stale", "old weights"),))
    found = verdict(gap(0.1), bugs, routes="agreement 0.2")
    assert (found.action, found.causes, found.setting) == ("bug", ("stale", "routes"), "")
    parts = ("old weights", "agreement 0.2", CAUSES["stale"], CAUSES["routes"])
    assert [part for part in parts if part not in found.text()] == []


def test_all_evidence_of_bugs_is_kept_and_the_sure_ones_come_first():
    """Two findings have one cause; of the two that are not sure, one holds perhaps."""
    unsure = (Finding(cause, "x 2", sure=False) for cause in ("stale", "rows"))
    bugs = (*unsure, Finding("copy", "rows 1 to 3"), Finding("copy", "rows 7 to 9"))
    found = verdict(gap(0.1), Diagnosis(0.1, bugs))
    perhaps = f"perhaps also {CAUSES['stale']}; or {CAUSES['rows']}"
    assert f"mismatch: {CAUSES['copy']}; {perhaps}. Fix it" in found.sentence
    assert found.basis[2:4] == ("copy: rows 1 to 3", "copy: rows 7 to 9")


@pytest.mark.parametrize(("error", "alike"), [(1e-4, True), (2e-3, False)])
def test_routes_are_cleared_only_by_a_gap_that_is_known_where_they_agree(error, alike):
    """k3 is 5e-3 in both parts; of the one where routes agree, the error may be large."""
    differing, agreeing = (SimpleNamespace(tokens=1000, mean=5e-3, error=e) for e in (1e-4, error))
    assert ByRoutes(differing, agreeing).alike is alike
