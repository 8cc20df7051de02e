"""The study of turn budgets: its runs, when one fails, its exact tests and its verdict."""

import argparse
import itertools
import json
from operator import mul
from statistics import fmean

import pytest
from zero import study

from onepolicy.config import TrainingError, UsageError, load
from support.paths import ROOT


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


def test_a_pilot_has_seeds_and_results_of_its_own(monkeypatch, capsys, tmp_path):
    pilots = str(tmp_path / "pilots.jsonl")
    monkeypatch.setattr(study, "play_all", lambda options: print("plays"))
    for words, said in (
        (["--results", pilots], "seeds 800 to 807 are registered"),
        (["--results", pilots, "--seeds", "700", "803"], "seeds 800 to 807 are registered"),
        (["--results", pilots, "--seeds", "700"], "plays"),
        (["--results", pilots, "--again"], "plays"),
        (["--seeds", "800"], "plays"),
    ):
        monkeypatch.setattr("sys.argv", ["study.py", *words])
        if said == "plays":
            study.main()
        else:
            with pytest.raises(SystemExit):
                study.main()
        assert said in "".join(capsys.readouterr())


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Return what plays a run whose training takes so many steps and ends with an error."""

    def play(error, steps=0, cause=None, arm="r3"):
        def train(config, progress):
            folder = tmp_path / f"4-{arm}-800"
            assert str(folder) == config.out
            assert not folder.exists()  # what a stopped run left is gone
            folder.mkdir()
            rows = [{"step": at + 1, "train/reward": float(at)} for at in range(steps)]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            if error is not None:
                raise error from cause

        monkeypatch.setattr(study, "start_run", train)
        return study.play(study.Job("4", arm, 800), tmp_path)

    return play


def test_a_run_that_fails_gets_a_line_and_a_fault_none(play):
    """A fault of the machine, or of the settings, says nothing about the arm."""
    assert play(TrainingError("NaN"))["error"] == "TrainingError: NaN"
    for error in (AssertionError("lost"), UsageError("routes"), RuntimeError("shapes")):
        line = play(error, steps=2)
        assert line["error"] == f"{type(error).__name__}: {error}"
        assert study.fails(line)
        with pytest.raises(type(error)):
            play(error)
    no_group = TrainingError("step 3: no group has 2 episodes that were played to their end; ...")
    for error, cause in (
        (TrainingError("cannot be written to"), OSError(28, "No space left on device")),
        (no_group, None),
        (MemoryError(), None),
        (OSError("gone"), None),
    ):
        with pytest.raises(type(error)):
            play(error, steps=2, cause=cause)


def test_every_step_of_a_run_is_in_a_quarter(play):
    """Of 18 steps the quarters have 4, 5, 4 and 5; of two each has a block."""
    line = play(None, steps=18)
    assert (line["steps"], line["error"]) == (18, None)
    assert line["curves"]["reward"] == [1.5, 6.0, 10.5, 15.0]
    assert play(None, steps=2)["curves"]["reward"] == [0.0, 1.0, None, None]


def test_two_workers_share_no_file(play, tmp_path):
    """Each arm has problems of its own, and a folder that is played in is refused."""
    play(None)
    play(None, arm="r3-support")
    assert len(list(tmp_path.glob("problems-4-*-800.jsonl"))) == 2
    with (
        study.trials.locked(tmp_path / "4-r3-800.lock", "wait"),
        pytest.raises(SystemExit, match="another process has it"),
    ):
        play(None)


def test_a_line_of_another_plan_is_refused_by_name(play, tmp_path, monkeypatch):
    results = tmp_path / "study.jsonl"
    made = play(None, steps=4)
    results.write_text(json.dumps(made) + "\n")
    assert study.finished(results) == [made]
    monkeypatch.setitem(study.PLAN, "level", 0.1)
    with pytest.raises(UsageError, match="the run 4 r3 800 was made by another plan"):
        study.finished(results)
    results.write_text(json.dumps(made | {"digest": study.digest()}) + "\n")
    assert len(study.finished(results)) == 1


def test_a_run_counts_once(tmp_path, monkeypatch, capsys):
    """A line that is there twice is an error; one that was cut off is left out, then cut off."""
    results = tmp_path / "study.jsonl"
    lines = [
        line("4", arm, 800, 0.5, 0.6) | {"digest": study.digest()} for arm in ("r3", "nothing")
    ]
    texts = [json.dumps(each) for each in lines]
    results.write_text("\n".join([*texts, texts[0]]) + "\n")
    with pytest.raises(UsageError, match="the run 4 r3 800 is there 2 times"):
        study.finished(results)

    results.write_text("\n".join(texts) + "\n" + texts[0][:40])
    assert study.finished(results) == lines
    assert "the last line has no end" in capsys.readouterr().err
    added = lines[0] | {"seed": 801, "seconds": 1}

    def played(play, jobs, workers):
        assert all(job.key != ("4", "r3", 800) for job in jobs)
        with pytest.raises(SystemExit, match="another process has it"):
            study.play_all(options)
        yield added

    monkeypatch.setattr(study.trials, "played", played)
    options = argparse.Namespace(results=results, seeds=None, out=tmp_path, workers=1)
    study.play_all(options)
    assert study.finished(results) == [*lines, added]


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
    """The gain is 0.05 with 4 turns, and as given with 32. There is none without all seeds, however
    plain those are that are there; a pilot's seed is none of them."""
    lines = []
    for seed, (budget, gain) in itertools.product(range(799, 808), (("4", 0.05), ("32", more))):
        lines.append(line(budget, "nothing", seed, 0.5, 0.4))
        lines.append(line(budget, "r3-support", seed, 0.5, 0.4 + gain))
    found = study.verdict(lines)
    p = 1 if said == "not shown" else 2 / 2**8
    assert f" {said} (by {more - 0.05:+.3f}, p = {p:.2g}, 8 seeds)" in found
    assert study.table(lines).startswith(found)
    six = [each for each in lines if each["seed"] < 806]
    assert "not whole yet, 6 of 8 seeds" in study.verdict(six)


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


