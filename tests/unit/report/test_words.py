"""summary.json in words and in the terminal."""

import io
import math

import pytest
from rich.console import Console

from onepolicy.report.outcome import outcome
from onepolicy.report.terminal import summary_table
from onepolicy.report.words import comparison, course, factor, number, time_shares, verdict
from onepolicy.verdict.bug_signatures import Diagnosis
from onepolicy.verdict.rules import Gap
from onepolicy.verdict.rules import verdict as audit_verdict

SUMMARY = {
    "steps": 120,
    "reward_first": 0.45,
    "reward_last": 0.91,
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
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(summary_table(summary))
    return console.export_text()


LARGE = SUMMARY | {
    "mismatch": {"mismatch/k3": 3e-3, "mismatch/f2": 0.0, "routing/routers": 0.031},
    "mismatch_at_probes": {"mismatch/k3": 2e-3, "mismatch/f2": 0.0, "routing/routers": 0.03},
    "mismatch_without_replay": {"mismatch/k3": 6e-3, "mismatch/f2": 2e-2, "routing/routers": 0.033},
}


def test_sentences():
    small = (
        "Without \u2192 with replay, on 2 probe batches scored both ways: "
        "k3 6.0e-6 \u2192 2.0e-6 (too small "
        "to matter); F(2) 2.0e-4 \u2192 0; routers that would choose otherwise 3.3% \u2192 3%; "
        "experts that ran with it: 100% the rollout's."
    )
    assert verdict(SUMMARY) == [
        "Reward rose from 0.45 to 0.91 over 120 steps.",
        "The best evaluation (greedy) is 0.94, at step 110.",
        "It did not crash.",
        small,
    ]


@pytest.mark.parametrize(
    ("probes", "cuts", "cut"),
    [
        ([1], [3.0], "3\u00d7, one probe"),
        ([1, 11], [1.5, 4.5], "3\u00d7, two probes"),
        ([1, 11, 21], [1.5, 2.5, 4.5], "2.5\u00d7, 1.5\u00d7 to 4.5\u00d7 over 3 probes"),
    ],
)
def test_a_cut_is_an_interval_over_three_scored_steps_or_more(probes, cuts, cut):
    summary = LARGE | {"probe_steps": probes, "k3_cuts": cuts}
    assert f"k3 0.006 \u2192 0.002 (cut by {cut}); F(2)" in verdict(summary)[-1]
    assert comparison(summary)[0][-1] == cut
    assert f"by {cut}, more than dense models train well with" in outcome(summary)
    assert cut in " ".join(shown(summary).replace("\u2502", " ").split())


def test_negligible_values_have_no_ratio():
    for text in (
        " ".join(verdict(SUMMARY)),
        shown(SUMMARY),
        outcome(SUMMARY),
        str(comparison(SUMMARY)),
    ):
        assert "\u00d7)" not in text
        assert "3\u00d7" not in text
    assert [row[-1] for row in comparison(SUMMARY)] == ["too small to matter", *["\u2013"] * 3]
    high_before = SUMMARY | {"mismatch_without_replay": {"mismatch/k3": 1e-4}}  # both must be below
    assert comparison(high_before)[0][-1] == "50\u00d7, two probes"


def test_other_choices_of_the_trainer_are_not_cut():
    rows = {row[0]: row for row in comparison(LARGE)}
    assert rows["Routers that would choose otherwise"][-1] == "\u2013"
    assert rows["Experts that ran"][3] == "100% the rollout's"
    assert "3.3% without \u2192 3% with replay" in shown(LARGE)
    assert "1.1\u00d7" not in shown(LARGE)


SMALL = (
    "the gap between rollout and trainer is too small to matter (k3 6.0e-6 without replay, "
    "2.0e-6 with)."
)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {},
            f"The policy learnt: held-out greedy rose from 0.5 to 0.92, "
            f"and it did not crash; {SMALL}",
        ),
        (
            {"eval_first": None, "eval_last": None, "eval_best": None},
            f"The policy learnt: reward rose from 0.45 to 0.91, "
            f"and no evaluation looked for a crash; {SMALL}",
        ),
        (
            {"eval_last": {"step": 120, "value": 0.51}},
            f"The policy hardly changed: held-out greedy stayed near 0.51, "
            f"and it did not crash; {SMALL}",
        ),
        (
            {"eval_last": {"step": 120, "value": math.nan}},
            f"The policy hardly changed: held-out greedy stayed near \u2013, "
            f"and it did not crash; {SMALL}",
        ),
        (
            {"eval_last": {"step": 120, "value": 0.3}},
            f"The policy got worse: held-out greedy fell from 0.5 to 0.3, "
            f"and it did not crash; {SMALL}",
        ),
        (
            {"crash_step": 80, "eval_last": {"step": 120, "value": 0.1}},
            f"The policy crashed at step 80: held-out greedy fell from 0.5 to 0.1; {SMALL}",
        ),
        (
            {
                "nothing_learnt": {
                    "learnt": "nothing",
                    "verdict": "Nothing was learnt from rewards: x.",
                    "why": [],
                    "silent": 3,
                    "steps": 3,
                }
            },
            f"Nothing was learnt from rewards: x; {SMALL}",
        ),
        (
            {"replay": "off", "mismatch_without_replay": {}, "mismatch_at_probes": {}},
            "The policy learnt: held-out greedy rose from 0.5 to 0.92, and it did not crash; "
            "the gap between "
            "rollout and trainer is too small to matter (k3 3.0e-6 without replay).",
        ),
    ],
)
def test_the_outcome_comes_first_in_one_sentence(change, sentence):
    summary = SUMMARY | change
    assert outcome(summary) == sentence
    told = " ".join(shown(summary).replace("\u2502", " ").split())
    assert told.index("verdict") < told.index(sentence[:20]) < told.index("reward ")


