"""summary.json in words: the card and the table that page and terminal show."""

import io
import math

import pytest
from rich.console import Console

from onepolicy.notation import counted, ends, number, with_error
from onepolicy.report.run_summary import (
    COMPARISON_HEADER,
    card,
    comparison_table,
    describe_overlap,
    goes,
    held_out,
    moved,
    outcome,
    time_shares,
)
from onepolicy.report.terminal import summary_parts
from onepolicy.report.words import course, factor
from onepolicy.verdict.bug_signatures import Diagnosis
from onepolicy.verdict.rules import verdict as audit_verdict
from support.stated_gap import StatedGap

SUMMARY = {
    "steps": 120,
    "reward_first": 0.45,
    "reward_last": 0.91,
    "reward_error": 0.01,
    "score": "eval/greedy",
    "eval_first": {"step": 0, "value": 0.5},
    "eval_last": {"step": 120, "value": 0.92},
    "eval_best": {"step": 110, "value": 0.94},
    "crash_step": None,
    "replay": "r3",
    "mismatch": {"mismatch/k3": 3e-6, "mismatch/f2": 0.0, "routing/routers": 0.031},
    "mismatch_at_probes": {"mismatch/k3": 2e-6, "mismatch/f2": 0.0, "routing/routers": 0.03},
    "mismatch_without_replay": {"mismatch/k3": 6e-6, "mismatch/f2": 2e-4, "routing/routers": 0.033},
    "probe_steps": [1, 11],
    "k3_cuts": [1.5, 4.5],
    "time": {"rollout": 0.6, "score": 0.1, "update": 0.3, "counterfactual": 0.0, "step": 1.2},
    "tokens_per_second": 5210.0,
    "parent": None,
    "run": "runs/first",
    "report": "runs/first/report.html",
}


def shown(summary: dict) -> str:
    console = Console(width=140, record=True, file=io.StringIO())
    for part in summary_parts(summary):
        console.print(part)
    return console.export_text()


def tiles(summary: dict) -> dict:
    return {name: (value, more) for name, value, more, _ in card(summary).tiles}


def comparison(summary: dict) -> list:
    return list(comparison_table(summary).rows)


def words_of(summary: dict) -> str:
    """Return what the terminal shows, without the table's lines."""
    return " ".join(shown(summary).replace("\u2502", " ").split())


LARGE = SUMMARY | {
    "mismatch": {"mismatch/k3": 3e-3, "mismatch/f2": 0.0, "routing/routers": 0.031},
    "mismatch_at_probes": {"mismatch/k3": 2e-3, "mismatch/f2": 0.0, "routing/routers": 0.03},
    "mismatch_without_replay": {"mismatch/k3": 6e-3, "mismatch/f2": 2e-2, "routing/routers": 0.033},
}


def test_each_fact_has_one_place():
    """The outcome and the tiles are not told a second time below."""
    assert tiles(SUMMARY) == {
        "Reward": ("0.45 \u2192 0.91", "over 120 steps"),
        "Greedy held-out accuracy": ("0.50 \u2192 0.92", "best 0.94 at step 110"),
        "Crash": ("none", ""),
        "Mean k3, as trained": ("3e-6", "nats per token: too small to matter"),
        "Tokens per second, with prompts": ("5,210", "rollout 50%, update 25%, score 8% of 1.2 s"),
    }
    assert list(card(SUMMARY).lines) == []


def test_one_step_is_no_course():
    one = {"steps": 1, "reward_first": 0.5, "reward_last": 0.5, "replay": "off"}
    one["mismatch"] = {"mismatch/k3": 2e-3, "mismatch/f2": 1e-3}
    assert tiles(one)["Reward"] == ("0.5 \u2192 0.5", "over 1 step")
    assert outcome(one).startswith("One step does not show whether the policy learns: reward 0.5.")


def test_a_fork_has_not_trained_its_parents_steps():
    fork = {"steps": 31, "parent": {"run": "runs/a", "step": 30}, "replay": "off"}
    fork |= {"reward_first": 0.5, "reward_last": 0.5}
    assert tiles(fork)["Reward"][1] == "over 1 step"
    assert outcome(fork).startswith("One step does not show")
    assert "59 steps do not show" in outcome(fork | {"steps": 89, "reward_last": 0.6})


