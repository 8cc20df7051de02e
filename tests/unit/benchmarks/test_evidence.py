"""The study of routing mismatch: which runs it has, when one fails, and its paired tests."""

import argparse
import importlib
import json
import sys
from pathlib import Path

import doc_tables
import pytest
import torch

import onepolicy.train.learner
import onepolicy.train.scorer
from onepolicy.config import ObjectiveConfig, TrainingError, UsageError, load
from onepolicy.objective.loss import policy_loss
from onepolicy.support.trace import SupportTrace
from support.objective_batches import batch
from support.paths import ROOT

FOLDER = ROOT / "benchmarks" / "evidence"


@pytest.fixture(scope="module")
def study():
    """Return the modules run and tables of the study."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("run"), importlib.import_module("tables")
    finally:
        sys.path.remove(str(FOLDER))
        for name in ("run", "tables", "page_rows", "turn_rows", "hold_entropy", "drop_supports"):
            sys.modules.pop(name, None)


@pytest.fixture
def tables(study):
    return study[1]


def planned(study, *names):
    options = argparse.Namespace(studies=names, seeds=None, arms=None, out=Path("runs/evidence"))
    return list(study[0].planned(options))


def line(arm, seed, *sampled, error=None, k3=0.1):
    found = {"study": "main", "arm": arm, "seed": seed, "sampled": list(sampled), "error": error}
    return found | {"curves": {"k3": [0.05, k3]}}


def test_the_main_study_is_the_registered_one(study):
    jobs = planned(study, "main")
    first = [(job.arm, job.seed) for job in jobs[:96]]
    assert first[:4] == [("control", 100), ("recompute", 100), ("r3", 100), ("control", 101)]
    assert {seed for _, seed in first} == set(range(100, 132))
    assert len(jobs) == 11 * 32
    assert len({(job.arm, job.seed) for job in jobs}) == len(jobs)


def test_a_pilot_is_not_played_into_the_registered_runs(study, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["run.py", "main", "--seeds", "100", "5"])
    with pytest.raises(SystemExit):
        study[0].arguments()
    assert "main has no seed 5; give a pilot --results FILE" in capsys.readouterr().err


def test_a_registered_seed_is_no_pilot(study, monkeypatch, capsys):
    for words, refused in (
        (["main", "--seeds", "5", "100"], True),
        (["main"], True),
        (["main", "--seeds", "5"], False),
        (["main", "--seeds", "100", "--again"], False),
        (["pilot-base"], False),
    ):
        monkeypatch.setattr("sys.argv", ["run.py", "--results", "other.jsonl", *words])
        if refused:
            with pytest.raises(SystemExit):
                study[0].arguments()
            assert "main: seeds 100 to 131 are registered" in capsys.readouterr().err
        else:
            assert study[0].arguments().studies == [words[0]]


def test_a_line_says_how_a_run_ended_and_what_made_it(study, tmp_path, monkeypatch, capsys):
    """A full disk gives no line; of 18 steps each is in a tenth."""
    run, job = study[0], study[0].Job("main", "r3", 5, tmp_path / "r3-5")

    def train(config, progress):
        job.folder.mkdir()
        rows = [{"step": at + 1, "train/reward": float(at)} for at in range(18)]
        (job.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        raise error from cause

    monkeypatch.setattr("onepolicy.run.train.start_run", train)
    error, cause = AssertionError("routes"), None
    made = run.play(job)
    assert (made["error"], made["steps"]) == ("AssertionError: routes", 18)
    assert made["curves"]["reward"] == [0, 1.5, 3.5, 5.5, 7.5, 9, 10.5, 12.5, 14.5, 16.5]
    error, cause = TrainingError("cannot be written to"), OSError(28, "No space left on device")
    with pytest.raises(TrainingError):
        run.play(job)

    results = tmp_path / "runs.jsonl"
    monkeypatch.setattr(run, "RESULTS", results)
    monkeypatch.setattr(run, "make_policies", lambda studies: None)
    monkeypatch.setattr(run.trials, "played", lambda play, jobs, workers: [])
    monkeypatch.setitem(run.PLAN["study"]["main"], "seeds", [5, 5])
    monkeypatch.setattr("sys.argv", ["run.py", "main", "--arms", "r3", "--results", str(results)])
    old = {name: value for name, value in made.items() if name != "digest"}
    for line, jobs in ((made | {"digest": job.digest}, 0), (old, 0), (old | {"seed": 6}, 1)):
        results.write_text(json.dumps(line) + "\n")
        run.main()
        assert f"{jobs} runs to play, 1 lines" in capsys.readouterr().out
    results.write_text(json.dumps(made) + "\n")
    with pytest.raises(UsageError, match="the run main r3 5 was made by another plan"):
        run.main()


def test_every_run_has_valid_settings(study):
    """One seed of every arm of every study; pressure only where the arm has it."""
    run, _ = study
    for job in {(job.study, job.arm): job for job in planned(study, *run.PLAN["study"])}.values():
        config = load(run.RECIPE, [f"out={job.folder}", *job.settings])
        pressed = "pressure" in run.PLAN["study"][job.study] and job.arm != "control"
        assert (config.rollout.pressure is not None) == pressed
        if pressed:
            assert config.rollout.pressure.seed == 1000 + job.seed
        assert config.seed == job.seed


def test_a_run_fails_if_it_does_not_rise_or_ends_early(tables):
    assert tables.fails(line("r3", 0, 0.3, 0.3))
    assert tables.fails(line("r3", 0, 0.3, 0.1))
    assert not tables.fails(line("r3", 0, 0.3, 0.301))
    assert tables.fails(line("r3", 0, 0.3, 0.9, error="lost"))


def test_exact_mcnemar(tables):
    """Of 7 discordant pairs all one way p is 2 / 2^7, of 3 and 1 it is 10 / 16."""
    assert tables.mcnemar(7, 0) == pytest.approx(2 / 2**7)
    assert tables.mcnemar(1, 3) == pytest.approx(10 / 16)
    assert tables.mcnemar(0, 0) == 1


def test_pairs_are_of_one_seed(tables):
    there = {seed: line("recompute", seed, 0.3, 0.1) for seed in range(8)}
    here = {seed: line("r3", seed, 0.3, 0.5, k3=0.05) for seed in range(7)}
    here |= {9: line("r3", 9, 0.3, 0.1)}
    start = "| recompute | r3 | 7 | 7 / 0 | 0.016 | +0.400 ± 0.000 | 0.016 |"
    row = tables.paired("recompute", "r3", there, here)
    assert row == f"{start} 0.5 (0.5 to 0.5) | 7 of 7 | 0.016 |"
    here[0] = line("r3", 0, 0.3, 0.5, k3=0.2)
    row = tables.paired("recompute", "r3", there, here)
    assert row.startswith(f"{start} 0.5 (0.5 to 2) | 6 of 7 | ")


def test_late_k3_is_of_pairs_that_went_to_their_end(tables):
    there = {0: line("recompute", 0, 0.3, 0.1), 1: line("recompute", 1, 0.3, 0.1, error="lost")}
    here = {0: line("tis", 0, 0.3, 0.2, k3=0.3), 1: line("tis", 1, 0.3, 0.2, k3=1e-9)}
    assert " 3 (3 to 3) | 0 of 1 | " in tables.paired("recompute", "tis", there, here)


def test_a_page_has_late_k3_by_seed(tables):
    """Ratios 2, 1/2 and 1/4 of three seeds; the fourth pair has a run that ended early.

    What it had reached is in no gap, on a page as in a table. An arm without a whole run has none.
    """
    page_rows = importlib.import_module("page_rows")
    there = {seed: line("recompute", seed, 0.3, 0.1) for seed in range(4)}
    here = {seed: line("tis", seed, 0.3, 0.2) for seed in range(4)}
    for seed, k3 in enumerate((0.2, 0.05, 0.025)):
        here[seed]["curves"]["k3"][-1] = k3
    here[3] |= {"error": "lost", "sampled": [0.3, 0.9]}
    found = page_rows.paired({"recompute": there, "tis": here}, "recompute", "tis")
    names = ("k3 ratio", "k3 lowest", "k3 highest", "k3 lower")
    assert [found[name] for name in names] == ["0.5", "0.25", "2", "2"]
    assert found["k3 wilcoxon"] == "0.75"  # log ratios 1, -1, -2: ranks 1.5, -1.5, -3
    assert (found["pairs"], found["gap"], found["gap sd"]) == ("4", "0.100", "0.000")
    assert " +0.100 ± 0.000 " in tables.paired("recompute", "tis", there, here)

    lost = {3: here[3]}
    found = page_rows.paired({"recompute": there, "tis": lost}, "recompute", "tis")
    assert found == {"pairs": "1", "only there": "0", "only here": "0", "mcnemar": "1"}
    assert page_rows.numbers([here[3]]) == {"runs": "1", "failed": "1"}
    assert tables.course([here[3]], every=40)["last"] == ""


def test_the_interval_of_a_mean(tables):
    """Of 16 gaps the mean's standard error is sd / 4; a mean of equal gaps has none."""
    interval = importlib.import_module("page_rows").interval
    assert interval([0.25] * 5) == "+0.250 to +0.250"
    low, high = map(float, interval([0.1, -0.1] * 8).split(" to "))
    assert (low, high) == pytest.approx((-0.049, 0.049), abs=0.005)  # 1.96 x 0.1 / 4


