"""The study of turn budgets: its runs, when one fails, its exact tests and its verdict."""

import itertools

import pytest
from zero import study

from onepolicy.config import load


def line(budget, arm, seed, start, end, error=None):
    curves = {"reward": [start, 0.0, 0.0, end], "k3": [0.01, 0.02], "routers": [0.1, None]}
    return {"budget": budget, "arm": arm, "seed": seed, "curves": curves, "error": error}


def test_the_runs_are_the_registered_ones():
    jobs = list(study.planned())
    assert len({job.key for job in jobs}) == len(jobs) == 48
    assert {job.seed for job in jobs} == set(range(800, 808))
    assert [job.key for job in jobs[:3]] == [
        ("4", "nothing", 800),
        ("4", "r3", 800),
        ("4", "r3-support", 800),
    ]


def test_every_run_has_valid_settings(tmp_path):
    for job in study.planned([800]):
        config = load(str(study.RECIPE), [f"out={tmp_path}", *job.settings])
        assert config.seed == 800
        assert config.rollout.pressure.seed == 1800
        assert config.task.max_turns == int(job.budget)
        assert config.replay.mode == ("off" if job.arm == "nothing" else "r3")
        # An addition is a turn of the lead and two of the helper; the last turn is the lead's.
        digits = study.PLAN["budgets"][job.budget]["digits"]
        assert config.task.max_turns / 2 < 3 * (digits - 1) + 1 <= config.task.max_turns


def test_a_run_fails_if_it_does_not_rise_or_ends_early():
    assert study.fails(line("4", "r3", 0, 0.5, 0.5))
    assert not study.fails(line("4", "r3", 0, 0.5, 0.51))
    lost = line("4", "r3", 0, 0.5, 0.9, error="lost")
    assert study.fails(lost)
    assert study.last(lost) == 0


def test_a_pilot_is_not_counted_among_the_runs(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["study.py", "--seeds", "800", "700"])
    with pytest.raises(SystemExit):
        study.main()
    assert "the study has no seed 700; give a pilot --results FILE" in capsys.readouterr().err


def test_exact_tests():
    """Of 2^3 flips of (1, 2, 3) two reach a sum of 6, four one of 4; 7 pairs one way: 2 / 2^7."""
    assert study.sign_flips([1, 2, 3]) == pytest.approx(2 / 8)
    assert study.sign_flips([-1, 2, 3]) == pytest.approx(4 / 8)
    assert study.sign_flips([0, 0]) == 1
    assert study.mcnemar(7, 0) == pytest.approx(2 / 2**7)
    assert study.mcnemar(1, 3) == pytest.approx(10 / 16)
    assert study.mcnemar(0, 0) == 1


@pytest.mark.parametrize(
    ("more", "said"), [(0.3, "shown"), (-0.1, "opposite"), (0.05, "not shown")]
)
def test_the_verdict_is_of_the_gain_with_more_turns(more, said):
    """The gain is 0.05 with 4 turns, and as given with 32; a seed without a pair is left out."""
    lines = []
    for seed, (budget, gain) in itertools.product(range(8), (("4", 0.05), ("32", more))):
        lines.append(line(budget, "nothing", seed, 0.5, 0.4))
        if seed < 7:
            lines.append(line(budget, "r3-support", seed, 0.5, 0.4 + gain))
    found = study.verdict(lines)
    p = 1 if said == "not shown" else 2 / 2**7
    assert f" {said} (by {more - 0.05:+.3f}, p = {p:.2g}, 7 of 8 seeds)" in found
    assert study.table(lines).startswith(found)


def test_the_table_counts_failing_pairs():
    lines = [
        line("4", "nothing", 0, 0.5, 0.4),
        line("4", "r3", 0, 0.5, 0.6),
        line("4", "nothing", 1, 0.5, 0.7),
        line("4", "r3", 1, 0.5, 0.6),
    ]
    assert study.discordant(lines, "4", "r3", "nothing") == (1, 0)
    assert "| 4 | r3 | nothing | 2 | 1 / 0 | 1 | +0.050 | 1 |" in study.table(lines)


def test_the_policy_meets_both_budgets():
    """Its warm-up has problems of 2 and of 8 digits, half of them guessed."""
    assert {2, 8} <= set(study.PLAN["policy"]["digits"])
    rows = list(itertools.islice(study.guessing(0), 400))
    leads = [row for row in rows if "<system>lead" in row[0]]
    guessed = [row for row in leads if not row[1].startswith("<think>") and "<tool>" not in row[0]]
    assert 0 < len(guessed) < len(leads)
