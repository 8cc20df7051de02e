"""Objective presets resolve, round-trip and print. Settings without effect are refused with the
reason."""

from __future__ import annotations

import json

import pytest

from onepolicy.cli import main
from onepolicy.config import ObjectiveConfig, RunConfig, UsageError, resolve
from onepolicy.config.objective import objective_presets
from onepolicy.objective.presets import markdown_table
from support.paths import ROOT

KL_REWARD = ["objective.kl.coef=1.0", "objective.kl.where=reward"]
MINIMAL = {"out": "x", "steps": 1, "model": {"path": "tiny"}, "task": {"kind": "chain"}}


@pytest.mark.parametrize("name", objective_presets())
def test_presets_round_trip_and_know_their_name(name: str) -> None:
    config = resolve(MINIMAL, [f"objective.preset={name}"])
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    assert config.objective.name == name
    assert (
        resolve(MINIMAL, [f"objective.preset={name}", "objective.num_minibatches=2"]).objective.name
        == f"{name} (changed)"
    )


def test_defaults_are_grpo_with_clip_higher_and_token_mean() -> None:
    config = resolve(MINIMAL).objective
    assert config == ObjectiveConfig()
    assert config.name == "grpo"
    assert (config.baseline, config.normalise, config.surrogate, config.reduction) == (
        "group",
        "std",
        "ppo",
        "token-mean",
    )
    assert (config.clip_low, config.clip_high) == (0.2, 0.28)


def test_another_preset_drops_the_old_ones_settings() -> None:
    tree = {**MINIMAL, "objective": {"preset": "gspo", "clip_low": 1e-3, "num_minibatches": 2}}
    assert resolve(tree).objective.clip_low == 1e-3
    assert resolve(tree, ["objective.preset=ppo"]).objective.clip_low == 0.2


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["objective.preset=grop"], "none is called 'grop'; there are grpo, dr-grpo"),
        (["objective.dual_clip=1.1"], "inside the clip range"),
        (["objective.ratio_level=trajectory"], "leaves every clip range"),
        (["objective.baseline=none"], "std is of a group's rewards"),
        (["objective.preset=ppo", "objective.surrogate=gmpo"], "one advantage per sample"),
        (
            ["objective.preset=reinforce", "objective.surrogate=gmpo", "objective.gamma=0.9"],
            "one per token",
        ),
        (["objective.preset=ppo", "objective.dynamic_sampling=3"], "equal rewards carry a signal"),
        (["objective.kl.coef=0.1", "objective.kl.estimator=k1"], "zero on average"),
        (
            ["objective.kl.coef=0.1", "objective.kl.where=reward"],
            "divided by the standard deviation",
        ),
        (
            [
                "objective.preset=rloo",
                "objective.kl.coef=1.0",
                "objective.kl.where=reward",
                "objective.kl.importance=old",
            ],
            "a reward has no gradient",
        ),
        (
            ["objective.kl.coef=0.1", "objective.kl.importance=old", "correction.preset=ppo-is"],
            "use rollout",
        ),
        (
            [
                "objective.preset=reinforce++",
                "objective.kl.coef=1.0",
                "objective.kl.where=reward",
                "correction.preset=ppo-is",
            ],
            "ppo-is does not compute",
        ),
        (["objective.reduction=prompt-mean", "correction.preset=mis"], "prompt-mean has neither"),
        (["objective.reduction=episode-mean", "correction.preset=mis"], "episode-mean has neither"),
        (["rollout.group_size=1"], "a group of 1 never has an advantage"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else None,
)
def test_contradictions_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(UsageError) as error:
        resolve(MINIMAL, overrides)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["objective.clip_high=0.4", "objective.num_minibatches=2"],
        [
            "objective.clip_high=0.4",
            "correction.preset=ppo-is",
        ],  # new / rollout is not 1 in the first update either
        ["objective.preset=sapo", "objective.tau_negative=2.0", "correction.preset=ppo-is"],
        ["objective.preset=ppo", "objective.critic.clip=0.5", "objective.num_minibatches=4"],
        *([f"objective.preset={name}"] for name in objective_presets()),
        ["objective.preset=gspo", "objective.clip_low=3e-4"],  # what it is anyway
    ],
    ids=" ".join,
)
def test_effective_clips_and_those_of_presets_are_accepted(overrides: list[str]) -> None:
    stored = resolve(MINIMAL, overrides).model_dump_json()
    assert (
        RunConfig.model_validate_json(stored).model_dump_json() == stored
    )  # a run folder's settings are all set


@pytest.mark.parametrize("name", ["reinforce", "reinforce++", "ppo"])
def test_groups_of_one_need_a_baseline_without_siblings(name: str) -> None:
    resolve(MINIMAL, [f"objective.preset={name}", "rollout.group_size=1"])


def test_config_prints_objective_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "objective"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(objective_presets())
    assert main(["config", "objective", "gspo"]) == 0
    printed = capsys.readouterr().out
    assert "2507.18071" in printed
    assert json.loads(printed[printed.index("{") :])["ratio_level"] == "sequence"
    assert main(["config", "objective", "gspoo"]) == 2
    assert "gspoo" in capsys.readouterr().err


def test_the_page_is_current() -> None:
    page = (ROOT / "docs" / "objectives.md").read_text()
    table = markdown_table()
    assert table in page, f"docs/objectives.md is not current; it should contain\n{table}"