def test_a_page_puts_the_seeds_of_two_studies_together(study, tmp_path, monkeypatch):
    """Four seeds of one and three of the other, which all fail without replay: p = 2 / 2^7."""
    page_rows = importlib.import_module("page_rows")
    seeds = [("replicate", n) for n in range(132, 136)]
    seeds += [("replicate-2", n) for n in range(148, 151)]
    ends = {"recompute": 0.1, "r3": 0.5}
    found = [line(arm, n, 0.3, ends[arm]) | {"study": s} for s, n in seeds for arm in ends]
    (tmp_path / "both.jsonl").write_text("".join(json.dumps(each) + "\n" for each in found))
    monkeypatch.setattr(page_rows, "FOLDER", tmp_path)
    table = {"file": "both.jsonl", "arms": ["r3"], "against": ["recompute"]}
    values = ["study", "pairs", "only there", "mcnemar"]
    together = {"names": {"replicate+replicate-2": "both"}}
    assert page_rows.rows(table | together, values) == [["both", "7", "7", "0.016"]]
    one = {"names": {"replicate-2": "fresh"}}
    assert page_rows.rows(table | one, values) == [["fresh", "3", "3", "0.25"]]


def turn_run(arm, turns, seed, score, k3):
    rows = [{"mismatch/k3": each, "train/reward": 0.5} for each in k3]
    run = {"arm": arm, "turns": turns, "seed": seed, "rows": rows}
    return run | {"scores": {"eval/avg@2": score}}


