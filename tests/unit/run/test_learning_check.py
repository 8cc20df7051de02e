"""A run whose rewards teach nothing reports it: while it runs, in its summary and in its report. No
other run does."""

import json
from io import StringIO

from rich.console import Console

from onepolicy.config import resolve
from onepolicy.report.run_page import write_report
from onepolicy.report.terminal import summary_parts
from onepolicy.run.learning_check import EXCERPT, PATIENCE, LearningMonitor, nothing_learnt
from onepolicy.run.summary import summarise
from onepolicy.run.train_command import terminal_progress
from support.report_run import make_fixture_run

BASE = {"out": "x", "steps": 8, "model": {"path": "m"}, "task": {"kind": "chain"}}
BASE |= {"eval": {"every": 0}}
JSONL = {"task": {"kind": "jsonl", "path": "x.jsonl", "answer_prefix": "A:"}}


def config_of(*overrides, **sections):
    return resolve(BASE | sections, overrides)


def row(step, *, silent=1.0, low=0.0, high=0.0, norm=0.0, cut=0.0, entropy=0.9, **more):
    return {
        "step": step,
        "train/reward": (low + high) / 2,
        "train/reward_min": low,
        "train/reward_max": high,
        "train/groups_without_signal": silent,
        "train/grad_norm": norm,
        "train/cut_by_length": cut,
        "train/entropy": entropy,
        **more,
    }


def rows_of(count, **same):
    return [row(step, **same) for step in range(1, count + 1)]


def judged(tmp_path, rows, *overrides, **sections):
    return nothing_learnt(config_of(*overrides, **sections), rows, tmp_path)


def test_no_signal_at_all(tmp_path):
    found = judged(tmp_path, rows_of(8), **JSONL)
    assert found["learnt"] == "nothing"
    assert (found["silent"], found["steps"]) == (8, 8)
    nothing = "Nothing was learnt from rewards: no group had two different rewards in any of 8"
    assert found["verdict"] == f"{nothing} steps."
    text = " ".join(found["why"])
    for words in ("exactly 0: no weight moved.", "Every reward is 0", "task.answer_prefix"):
        assert words in text


LIVELY = {"silent": 0.5, "high": 1.0, "norm": 0.1}


def changed(steps, **values):
    """Return rows in which some steps have other values."""
    change = {f"train/{name}": value for name, value in values.items()}
    return [row(s, **LIVELY) | (change if s in steps else {}) for s in range(1, 9)]


HEALTHY = {
    "half of the groups": rows_of(8, **LIVELY),
    "one group in a hundred": rows_of(8, **LIVELY | {"silent": 0.99}),
    "some silent steps in the middle": changed([3, 4, 5, 6], groups_without_signal=1.0),
    "a late start": changed([1, 2, 3, 4, 5], groups_without_signal=1.0),
    "one step": rows_of(1, **LIVELY),
    "solved in the end": changed([5, 6, 7, 8], groups_without_signal=1.0),
    "the gradient once 0": changed([3], grad_norm=0.0),
    "an update skipped": changed([3], grad_norm=None, updates_skipped=1.0),
}


def test_runs_that_learn_are_left_alone(tmp_path, subtests):
    for name, rows in HEALTHY.items():
        with subtests.test(name):
            assert judged(tmp_path, rows) is None
            summary = summarise(config_of(), rows, tmp_path, None)
            assert "nothing_learnt" not in summary
            assert "learnt" not in shown(summary)
            if name != "a late start":
                assert watched(tmp_path, rows) == []


def test_steps_without_malformed_turns_count_as_such(tmp_path):
    rows = rows_of(8)
    rows[0]["tools/malformed"] = 2.5
    assert "tools/malformed" not in " ".join(judged(tmp_path, rows)["why"])


def test_nearly_all_steps_silent_is_little(tmp_path):
    rows = rows_of(2, silent=0.0, high=1.0, norm=0.1)
    rows += rows_of(40, low=1.0, high=1.0, norm=0.1)[2:]
    found = judged(tmp_path, rows)
    assert found["learnt"] == "little"
    little = "Little was learnt from rewards: no group had two different rewards in 38 of 40 steps."
    assert found["verdict"] == little
    easy = "Every reward is 1: the task is too easy for this policy, or solved"
    assert any(text.startswith(easy) for text in found["why"])