@pytest.mark.parametrize(("error", "learnt"), [(0.22, True), (0.24, False), (None, False)])
def test_a_reward_that_moves_as_single_steps_do_is_no_learning(error, learnt):
    """It rises by 0.46. Evaluations are judged by themselves, whatever the rewards did."""
    rewards = SUMMARY | NO_EVALUATION | {"reward_error": error}
    said = "120 steps do not show whether the policy learns: reward rose from 0.45 to 0.91"
    assert (said in outcome(rewards)) is not learnt
    assert ("The policy learnt" in outcome(rewards)) is learnt
    assert "The policy learnt: greedy" in outcome(SUMMARY | {"reward_error": error})


def test_a_figure_goes_where_the_outcome_says_it_moved():
    """A share that falls by a twentieth is told as that in both places."""
    ways = [
        ((0.5, 0.92), "goes from 0.50 to 0.92", "rose"),
        ((0.9, 0.85), "goes from 0.90 to 0.85", "fell"),
        ((0.9, 0.89), "stays near 0.89", "stayed near"),
    ]
    for (first, last), words, verb in ways:
        given = {"eval_first": {"step": 0, "value": first}, "eval_last": {"step": 9, "value": last}}
        judged = held_out(SUMMARY | given)
        assert judged == ("greedy held-out accuracy", first, last)
        assert goes(*judged) == f"greedy held-out accuracy {words}"
        assert verb in moved(first, last)
    assert held_out(SUMMARY | {"eval_first": SUMMARY["eval_last"]}) is None


def test_columns_without_a_value_fold_away():
    """No probe scored a batch both ways."""
    trained = {name: value for name, value in SUMMARY.items() if "probe" not in name}
    del trained["mismatch_without_replay"], trained["k3_cuts"]
    table = comparison_table(trained)
    assert table.header == ("Rollout vs trainer", "All steps")
    assert table.rows[0] == ("k3, nats per token", "3e-6")
    assert comparison_table(SUMMARY).header == COMPARISON_HEADER
    assert comparison_table({"steps": 3}) is None


def test_a_cut_is_an_interval_over_three_scored_steps_or_more(subtests):
    for probes, cuts, cut in [
        ([1], [3.0], "3\u00d7, one probe"),
        ([1, 11], [1.5, 4.5], "3\u00d7, two probes"),
        ([1, 11, 21], [1.5, 2.5, 4.5], "3\u00d7; median probe 2.5\u00d7 (1.5\u00d7 to 4.5\u00d7)"),
    ]:
        summary = LARGE | {"probe_steps": probes, "k3_cuts": cuts}
        with subtests.test(cut):
            assert comparison(summary)[0][1:] == ("3e-3", "6e-3", "2e-3", cut)
            assert "to 2e-3 nats a token, larger than in published dense models" in outcome(summary)
            assert tiles(summary)["Mean k3, as trained"] == ("3e-3", f"replay cuts it by {cut}")


def test_negligible_values_have_no_ratio():
    for text in (shown(SUMMARY), outcome(SUMMARY), str(comparison(SUMMARY))):
        assert "\u00d7)" not in text
        assert "3\u00d7" not in text
    assert [row[-1] for row in comparison(SUMMARY)] == ["too small to matter", *["\u2013"] * 3]
    high_before = SUMMARY | {"mismatch_without_replay": {"mismatch/k3": 1e-4}}  # both must be below
    assert comparison(high_before)[0][-1] == "50\u00d7, two probes"


def test_other_choices_of_the_trainer_are_not_cut():
    rows = {row[0]: row for row in comparison(LARGE)}
    assert rows["Routes that would differ"][-1] == "\u2013"
    assert rows["Experts that ran"][3] == "100% the rollout's"
    assert rows["Routes that would differ"][2:4] == ("3.3%", "3%")
    assert "1.1\u00d7" not in shown(LARGE)


GAP = "The gap between rollout and trainer is too small to matter (k3"
SMALL = f"{GAP} 6e-6 without replay, 2e-6 with)."
NOTHING = {"learnt": "nothing", "verdict": "Nothing was learnt from rewards: x.", "why": []}
NO_EVALUATION = {"eval_first": None, "eval_last": None, "eval_best": None}
REPLAY_OFF = {"replay": "off", "mismatch_without_replay": {}, "mismatch_at_probes": {}}
GREEDY = "greedy held-out accuracy"
LEARNT = f"learnt: {GREEDY} rose from 0.50 to 0.92"
FELL = f"{GREEDY} fell from 0.5 to"
UNCHANGED = f"hardly changed: {GREEDY} stayed near"


def last(value):
    return {"eval_last": {"step": 120, "value": value}}