def test_rows_of_the_turns_under_pressure(study, tmp_path, monkeypatch):
    """Two seeds by hand: D(4) = 0 and 0.1, D(16) = 0.25 and 0.05, so D(16) - D(4) = 0.25, -0.05."""
    turn_rows = importlib.import_module("turn_rows")
    found = [
        *(turn_run("off", 4, seed, 0.2, [0.01, 0.03]) for seed in (110, 111)),
        *(turn_run("r3", 4, seed, score, [1e-9]) for seed, score in ((110, 0.2), (111, 0.3))),
        *(turn_run("off", 16, seed, 0.5, [0.02, 0.06]) for seed in (110, 111)),
        *(turn_run("r3", 16, seed, score, [1e-9]) for seed, score in ((110, 0.75), (111, 0.55))),
    ]
    path = tmp_path / "turns.jsonl"
    path.write_text("\n".join(map(json.dumps, found)))
    monkeypatch.setattr(turn_rows, "RESULTS", path)
    names = ["turns", "off", "r3", "off k3", "mean", "error", "above", "seed 110", "seed 111"]
    assert turn_rows.rows("reward", names) == [
        ["4", "0.200", "0.250", "2.0e-02", "0.050", "0.050", "1", "0.000", "0.100"],
        ["16", "0.500", "0.650", "4.0e-02", "0.150", "0.100", "2", "0.250", "0.050"],
    ]
    assert turn_rows.rows("gain", ["turns", "mean", "error", "above", "below", "seeds"]) == [
        ["4", "0.100", "0.150", "1", "1", "2"]
    ]