@pytest.mark.parametrize(
    ("k3", "f2", "size"),
    [
        ((9.9e-5, 9e-5), 0.0, "is too small to matter (k3"),
        (
            (1e-3, 9e-4),
            0.0,
            "replay changed the gap between rollout and trainer little, k3 0.001 to 9.0e-4 nats",
        ),
        (
            (1e-2, 9e-4),
            0.0,
            "nats a token, by 11.1\u00d7, two probes, as small as dense models train well with.",
        ),
        ((1e-2, 9e-4), 2e-3, "more than dense models train well with (see `onepolicy measure`)."),
        ((1e-2, 1e-3), 0.0, "more than dense models train well with (see `onepolicy measure`)."),
        (
            (1e-2, 0.0),
            0.0,
            "replay cut the gap between rollout and trainer from k3 0.01 to 0 nats a token, "
            "too small",
        ),
    ],
)
def test_the_size_of_a_gap_in_the_outcome(k3, f2, size):
    without, within = k3
    scorings = {
        "mismatch": within,
        "mismatch_at_probes": within,
        "mismatch_without_replay": without,
    }
    tables = {key: {"mismatch/k3": value, "mismatch/f2": f2} for key, value in scorings.items()}
    assert size in outcome(SUMMARY | tables | {"k3_cuts": []})
    said = audit_verdict(Gap(1000, 20, within, f2, 0.0, 1.0), Diagnosis(0.0, ())).sentence
    for words in (
        "too small to matter",
        "as small as dense models train well with",
    ):  # those of measure and audit
        assert (words in outcome(SUMMARY | tables)) >= (words in said and within > 0)


def test_groups_without_signal_have_one_line():
    half = SUMMARY | {"groups_without_signal": 0.5}
    line = "50% at the end; all rewards of such a group are equal, so it teaches nothing"
    assert f"Groups without signal: {line}." in verdict(half)
    assert line in " ".join(shown(half).replace("\u2502", " ").split())
    for none in (
        SUMMARY,
        SUMMARY | {"groups_without_signal": 0.0},
        SUMMARY | {"groups_without_signal": None},
    ):
        assert "signal" not in shown(none) + " ".join(verdict(none))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"parent": {"run": "runs/base", "step": 40}}, "Continued from runs/base at step 40."),
        ({"reward_last": 0.2}, "Reward fell from 0.45 to 0.2 over 120 steps."),
        ({"eval_best": None}, "No evaluation was run, so a crash would not have been seen."),
        ({"crash_step": 80}, "It crashed at step 80."),
        ({"mismatch": {}}, "The mismatch of rollout and trainer was not measured."),
        (
            {"replay": "off", "mismatch_without_replay": {}},
            "Rollout routes were not replayed; k3 averaged 3.0e-6, too small to matter.",
        ),
        (
            {"mismatch_without_replay": {}},
            "Replay was on and k3 averaged 3.0e-6, too small to matter; "
            "no probe measured it without.",
        ),
    ],
)
def test_sentence_of_each_case(change, sentence):
    assert sentence in verdict(SUMMARY | change)