OUTCOMES = [
    ({}, f"{LEARNT}. {SMALL}"),
    (REPLAY_OFF, f"{LEARNT}. {GAP} 3e-6 without replay)."),
    (NO_EVALUATION, f"learnt: reward rose from 0.45 to 0.91. {SMALL}"),
    (last(0.51), f"{UNCHANGED} 0.51. {SMALL}"),
    (last(math.nan), f"{UNCHANGED} \u2013. {SMALL}"),
    (last(0.3), f"got worse: {FELL} 0.3. {SMALL}"),
    (last(0.1) | {"crash_step": 80}, f"crashed at step 80: {FELL} 0.1. {SMALL}"),
]


def test_the_outcome_comes_first_in_two_sentences(subtests):
    sentences = [(change, f"The policy {words}") for change, words in OUTCOMES]
    nothing = {"nothing_learnt": NOTHING | {"silent": 3, "steps": 3}}
    for change, sentence in [*sentences, (nothing, f"{NOTHING['verdict']} {SMALL}")]:
        with subtests.test(sentence):
            summary = SUMMARY | change
            assert outcome(summary) == sentence
            told = words_of(summary)
            assert told.index(sentence[:20]) == 0


def test_both_accuracies_are_named_where_one_rose_and_the_other_fell():
    ends = {"sampled_first": {"step": 0, "value": 0.36}, "sampled_last": {"step": 9, "value": 0.9}}
    fell = SUMMARY | last(0.3) | ends
    words = "fell from 0.5 to 0.3, the sampled one rose from 0.36 to 0.90."
    assert outcome(fell) == f"{GREEDY.capitalize()} {words} {SMALL}"
    assert "The policy learnt: greedy" in outcome(SUMMARY | ends)  # both rose
    few = fell | {"sampled_answers": 4}  # a difference of 0.54 has an error of 0.34
    assert outcome(few) == f"The policy got worse: {GREEDY} fell from 0.5 to 0.3. {SMALL}"
    assert outcome(fell | {"sampled_answers": 8}) == outcome(fell)


def test_a_change_of_few_answers_shows_nothing():
    """Of 32 answers, five more are right: McNemar's exact p is 2 / 2^5 if no other changed."""
    five, six = (SUMMARY | last(0.5 + n / 32) | {"eval_answers": 32} for n in (5, 6))
    words = f"{GREEDY} rose from 0.500 to 0.656. {SMALL}"
    assert outcome(five) == f"32 answers do not show whether the policy learns: {words}"
    assert outcome(six).startswith(f"The policy learnt: {GREEDY} rose")


def test_the_outcome_judges_the_means_that_it_prints():
    """A gap in bursts: the mean of the probes falls 80-fold, the median one hardly."""
    means = {"mismatch/k3": 5.8e-6}, {"mismatch/k3": 4.7e-4}
    summary = SUMMARY | {"mismatch": means[0], "mismatch_at_probes": means[0]}
    summary |= {"mismatch_without_replay": means[1], "k3_cuts": [0.609, 1.05, 582.0]}
    ends = "from k3 4.7e-4 to 5.8e-6 nats a token, in bursts (median probe 1.05\u00d7), too small"
    assert f"Replay cut the gap between rollout and trainer {ends}" in outcome(summary)
    steady = summary | {"k3_cuts": [70.0, 80.0, 90.0]}
    assert "bursts" not in outcome(steady)


LITTLE = "Replay changed the gap between rollout and trainer little, from k3"
CUT = "Replay cut the gap between rollout and trainer from k3 0.01 to"
MORE = "larger than in published dense models (see `onepolicy measure`)."
SIZES = [
    (9.9e-5, 9e-5, 0.0, "is too small to matter (k3"),
    (1e-3, 9e-4, 0.0, f"{LITTLE} 1e-3 to 9e-4 nats"),
    (1e-2, 9e-4, 0.0, f"{CUT} 9e-4 nats a token, no larger than in published dense models."),
    (1e-2, 9e-4, 2e-3, MORE),
    (1e-2, 1e-3, 0.0, MORE),
    (3e-3, 2e-3, 0.0, f"{LITTLE} 3e-3 to 2e-3 nats"),  # 1.5 times: more is a cut
    (3.1e-3, 2e-3, 0.0, "Replay cut"),
    (1e-2, 0.0, 0.0, f"{CUT} 0 nats a token, too small"),
]


