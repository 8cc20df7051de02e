"""A run whose rewards teach nothing reports it: while it runs, in its summary and in its report. No
other run does."""

import json
from io import StringIO

import pytest
from rich.console import Console

from onepolicy.config import resolve
from onepolicy.report.html import write_report
from onepolicy.report.terminal import summary_table
from onepolicy.report.words import unlearnt
from onepolicy.run.learning_check import EXCERPT, nothing_learnt
from onepolicy.run.learning_monitor import PATIENCE, LearningMonitor
from onepolicy.run.progress import terminal_progress
from onepolicy.run.summary import summarise
from support.report_run import make_fixture_run

BASE = {
    "out": "x",
    "steps": 8,
    "model": {"path": "m"},
    "task": {"kind": "chain"},
    "eval": {"every": 0},
}
JSONL = {"task": {"kind": "jsonl", "path": "x.jsonl", "answer_prefix": "A:"}}


def config_of(*overrides, **sections):
    return resolve(BASE | sections, overrides)


def row(step, *, silent=1.0, low=0.0, high=0.0, mean=None, norm=0.0, cut=0.0, entropy=0.9, **more):
    return {
        "step": step,
        "train/reward": (low + high) / 2 if mean is None else mean,
        "train/reward_min": low,
        "train/reward_max": high,
        "train/groups_without_signal": silent,
        "train/grad_norm": norm,
        "train/cut_by_length": cut,
        "train/entropy": entropy,
        **more,
    }


def judged(tmp_path, rows, *overrides, **sections):
    return nothing_learnt(config_of(*overrides, **sections), rows, tmp_path)


def test_no_signal_at_all(tmp_path):
    found = judged(tmp_path, [row(s) for s in range(1, 9)], **JSONL)
    assert found["learnt"] == "nothing"
    assert (found["silent"], found["steps"]) == (8, 8)
    assert (
        found["verdict"]
        == "Nothing was learnt from rewards: no group had two different rewards in any of 8 steps."
    )
    text = " ".join(found["why"])
    assert "The gradient was exactly 0: no weight moved." in text
    assert "Every reward is 0" in text
    assert "task.answer_prefix" in text


HEALTHY = {
    "half of the groups": [row(s, silent=0.5, high=1.0, norm=0.1) for s in range(1, 9)],
    "one group in a hundred": [row(s, silent=0.99, high=1.0, norm=0.1) for s in range(1, 9)],
    "some silent steps in the middle": [
        row(s, silent=1.0 if 3 <= s <= 6 else 0.5, high=1.0, norm=0.1) for s in range(1, 9)
    ],
    "a late start": [
        row(s, silent=1.0 if s <= 5 else 0.5, high=1.0, norm=0.1) for s in range(1, 9)
    ],
    "one step": [row(1, silent=0.5, high=1.0, norm=0.1)],
    "solved in the end": [
        row(s, silent=1.0 if s > 4 else 0.2, low=0.0, high=1.0, norm=0.1) for s in range(1, 9)
    ],
    "the gradient once 0": [
        row(s, silent=0.5, high=1.0, norm=0.0 if s == 3 else 0.1) for s in range(1, 9)
    ],
    "an update skipped": [
        row(s, silent=0.5, high=1.0, norm=None if s == 3 else 0.1)
        | {"train/updates_skipped": float(s == 3)}
        for s in range(1, 9)
    ],
}


@pytest.mark.parametrize("name", HEALTHY)
def test_runs_that_learn_are_left_alone(tmp_path, name):
    assert judged(tmp_path, HEALTHY[name]) is None
    config = config_of()
    summary = summarise(config, HEALTHY[name], tmp_path, None)
    assert "nothing_learnt" not in summary
    assert "learnt" not in shown(summary)