def test_a_gap_that_replay_widens_is_reported():
    worse = {
        "mismatch_without_replay": {
            "mismatch/k3": 1e-3,
            "mismatch/f2": 0.0,
            "routing/routers": 0.03,
        }
    }
    assert "k3 0.001 \u2192 0.002 (2\u00d7 more, two probes)" in verdict(LARGE | worse)[-1]
    assert (
        "replay changed the gap between rollout and trainer little, k3 0.001 to 0.002"
        in outcome(LARGE | worse)
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((None, "\u2013"), (float("nan"), "\u2013"), (0.0, "0"), (0.12345, "0.123")),
        *((8.44e-6, "8.4e-6"), (5210.4, "5,210"), (-0.051, "-0.051"), (2.5e12, "2.5e+12")),
    ],
)
def test_number(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0%"), (0.0325, "3.25%"), (1.0, "100%"), (4e-7, "4.0e-5%")]
)
def test_share(value, text):
    assert number(value, share=True) == text


def test_factor():
    assert (factor(None), factor(2.9444), factor(12345.6)) == (
        "\u2013",
        "2.94\u00d7",
        "12,346\u00d7",
    )


def test_time_shares():
    assert time_shares(SUMMARY) == "rollout 50%, update 25%, score 8% of 1.2 s"
    assert time_shares({}) == ""


def test_time_saved_by_bypass_is_no_part_of_the_step():
    summary = SUMMARY | {"time": SUMMARY["time"] | {"score": 0.0, "score_saved": 0.25}}
    assert time_shares(summary) == "rollout 50%, update 25% of 1.2 s"
    assert "about 0.25 s per step saved" in shown(summary)
    assert "saved" not in shown(SUMMARY)


def test_terminal():
    text = shown(SUMMARY)
    for part in (
        "120 steps", "0.45 \u2192 0.91", "held-out greedy", "0.5 \u2192 0.92, best 0.94 at "
        "step 110", "none",
        "6.0e-6 without \u2192 2.0e-6 with replay  (too small",
        "3.3% without \u2192 3% with replay", "rollout 50%", "5,210", "runs/first/report.html",
    ):  # fmt: skip
        assert part in text


def test_the_terminal_leaves_out_missing_values():
    assert "at step 2" in shown(SUMMARY | {"crash_step": 2})
    text = shown(
        {"steps": 3, "eval_best": None, "crash_step": None}
    )  # never evaluated: no crash could be seen
    for part in ("crash", "reward", "evaluation", "k3", "tokens", "continued", "None"):
        assert part not in text
    text = shown(
        SUMMARY | {"replay": "off", "mismatch_without_replay": {}, "mismatch_at_probes": {}}
    )
    assert "3.0e-6" in text
    assert "with replay" not in text


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([], "is not known"),
        ([0.0] * 9, "is 0 nats throughout"),
        ([0.3], "is 0.3 nats throughout"),
        ([0.3, math.nan, 0.3], "is 0.3 nats throughout"),
        ([0.6] * 9 + [0.1] * 9, "falls 6-fold, from 0.6 to 0.1 nats"),
        ([0.3] * 9 + [0.0] * 9, "falls from 0.3 to 0 nats"),
        ([0.3] * 9 + [0.4] * 9, "rises from 0.3 to 0.4 nats"),
        ([0.3, 0.31] * 9, "stays near 0.306 nats"),
        (
            [0.3] * 9 + [0.01] + [0.3] * 9,
            "ends where it began, near 0.3 nats, but was 0.01 to 0.3 between",
        ),
        (
            [0.3] * 9 + [3.0] + [0.3] * 9,
            "ends where it began, near 0.3 nats, but was 0.3 to 3 between",
        ),
        ([-0.5] * 9 + [0.5] * 9, "rises from -0.5 to 0.5 nats"),
    ],
)
def test_a_curve_in_words(values, words):
    assert course(values, "nats") == words
