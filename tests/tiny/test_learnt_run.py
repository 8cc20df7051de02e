"""A whole run in which every answer is cut before it can be right: it ends well, and says that nothing was learnt."""

import dataclasses
import json

import pytest
from conftest import rows

from onepolicy.loop import step as stepping

CUT = ("steps=4", "rollout.sampling.max_tokens=1", "eval.every=0", "log.counterfactual_every=0", "log.report=true")


@pytest.mark.parametrize(
    ("coefficient", "gradient"),
    [("0", "The gradient was exactly 0: no weight moved."), ("0.01", "came from the entropy bonus")],
)
def test_a_run_without_any_reward_says_so_and_ends_well(train, capsys, coefficient, gradient):
    run = train(None, *CUT, f"objective.entropy_coef={coefficient}")  # exit status 0
    said = capsys.readouterr().out
    assert said.index("warning, after step 3: Nothing was learnt from rewards") < said.index("step    4")
    assert said.count("warning, after step") == 1
    assert all(row["train/reward_max"] == 0 for row in rows(run))
    found = json.loads((run / "summary.json").read_text())["nothing_learnt"]
    assert (found["learnt"], found["silent"], found["steps"]) == ("nothing", 4, 4)
    text = " ".join(found["why"])
    assert gradient in text
    assert "100% of the answers were cut at the length limit (rollout.sampling.max_tokens = 1)" in text
    first = json.loads((run / "samples.jsonl").read_text().splitlines()[0])
    assert f"`{first['response']}`" in text
    page = (run / "report.html").read_text()
    assert page.index("Nothing was learnt from rewards") < page.index("Reward went from 0 to 0")
    assert "no lasting rise" not in page


def test_a_run_with_rewards_that_differ_says_nothing(train, capsys, monkeypatch):
    """The control: the same run, half of whose answers a grader finds right."""
    outcomes = stepping.outcomes

    def alternating(groups, *arguments, **settings):
        graded = [
            dataclasses.replace(
                group,
                samples=tuple(dataclasses.replace(s, reward=float(i % 2)) for i, s in enumerate(group.samples)),
            )
            for group in groups
        ]
        return outcomes(graded, *arguments, **settings)

    monkeypatch.setattr(stepping, "outcomes", alternating)
    run = train(None, *CUT, "objective.entropy_coef=0")
    assert "learnt" not in capsys.readouterr().out
    assert "nothing_learnt" not in json.loads((run / "summary.json").read_text())
    assert all(row["train/groups_without_signal"] == 0 for row in rows(run))
    assert "Nothing was learnt" not in (run / "report.html").read_text()