def test_nearly_all_steps_silent_is_little(tmp_path):
    rows = [
        row(s, silent=float(s > 2), low=1.0 if s > 2 else 0.0, high=1.0, norm=0.1)
        for s in range(1, 41)
    ]
    found = judged(tmp_path, rows)
    assert found["learnt"] == "little"
    assert (
        found["verdict"]
        == "Little was learnt from rewards: no group had two different rewards in 38 of 40 steps."
    )
    assert any(
        text.startswith("Every reward is 1: the task is too easy for this policy, or solved")
        for text in found["why"]
    )


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            {"cut": 1.0},
            "100% of the answers were cut at the length limit (rollout.sampling.max_tokens = 20)",
        ),
        ({"cut": 0.6}, "60% of the answers were cut"),
        ({"low": 1.0, "high": 1.0}, "the task is too easy"),
        (
            {"low": 0.25, "high": 0.25},
            "Every reward is 0.25: the grader gives all answers the same",
        ),
        ({"low": -1.0, "high": -1.0}, "Every reward is -1: the grader gives all answers the same"),
        ({"high": 1.0}, "Rewards differ between problems or steps"),
        ({"entropy": 0.001}, "raise rollout.sampling.temperature (0.7)"),
        ({"tools/malformed": 2.5}, "2.5 turns per episode named no tool and no answer"),
    ],
)
def test_the_cause_that_the_metrics_point_to(tmp_path, rows, words):
    settings = ("rollout.sampling.max_tokens=20", "rollout.sampling.temperature=0.7")
    found = judged(tmp_path, [row(s, **rows) for s in range(1, 5)], *settings)
    assert words in " ".join(found["why"])
    calm = judged(tmp_path, [row(s) for s in range(1, 5)], *settings)
    assert words not in " ".join(calm["why"])


@pytest.mark.parametrize(
    ("overrides", "norm", "words"),
    [
        ((), 0.0, "exactly 0: no weight moved"),
        (("optim.weight_decay=0.1",), 0.0, "exactly 0: only weight decay moved the weights"),
        (
            ("objective.entropy_coef=0.01",),
            0.2,
            "came from the entropy bonus: the policy moved, but not towards better",
        ),
        (
            (
                "objective.entropy_coef=0.01",
                "objective.kl.coef=0.1",
                "objective.overlong_buffer=0.5",
            ),
            0.2,
            "came from the entropy bonus and the KL to the reference and the penalty on "
            "overlong answers",
        ),
    ],
)
def test_the_source_of_a_gradient_without_a_reward_signal(tmp_path, overrides, norm, words):
    found = judged(tmp_path, [row(s, norm=norm) for s in range(1, 5)], *overrides)
    assert words in found["why"][0]


def test_rewards_that_differ_but_never_reach_the_weights(tmp_path):
    rows = [
        row(s, silent=0.0, high=1.0, norm=0.0) | {"correction/rejected": 1.0} for s in range(1, 5)
    ]
    found = judged(tmp_path, rows)
    assert (
        found["verdict"]
        == "Nothing was learnt: the gradient was exactly 0 in all 4 steps, though rewards differed."
    )
    assert "left 100% of the tokens out" in found["why"][0]
    skipped = [
        row(s, silent=0.0, high=1.0, norm=None) | {"train/updates_skipped": 1.0}
        for s in range(1, 5)
    ]
    assert "no update was made in 4 steps" in judged(tmp_path, skipped)["verdict"]


def test_objectives_that_do_not_compare_within_a_group(tmp_path):
    """Groups of one have no two rewards. Rewards of a batch, or of a run, tell answers apart."""
    one = [row(s, silent=1.0, low=float(s % 2), high=float(s % 2), norm=0.3) for s in range(1, 7)]
    spread = [row(s, silent=1.0, low=0.0, high=1.0, norm=0.3) for s in range(1, 7)]
    flat = [row(s, silent=1.0, low=0.0, high=0.0, norm=0.3) for s in range(1, 7)]
    for preset, batch in (("ppo", False), ("reinforce++", True)):
        chosen = (f"objective.preset={preset}",)
        assert judged(tmp_path, spread, *chosen) is None
        assert (
            judged(tmp_path, one, *chosen) is None
        ) is not batch  # whitened over the step: equal rewards are 0
        found = judged(tmp_path, flat, *chosen)
        assert "no two answers had different rewards" in found["verdict"]
        assert "did not come from rewards" in found["why"][0]


@pytest.mark.parametrize(
    "damage",
    [
        {"train/groups_without_signal": None},
        {"train/groups_without_signal": "all"},
        {"train/reward": None},
        {"train/reward": "0"},
    ],
)
def test_metrics_that_do_not_say_give_no_verdict(tmp_path, damage):
    assert judged(tmp_path, [row(s) | damage for s in range(1, 5)]) is None
    without = [{k: v for k, v in row(s).items() if k not in damage} for s in range(1, 5)]
    assert judged(tmp_path, without) is None
    assert judged(tmp_path, []) is None


def test_rows_of_older_versions_without_extremes_still_count(tmp_path):
    rows = [
        {"step": s, "train/reward": 0.0, "train/groups_without_signal": 1.0} for s in range(1, 5)
    ]
    assert "Every reward is 0" in " ".join(judged(tmp_path, rows)["why"])