def test_the_size_of_a_gap_in_the_outcome(subtests):
    for without, within, f2, size in SIZES:
        scorings = ("mismatch", within), ("mismatch_at_probes", within)
        scorings += (("mismatch_without_replay", without),)
        tables = {key: {"mismatch/k3": value, "mismatch/f2": f2} for key, value in scorings}
        said = audit_verdict(StatedGap(1000, 20, within, f2, 0.0, 1.0), Diagnosis(0.0, ())).sentence
        with subtests.test(without=without, within=within, f2=f2):
            assert size in outcome(SUMMARY | tables | {"k3_cuts": []})
            # those of measure and audit
            for words in ("too small to matter", "no larger than in published dense models"):
                assert (words in outcome(SUMMARY | tables)) >= (words in said and within > 0)


def test_groups_without_signal_have_one_line():
    half = SUMMARY | {"groups_without_signal": 0.5}
    line = "50% at the end; all rewards of such a group are equal, so it teaches nothing"
    assert f"Groups without signal: {line}." in card(half).lines
    assert line in words_of(half)
    for none in ({}, {"groups_without_signal": 0.0}, {"groups_without_signal": None}):
        assert "signal" not in shown(SUMMARY | none)


def test_what_no_tile_says(subtests):
    saved = {"time": SUMMARY["time"] | {"score_saved": 0.25}}
    for change, sentence in [
        ({"parent": {"run": "runs/base", "step": 40}}, "Continued from runs/base at step 40."),
        ({"updates_skipped": 2.0}, "Updates skipped: 2, their gradients were not finite."),
        (
            {"missing_supports": {"attempts": 3, "dropped": 1}},
            "Attempts with a token without support: 3; 1 episode dropped after one.",
        ),
        (saved, "Scoring left out: about 0.25 s per step saved, the rollout is the behaviour"),
        ({"nothing_learnt": NOTHING | {"why": ["a", "b"], "silent": 3, "steps": 3}}, "a b"),
    ]:
        with subtests.test(sentence):
            (line,) = card(SUMMARY | change).lines
            assert line.startswith(sentence)
            assert line in words_of(SUMMARY | change)


def test_a_crash_has_a_tile():
    assert tiles(SUMMARY | {"crash_step": 80})["Crash"][0] == "step 80"
    unseen = tiles(SUMMARY | NO_EVALUATION)["Crash"]
    assert unseen == ("\u2013", "no evaluation was run, so none would have been seen")


def test_a_gap_that_replay_widens_is_reported():
    without = {"mismatch/k3": 1e-3, "mismatch/f2": 0.0, "routing/routers": 0.03}
    worse = LARGE | {"mismatch_without_replay": without}
    assert comparison(worse)[0][1:] == ("3e-3", "1e-3", "2e-3", "2\u00d7 more, two probes")
    assert "trainer is larger with replay, from k3 1e-3 to 2e-3 nats" in outcome(worse)


def test_numbers_shares_and_factors():
    numbers = {0.0: "0", 0.12345: "0.123", 5210.4: "5,210", -0.051: "-0.051"}
    numbers |= {8.44e-6: "8.44e-6", 1.76e-3: "1.76e-3", 5e-3: "5e-3", 999.7: "1,000"}
    numbers |= {None: "\u2013", math.nan: "\u2013", 2.5e12: "2.5e12", math.inf: "inf"}
    # three digits, the zeros too, so that a column is of one width; limits as they are
    numbers |= {4.203e-6: "4.20e-6", 1.07e-5: "1.07e-5", 12.04: "12.0", 0.41987: "0.420"}
    numbers |= {1e-3: "1e-3", 5.5e-4: "5.5e-4", 12.0: "12", 480.0: "480", 0.1 + 0.2: "0.3"}
    assert [number(value) for value in numbers] == list(numbers.values())
    shares = {0.0: "0%", 0.0325: "3.25%", 1.0: "100%", 4e-7: "<0.01%", 0.07: "7%"}
    shares |= {0.1998: "20.0%", 0.9994: "99.9%", 0.99996: ">99.9%"}
    assert [number(value, share=True) for value in shares] == list(shares.values())


def test_both_ends_of_a_course_have_the_same_decimals():
    pairs = {(0.45, 0.9): ("0.45", "0.90"), (0.0, 0.125): ("0.000", "0.125")}
    pairs |= {(0.5, None): ("0.5", "\N{EN DASH}"), (0.5, 4e-6): ("0.5", "4e-6"), (3, 4): ("3", "4")}
    pairs |= {(0.274, 0.0612): ("0.274", "0.0612")}
    assert {pair: ends(*pair) for pair in pairs} == pairs