def test_the_bonus_follows_the_entropy(study):
    """Below the target it raises the entropy, above it lowers it; the mean moves a tenth a step."""
    hold_entropy = importlib.import_module("hold_entropy")
    assert hold_entropy.bonus_share(0.09, 0.18) == pytest.approx(0.5)
    assert hold_entropy.bonus_share(0.18, 0.18) == 0
    assert hold_entropy.bonus_share(3.0, 0.18) == -1

    zeros, seen = torch.zeros(2), torch.ones(2, dtype=torch.bool)
    made = batch([2], seen, [0.0], loss_weight=torch.full((2,), 0.5), advantage=zeros)
    made = made.replace(weight=zeros, keep=seen, logp_old=zeros)
    config = ObjectiveConfig(entropy_coef=0.2)
    gradients = []
    with hold_entropy.held_entropy(0.18):
        for value in (0.09, 0.27):
            entropy = torch.full((2,), value, requires_grad=True)
            patched = onepolicy.train.learner.policy_loss
            loss = patched(zeros, made, config=config, logp_behaviour=zeros, entropy=entropy)
            loss[0].backward()
            gradients += entropy.grad.tolist()
    half = -0.5 * 0.2  # of a token's share of the loss
    mean = 0.9 * 0.09 + 0.1 * 0.27
    assert gradients[:2] == pytest.approx([half * 0.5] * 2)
    assert gradients[2:] == pytest.approx([half * (1 - mean / 0.18)] * 2)
    assert onepolicy.train.learner.policy_loss is policy_loss


def test_arms_without_support_score_over_the_whole_vocabulary(study, monkeypatch):
    """Each pair of arms differs in nothing but whether forwards get the sets."""
    run, scorer = study[0], onepolicy.train.scorer
    jobs = {job.arm: job for job in planned(study, "supports") if job.seed == 700}
    for arm in ("support", "support-tis"):
        assert jobs[arm].settings == jobs[f"no-{arm}"].settings
    made = batch([1], torch.ones(1, dtype=torch.bool), [0.0])
    made = made.replace(support=SupportTrace.from_sets([[0, 1]]))
    monkeypatch.setattr(scorer, "forward", lambda model, given: given.support)
    for arm, found in (("no-support", None), ("support", made.support), ("no-support-tis", None)):
        with run.intervention(arm):
            assert scorer.forward(None, made) is found
        assert scorer.forward(None, made) is made.support


def test_growth_is_last_tenth_by_first_tenth_of_k3_without_replay(tables):
    """Of an arm with replay it is that of the batches scored without; seed 401 has one arm."""
    plain = {"curves": {"k3": [0.1, 0.3, 0.2], "unreplayed": [None, None, None]}}
    replayed = {"curves": {"k3": [1e-13, 1e-13, 1e-13], "unreplayed": [0.2, 0.3, 0.1]}}
    assert tables.ratio(plain) == pytest.approx(2)
    assert tables.ratio(replayed) == pytest.approx(0.5)
    found = tables.growth({"recompute": {400: plain, 401: plain}, "r3-probed": {400: replayed}})
    assert found.splitlines()[2:] == [
        "| 400 | 2.00 | 0.50 |",
        "| 401 | 2.00 |  |",
        "| above 1 | 2 of 2 | 0 of 1 |",
        "| below recompute |  | 1 of 1 |",
    ]


def test_crash_step(tables):
    for scores, at in [
        ((0.3, 0.5, 0.6), None),
        ((0.3, 0.5, 0.41), None),  # above 80% of the best
        ((0.3, 0.5, 0.1, 0.1), 2),
        ((0.3, 0.5, 0.1, 0.45, 0.1), 4),  # it came back once
        ((0.5, 0.1, 0.1), 1),
    ]:
        assert tables.crash(scores) == at


def test_course_of_the_runs_that_went_to_their_end(tables):
    lines = [line("r3", 300, 0.3, 0.5, 0.1), line("r3", 301, 0.3, 0.4, 0.6)]
    lines.append(line("r3", 302, 0.3, 0.9, error="NaN"))
    expected = {"whole": "2", "last": "0.350", "best": "0.550", "best step": "60"}
    expected |= {"crashed": "1", "crash step": "80"}
    assert tables.course(lines, every=40) == expected