CAUSES = [
    ({"cut": 1.0}, "100% of the answers were cut at the length limit"),
    ({"cut": 1.0}, "(rollout.sampling.max_tokens = 20)"),
    ({"cut": 0.6}, "60% of the answers were cut"),
    ({"low": 1.0, "high": 1.0}, "the task is too easy"),
    ({"low": 0.25, "high": 0.25}, "Every reward is 0.25: the grader gives all answers the same"),
    ({"low": -1.0, "high": -1.0}, "Every reward is -1: the grader gives all answers the same"),
    ({"high": 1.0}, "Rewards differ between problems or steps"),
    ({"entropy": 0.001}, "raise rollout.sampling.temperature (0.7)"),
    ({"tools/malformed": 2.5}, "2.5 turns per episode named no tool and no answer"),
]


def test_the_cause_that_the_metrics_point_to(tmp_path, subtests):
    settings = ("rollout.sampling.max_tokens=20", "rollout.sampling.temperature=0.7")
    calm = " ".join(judged(tmp_path, rows_of(4), *settings)["why"])
    for change, words in CAUSES:
        with subtests.test(words):
            assert words in " ".join(judged(tmp_path, rows_of(4, **change), *settings)["why"])
            assert words not in calm


BONUS, KL = "objective.entropy_coef=0.01", "objective.kl.coef=0.1"
GRADIENTS = [
    ((), 0.0, "exactly 0: no weight moved"),
    (("optim.weight_decay=0.1",), 0.0, "exactly 0: only weight decay moved the weights"),
    ((BONUS,), 0.2, "came from the entropy bonus: the policy moved, but not towards better"),
    (
        (BONUS, KL, "objective.overlong_buffer=0.5"),
        0.2,
        "the entropy bonus and the KL to the reference and the penalty on overlong answers",
    ),
]


def test_the_source_of_a_gradient_without_a_reward_signal(tmp_path, subtests):
    for overrides, norm, words in GRADIENTS:
        with subtests.test(words):
            assert words in judged(tmp_path, rows_of(4, norm=norm), *overrides)["why"][0]


def test_rewards_that_differ_but_never_reach_the_weights(tmp_path):
    rows = rows_of(4, silent=0.0, high=1.0, **{"correction/rejected": 1.0})
    found = judged(tmp_path, rows)
    nothing = "Nothing was learnt: the gradient was exactly 0 in all 4 steps, though rewards"
    assert found["verdict"] == f"{nothing} differed."
    assert "left 100% of the tokens out" in found["why"][0]
    skipped = rows_of(4, silent=0.0, high=1.0, norm=None, **{"train/updates_skipped": 1.0})
    assert "no update was made in 4 steps" in judged(tmp_path, skipped)["verdict"]


def test_objectives_that_do_not_compare_within_a_group(tmp_path):
    """Groups of one have no two rewards. Rewards of a batch, or of a run, tell answers apart."""
    one = [row(s, low=float(s % 2), high=float(s % 2), norm=0.3) for s in range(1, 7)]
    spread, flat = rows_of(6, high=1.0, norm=0.3), rows_of(6, norm=0.3)
    for preset, batch in (("ppo", False), ("reinforce++", True)):
        chosen = (f"objective.preset={preset}",)
        assert judged(tmp_path, spread, *chosen) is None
        # whitened over the step: equal rewards are 0
        assert (judged(tmp_path, one, *chosen) is None) is not batch
        found = judged(tmp_path, flat, *chosen)
        assert "no two answers had different rewards" in found["verdict"]
        assert "did not come from rewards" in found["why"][0]