def samples(path, *lines):
    path.mkdir(exist_ok=True)
    (path / "samples.jsonl").write_text("".join(line + "\n" for line in lines))


def test_the_first_sample_is_quoted_on_one_harmless_line(tmp_path):
    text = "[/red] I think\n\x1b[31mso\u202e " + "x" * 1000
    samples(tmp_path, "{damaged", json.dumps({"step": 1, "response": text, "answer": "7"}))
    (look,) = [
        text for text in judged(tmp_path, [row(1), row(2)])["why"] if "samples.jsonl" in text
    ]
    assert "of step 1, reads `[/red] I think [31mso xxx" in look
    assert look.endswith("...`. The right answer is `7`.")
    assert "\x1b" not in look
    assert "\u202e" not in look
    assert len(look) < EXCERPT + 120


def watched(tmp_path, rows, *overrides):
    said = []
    watch = LearningMonitor(config_of(*overrides), tmp_path, said.append)
    for each in rows:
        watch.after_step(each["step"], {k: v for k, v in each.items() if k != "step"})
    return said


def test_a_run_warns_once_after_its_first_steps(tmp_path):
    samples(tmp_path, json.dumps({"step": 1, "response": "seven"}))
    assert watched(tmp_path, [row(s) for s in range(1, PATIENCE)]) == []
    (said,) = watched(tmp_path, [row(s) for s in range(1, 20)])
    assert said.startswith(f"warning, after step {PATIENCE}: Nothing was learnt from rewards")
    assert "`seven`" in said


@pytest.mark.parametrize("name", HEALTHY)
def test_a_run_that_learns_gives_no_warning(tmp_path, name):
    if name == "a late start":
        return
    assert watched(tmp_path, HEALTHY[name]) == []


def test_a_resumed_run_counts_the_steps_before(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(row(s)) + "\n" for s in range(1, PATIENCE))
    )
    (said,) = watched(tmp_path, [row(PATIENCE), row(PATIENCE + 1)])
    assert f"after step {PATIENCE}" in said
    live = [row(s, silent=0.5, high=1.0) for s in range(1, PATIENCE)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in live))
    assert watched(tmp_path, [row(s, norm=0.1) for s in range(PATIENCE, 30)]) == []


def test_a_models_text_is_no_markup_of_the_terminal(capsys):
    with terminal_progress(3) as progress:
        progress.note("it reads `[/red] [bold]x`")
    assert "it reads `[/red] [bold]x`" in capsys.readouterr().out


def shown(summary):
    text = StringIO()
    Console(file=text, width=200, color_system="truecolor", force_terminal=True).print(
        summary_table(summary)
    )
    return text.getvalue()


GREEN = "\x1b[32m"


def test_the_summary_in_the_terminal_puts_it_first(tmp_path):
    rows = [row(s) | ({"eval/greedy": 0.0} if s % 2 == 0 else {}) for s in range(1, 9)]
    config = config_of("eval.every=2", "eval.greedy=true")
    text = shown(summarise(config, rows, tmp_path, None))
    assert text.index("Nothing was learnt from rewards") < text.index("reward  ")
    assert GREEN not in text
    healthy = shown(
        summarise(
            config,
            [each | {"train/groups_without_signal": 0.5, "train/grad_norm": 1.0} for each in rows],
            tmp_path,
            None,
        )
    )
    assert GREEN in healthy


def test_the_report_puts_it_first_and_does_not_reassure(tmp_path):
    run = make_fixture_run(tmp_path / "run", steps=20)
    healthy = write_report(run).read_text()
    rows = [
        json.loads(line)
        | {"train/reward": 0.0, "train/groups_without_signal": 1.0, "train/grad_norm": 0.0}
        for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    config = resolve(json.loads((run / "config.json").read_text()))
    (run / "summary.json").write_text(json.dumps(summarise(config, rows, run, None)))
    page = write_report(run).read_text()
    verdict = page.index("Nothing was learnt from rewards: no group had two different rewards")
    assert verdict < page.index("Reward went from 0 to 0")
    assert verdict < page.index(">nothing<")
    for comfort in ("Reward rises", "The policy learnt"):
        assert comfort in healthy
        assert comfort not in page
    assert "Gradient norm is 0 throughout" in page
    assert "Nothing was learnt" not in healthy


@pytest.mark.parametrize(
    "found", [None, 3, [], {"learnt": "nothing"}, {"learnt": "nothing", "verdict": "x", "why": 3}]
)
def test_a_damaged_summary_does_not_mention_it(found):
    assert unlearnt({"steps": 3, "nothing_learnt": found}) is None