def test_the_page_has_what_the_runs_measured():
    """Computed once more from the raw lines, with nothing of study.py."""
    text = (ROOT / "benchmarks" / "zero" / "study.jsonl").read_text(encoding="utf-8")
    runs = [json.loads(line) for line in text.splitlines()]
    by_key = {(run["budget"], run["arm"], run["seed"]): run["curves"]["reward"] for run in runs}
    arms, seeds = ("nothing", "r3", "r3-support"), range(800, 808)
    assert len(runs) == len(by_key) == 48
    assert {run["error"] for run in runs} == {None}
    tables = json.loads((ROOT / "docs" / "data" / "zero.json").read_text(encoding="utf-8"))
    (table,) = (each for each in tables if each["id"] == "study")
    for (turns, arm), row in zip(itertools.product(("4", "32"), arms), table["rows"], strict=True):
        rewards = [by_key[turns, arm, seed] for seed in seeds]
        starts, ends = [each[0] for each in rewards], [each[-1] for each in rewards]
        failed = sum(end <= start for start, end in zip(starts, ends, strict=True))
        assert row[:3] == [int(turns), arm, failed]
        assert row[3:5] == pytest.approx([fmean(starts), fmean(ends)], abs=5.1e-4)

    def gain(turns, seed):
        return by_key[turns, "r3-support", seed][-1] - by_key[turns, "nothing", seed][-1]

    more = [gain("32", seed) - gain("4", seed) for seed in seeds]
    sums = [abs(sum(map(mul, more, signs))) for signs in itertools.product((1, -1), repeat=8)]
    p = fmean(each >= sums[0] - 1e-9 for each in sums)
    assert f"(by {fmean(more):+.3f} of the reward, exact p = {p:.2g}, 8 seeds)" in table["claim"]