def test_the_pilots_in_the_tree_are_pilots(study):
    pilots, earlier = (
        [json.loads(each) for each in (FOLDER / name).read_text().splitlines()]
        for name in ("pilots.jsonl", "earlier_pilots.jsonl")
    )
    assert len(earlier) == 88
    assert pilots
    assert all(each["seed"] < 100 for each in earlier + pilots)
    assert all(each["study"].startswith("pilot") for each in pilots)


@pytest.fixture
def demonstration(study):
    yield importlib.import_module("demonstration")
    sys.modules.pop("demonstration", None)


def test_the_page_has_the_demonstration_which_meets_what_was_asked_beforehand(demonstration):
    found = json.loads(demonstration.RESULTS.read_text())
    assert [each["seed"] for each in found] == [0, 1, 2, 3, 4]
    for each in found:
        assert (each["first"], each["other"], *each["lengths"]) == ("off", "r3", 400, 400)
        assert each["k3_ratio"]["value"] > 2
        assert each["k3_ratio"]["low"] > 1.2
    for name, rows in demonstration.tables(found).items():
        assert doc_tables.tables("evidence")[name]["rows"] == rows


def test_the_table_of_steps_is_that_of_the_steps_in_the_tree(
    demonstration, tmp_path, monkeypatch, capsys
):
    """Read again from runs with these steps; the tree is written if it is asked for."""
    found = demonstration.read_steps()
    rows = demonstration.steps_table(found)
    assert doc_tables.tables("evidence")["real-steps"]["rows"] == rows
    written = demonstration.STEPS.read_bytes()
    for seed, columns in found.items():
        for arm in demonstration.ARMS:
            folder = tmp_path / f"{arm}-seed{seed}"
            folder.mkdir()
            pairs = demonstration.METRICS.items()
            steps = [
                {"step": at + 1} | {metric: columns[f"{name}_{arm}"][at] for name, metric in pairs}
                for at in range(400)
            ]
            (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)) + "\n")
    here = tmp_path / demonstration.STEPS.name
    tree = tmp_path / "tree" / here.name
    tree.parent.mkdir()
    monkeypatch.setattr(demonstration, "STEPS", tree)
    for words, path, wrote in (([], here, {}), (["--tree"], tree, {"real-steps": rows})):
        docs = {}
        monkeypatch.setattr(demonstration, "write_docs", docs.update)
        monkeypatch.setattr("sys.argv", ["x", "--steps", str(tmp_path), *words])
        demonstration.main()
        assert docs == wrote
        assert path.read_bytes() == written
        assert bool(list(tree.parent.iterdir())) == bool(words)
    assert "  ".join(rows[0]) in capsys.readouterr().out


def test_the_picture_of_the_demonstration_says_what_the_table_of_steps_does(demonstration):
    figure = demonstration.picture(demonstration.read_steps()[demonstration.PICTURED])
    words = "Replay: 70 of 400 steps above 1e-3 without, 1 with. Mean k3: 1.60e-3 without replay"
    assert figure.title.startswith(words)
    assert (figure.name, figure.width) == (demonstration.PICTURE.stem, "wide")


def test_the_picture_of_the_study_is_that_of_its_runs(study):
    figure = importlib.import_module("figure")
    sys.modules.pop("figure")
    assert figure.OUT.read_text(encoding="utf-8") == figure.drawn()
    assert "18 of 32 runs end at or below their start without, 0 with" in figure.drawn()
    assert figure.drawn().count("<circle") == 64


def test_a_row_of_the_demonstration(demonstration):
    interval = {"value": 95.4, "low": 5.62, "high": 1580.0}
    gain = {"value": -0.051, "low": -0.08, "high": 0.02}
    found = {"seed": 3, "k3": [1.454e-3, 1.2e-5], "k3_ratio": interval, "reward": [0.6, 0.549]}
    found |= {"reward_difference": gain, "held_out": [[0.3, 0.3], [0.5, 0.61]]}
    found["largest_norm"] = [123.4, 9.87]
    rows = demonstration.tables([found])
    assert rows["real-k3"] == [["3", "1.45e-3", "1.20e-5", "95", "5.6", "1580"]]
    reward = ["3", "0.60", "0.55", "-0.05", "-0.08", "0.02", "0.50", "0.61"]
    assert rows["real-reward"] == [reward]
    assert rows["real-norms"] == [["3", "123", "9.9"]]
