"""summary.json in words and in the terminal."""

import io

import pytest
from rich.console import Console

from onepolicy.report.terminal import summary_table
from onepolicy.report.words import factor, number, time_shares, verdict

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
    "time": {"rollout": 0.6, "score": 0.1, "update": 0.3, "probe": 0.0, "step": 1.2},
    "tokens_per_second": 5210.0,
    "parent": None,
    "run": "runs/first",
    "report": "runs/first/report.html",
}


def shown(summary: dict) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(summary_table(summary))
    return console.export_text()


def test_sentences():
    assert verdict(SUMMARY) == [
        "Reward rose from 0.45 to 0.91 over 120 steps.",
        "The best evaluation (greedy) is 0.94, at step 110.",
        "It did not crash.",
        "Without \u2192 with replay, on 2 probe batches scored both ways: k3 6.0e-6 \u2192 2.0e-6 (3\u00d7 less); "
        "F(2) 2.0e-4 \u2192 0; routers that would choose otherwise 3.3% \u2192 3% "
        "(1.1\u00d7 less); experts that ran with it: 100% the rollout's. "
        "Of single probes it cut k3 1.5\u00d7 to 4.5\u00d7, median 3\u00d7.",
    ]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"parent": {"run": "runs/base", "step": 40}}, "Continued from runs/base at step 40."),
        ({"reward_last": 0.2}, "Reward fell from 0.45 to 0.2 over 120 steps."),
        ({"eval_best": None}, "No evaluation was run, so a crash would not have been seen."),
        ({"crash_step": 80}, "It crashed at step 80."),
        ({"mismatch": {}}, "The mismatch of rollout and trainer was not measured."),
        ({"replay": "off", "mismatch_without_replay": {}}, "Rollout routes were not replayed; k3 averaged 3.0e-6."),
        ({"mismatch_without_replay": {}}, "Replay was on and k3 averaged 3.0e-6; no probe measured it without."),
    ],
)
def test_sentence_of_each_case(change, sentence):
    assert sentence in verdict(SUMMARY | change)


def test_worse_with_replay_is_said():
    worse = {"mismatch_without_replay": {"mismatch/k3": 1e-6, "mismatch/f2": 0.0, "routing/routers": 0.03}}
    assert "k3 1.0e-6 \u2192 2.0e-6 (2\u00d7 more)" in verdict(SUMMARY | worse)[-1]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((None, "\u2013"), (float("nan"), "\u2013"), (0.0, "0"), (0.12345, "0.123")),
        *((8.44e-6, "8.4e-6"), (5210.4, "5,210"), (-0.051, "-0.051"), (2.5e12, "2.5e+12")),
    ],
)
def test_number(value, text):
    assert number(value) == text


@pytest.mark.parametrize(("value", "text"), [(0.0, "0%"), (0.0325, "3.25%"), (1.0, "100%"), (4e-7, "4.0e-5%")])
def test_share(value, text):
    assert number(value, share=True) == text


def test_factor():
    assert (factor(None), factor(2.9444), factor(12345.6)) == ("\u2013", "2.94\u00d7", "12,346\u00d7")


def test_time_shares():
    assert time_shares(SUMMARY) == "rollout 50%, update 25%, score 8% of 1.2 s"
    assert time_shares({}) == ""


def test_time_that_bypass_saved_is_no_part_of_the_step():
    summary = SUMMARY | {"time": SUMMARY["time"] | {"score": 0.0, "score_saved": 0.25}}
    assert time_shares(summary) == "rollout 50%, update 25% of 1.2 s"
    assert "about 0.25 s per step saved" in shown(summary)
    assert "saved" not in shown(SUMMARY)


def test_terminal():
    text = shown(SUMMARY)
    for part in (
        "120 steps", "0.45 \u2192 0.91", "held-out greedy", "0.5 \u2192 0.92, best 0.94 at step 110", "none",
        "1.5\u00d7 to 4.5\u00d7, median 3\u00d7",
        "6.0e-6 without \u2192 2.0e-6 with replay  (3\u00d7)",
        "3.3% without \u2192 3% with replay", "rollout 50%", "5,210", "runs/first/report.html",
    ):  # fmt: skip
        assert part in text


def test_terminal_leaves_out_what_is_not_there():
    assert "at step 2" in shown(SUMMARY | {"crash_step": 2})
    text = shown({"steps": 3, "eval_best": None, "crash_step": None})  # never evaluated: no crash could be seen
    for part in ("crash", "reward", "evaluation", "k3", "tokens", "continued", "None"):
        assert part not in text
    text = shown(SUMMARY | {"replay": "off", "mismatch_without_replay": {}, "mismatch_at_probes": {}})
    assert "3.0e-6" in text
    assert "replay" not in text