def test_metrics_that_do_not_say_give_no_verdict(tmp_path, subtests):
    assert judged(tmp_path, []) is None
    for name, values in {"groups_without_signal": (None, "all"), "reward": (None, "0")}.items():
        for value in values:
            with subtests.test(name=name, value=value):
                rows = rows_of(4, **{f"train/{name}": value})
                assert judged(tmp_path, rows) is None
        without = [{k: v for k, v in each.items() if k != f"train/{name}"} for each in rows_of(4)]
        assert judged(tmp_path, without) is None


def test_rows_of_older_versions_without_extremes_still_count(tmp_path):
    old = {"train/reward": 0.0, "train/groups_without_signal": 1.0}
    rows = [{"step": step} | old for step in range(1, 5)]
    assert "Every reward is 0" in " ".join(judged(tmp_path, rows)["why"])


def samples(path, *lines):
    path.mkdir(exist_ok=True)
    (path / "samples.jsonl").write_text("".join(line + "\n" for line in lines))


def test_the_first_sample_is_quoted_on_one_harmless_line(tmp_path):
    text = "[/red] I think\n\x1b[31mso\u202e " + "x" * 1000
    samples(tmp_path, "{damaged", json.dumps({"step": 1, "response": text, "answer": "7"}))
    (look,) = [text for text in judged(tmp_path, rows_of(2))["why"] if "samples.jsonl" in text]
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
    assert watched(tmp_path, rows_of(PATIENCE - 1)) == []
    (said,) = watched(tmp_path, rows_of(19))
    assert said.startswith(f"warning, after step {PATIENCE}: Nothing was learnt from rewards")
    assert "`seven`" in said


def logged(folder, rows):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))


def test_a_resumed_run_counts_the_steps_before(tmp_path):
    logged(tmp_path, rows_of(PATIENCE - 1))
    (said,) = watched(tmp_path, [row(PATIENCE), row(PATIENCE + 1)])
    assert f"after step {PATIENCE}" in said
    logged(tmp_path, rows_of(PATIENCE - 1, silent=0.5, high=1.0))
    assert watched(tmp_path, [row(s, norm=0.1) for s in range(PATIENCE, 30)]) == []


def test_a_models_text_is_no_markup_of_the_terminal(capsys):
    with terminal_progress(3) as progress:
        progress.note("it reads `[/red] [bold]x`")
    assert "it reads `[/red] [bold]x`" in capsys.readouterr().out


def shown(summary):
    text = StringIO()
    console = Console(file=text, width=200, color_system="truecolor", force_terminal=True)
    for part in summary_parts(summary):
        console.print(part)
    return text.getvalue()


GREEN = "\x1b[32m"


def test_the_summary_in_the_terminal_puts_it_first(tmp_path):
    rows = [row(s) | ({"eval/greedy": 0.0} if s % 2 == 0 else {}) for s in range(1, 9)]
    config = config_of("eval.every=2", "eval.greedy=true")
    text = shown(summarise(config, rows, tmp_path, None))
    assert text.index("Nothing was learnt from rewards") < text.index("Reward  ")
    assert GREEN not in text
    lively = {"train/groups_without_signal": 0.5, "train/grad_norm": 1.0}
    healthy = summarise(config, [each | lively for each in rows], tmp_path, None)
    assert GREEN in shown(healthy)


def test_the_report_puts_it_first_and_does_not_reassure(tmp_path):
    run = make_fixture_run(tmp_path / "run", steps=20)
    healthy = write_report(run).read_text()
    silent = {"train/reward": 0.0, "train/groups_without_signal": 1.0, "train/grad_norm": 0.0}
    before = (run / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) | silent for line in before]
    logged(run, rows)
    config = resolve(json.loads((run / "config.json").read_text()))
    (run / "summary.json").write_text(json.dumps(summarise(config, rows, run, None)))
    page = write_report(run).read_text()
    verdict = page.index("Nothing was learnt from rewards: no group had two different rewards")
    assert verdict < page.index(">nothing<")
    for comfort in ("Reward rises", "The policy learnt"):
        assert comfort in healthy
        assert comfort not in page
    assert "Gradient norm is 0 throughout" in page
    assert "Nothing was learnt" not in healthy
