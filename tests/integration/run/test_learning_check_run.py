"""Whole runs whose rewards never differ end well and report that the policy learnt nothing."""

import dataclasses
import json

import pytest

from onepolicy.run import step as stepping
from support.metrics import rows

SHORT = ("steps=4", "eval.every=0", "log.counterfactual_every=0", "log.report=true")


@pytest.fixture
def graded(monkeypatch):
    """Return graded(reward of the i-th answer of a group), a grader that does not read the
    answers."""
    compute_outcomes = stepping.compute_outcomes

    def use(reward):
        def with_rewards(groups, *arguments, **settings):
            new = [
                [
                    dataclasses.replace(sample, reward=reward(i))
                    for i, sample in enumerate(group.samples)
                ]
                for group in groups
            ]
            groups = [
                dataclasses.replace(g, samples=tuple(s)) for g, s in zip(groups, new, strict=True)
            ]
            return compute_outcomes(groups, *arguments, **settings)

        monkeypatch.setattr(stepping, "compute_outcomes", with_rewards)

    return use


@pytest.mark.full
@pytest.mark.parametrize(
    ("coefficient", "gradient"),
    [
        ("0", "The gradient was exactly 0: no weight moved."),
        ("0.01", "came from the entropy bonus"),
    ],
)
def test_a_run_without_any_reward_reports_it_and_ends_well(
    train, graded, capsys, coefficient, gradient
):
    graded(lambda i: 0.0)
    run = train(None, *SHORT, f"objective.entropy_coef={coefficient}")  # exit status 0
    said = capsys.readouterr().out
    assert said.index("warning, after step 3: Nothing was learnt from rewards") < said.index(
        "step    4"
    )
    assert said.count("warning, after step") == 1
    assert all(row["train/reward_max"] == 0 for row in rows(run))
    found = json.loads((run / "summary.json").read_text())["nothing_learnt"]
    assert (found["learnt"], found["silent"], found["steps"]) == ("nothing", 4, 4)
    text = " ".join(found["why"])
    assert gradient in text
    assert "Every reward is 0: no answer was right, or the grader found none" in text
    first = json.loads((run / "samples.jsonl").read_text().splitlines()[0])
    assert f"`{first['response']}" in text
    page = (run / "report.html").read_text()
    assert page.index("Nothing was learnt from rewards") < page.index("over 4 steps")
    assert "no lasting rise" not in page


@pytest.mark.full
def test_a_run_with_differing_rewards_gives_no_warning(train, graded, capsys):
    graded(lambda i: float(i % 2))
    run = train(None, *SHORT, "objective.entropy_coef=0")
    assert "learnt" not in capsys.readouterr().out
    assert "nothing_learnt" not in json.loads((run / "summary.json").read_text())
    assert all(row["train/groups_without_signal"] == 0 for row in rows(run))
    assert "Nothing was learnt" not in (run / "report.html").read_text()