def test_a_value_and_its_error_end_at_one_place_in_one_notation():
    shown = {
        (1.05, 0.002): "1.0500 +- 0.0020",
        (0.04, 1e-3): "0.0400 +- 0.0010",
        (1.76e-3, 4.6e-5): "(1.760 +- 0.046)e-3",
        (3e-4, 0.012): "0.000 +- 0.012",
        (-0.126, 0.0071): "-0.1260 +- 0.0071",
        (1234.5, 56.0): "1,234 +- 56",
        (2.5e6, 1e5): "(2.50 +- 0.10)e6",
        (0.5, math.nan): "0.5",
        (0.5, 0.0): "0.5",
        (math.nan, 0.1): "\N{EN DASH}",
    }
    assert {pair: with_error(*pair) for pair in shown} == shown


def test_numbers_of_things():
    assert [counted(n, "step") for n in (0, 1, 2, 12_300)] == [
        "0 steps",
        "1 step",
        "2 steps",
        "12,300 steps",
    ]
    assert [counted(n, "probe batch") for n in (1, 2)] == ["1 probe batch", "2 probe batches"]
    factors = {None: "\u2013", 2.9444: "2.94\u00d7", 12345.6: "12,346\u00d7"}
    assert [factor(value) for value in factors] == list(factors.values())


def test_times_of_sampling_while_learning():
    found = {"staleness_mean": 0.5, "staleness_max": 2.0, "spanning": 0.25}
    found |= {"learner_busy": 0.75, "sampler_busy": 0.5}
    assert describe_overlap(found) == (
        "tokens were 0.5 updates old on average, the oldest 2; 25% of the samples span an update; "
        "the learner was busy 75% of the time, the sampler 50%"
    )


def test_time_shares():
    assert time_shares(SUMMARY) == "rollout 50%, update 25%, score 8% of 1.2 s"
    assert time_shares({}) == ""
    # time saved by bypass is no part of the step
    summary = SUMMARY | {"time": SUMMARY["time"] | {"score": 0.0, "score_saved": 0.25}}
    assert time_shares(summary) == "rollout 50%, update 25% of 1.2 s"


def test_the_terminal_shows_what_the_page_begins_with():
    text = shown(SUMMARY)
    assert text.startswith(outcome(SUMMARY)[:100])
    said = [part for tile in card(SUMMARY).tiles for part in tile[:3]]
    for cell in (*said, *COMPARISON_HEADER, *sum(comparison(SUMMARY), ())):
        assert cell in words_of(SUMMARY)
    assert "report: runs/first/report.html" in text
    red = SUMMARY | {"pressure": "noise on its routers"}
    assert shown(red).startswith("Not a real engine: noise on its routers.")


def test_the_terminal_leaves_out_missing_values():
    # never evaluated: no crash could be seen
    text = shown({"steps": 3, "eval_best": None, "crash_step": None})
    for part in ("Reward", "accuracy", "k3", "Tokens", "Continued", "None"):
        assert part not in text
    text = shown(SUMMARY | REPLAY_OFF)
    assert "3e-6" in text
    assert "with replay" not in text


AGAIN = "ends where it began, near 0.3 nats, but was"
COURSES = [
    ([], "is not known"),
    ([0.0] * 9, "is 0 nats throughout"),
    ([0.3], "is 0.3 nats, measured once"),
    ([0.3, math.nan, 0.3], "is 0.3 nats throughout"),
    ([0.6] * 9 + [0.1] * 9, "falls 6-fold, from 0.6 to 0.1 nats"),
    ([0.3] * 9 + [0.0] * 9, "falls from 0.3 to 0.0 nats"),
    ([0.3] * 9 + [0.4] * 9, "rises from 0.3 to 0.4 nats"),
    ([0.3, 0.31] * 9, "stays near 0.306 nats"),
    ([0.3] * 9 + [0.01] + [0.3] * 9, f"{AGAIN} 0.01 to 0.3 between"),
    ([0.3] * 9 + [3.0] + [0.3] * 9, f"{AGAIN} 0.3 to 3 between"),
    ([-0.5] * 9 + [0.5] * 9, "rises from -0.5 to 0.5 nats"),
]


def test_a_curve_in_words(subtests):
    for values, words in COURSES:
        with subtests.test(words):
            assert course(values, "nats") == words
