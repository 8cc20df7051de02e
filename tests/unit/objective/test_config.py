"""Objective presets resolve, round-trip and print."""

import json

from onepolicy.cli import main
from onepolicy.config import ObjectiveConfig, RunConfig, resolve, surrogates
from onepolicy.config.presets import objective_presets
from onepolicy.objective.presets import markdown_list
from support.paths import ROOT

MINIMAL = {"out": "x", "steps": 1, "model": {"path": "tiny"}, "task": {"kind": "chain"}}


def with_settings(text):
    """Resolve settings of the objective, and of other sections where a name begins with a dot."""
    return resolve(MINIMAL, [f"objective.{s}".replace("objective..", "") for s in text.split()])


def test_defaults_are_grpo_with_clip_higher_and_token_mean():
    config = resolve(MINIMAL).objective
    assert config == ObjectiveConfig()
    assert config.name == "grpo"
    found = (config.baseline, config.normalise, config.surrogate, config.reduction)
    assert found == ("group", "std", "ppo", "token-mean")
    assert (config.clip_low, config.clip_high) == (0.2, 0.28)


def test_another_preset_drops_the_old_ones_settings():
    tree = {**MINIMAL, "objective": {"preset": "gspo", "clip_low": 1e-3, "num_minibatches": 2}}
    assert resolve(tree).objective.clip_low == 1e-3
    assert resolve(tree, ["objective.preset=ppo"]).objective.clip_low == 0.2


ACCEPTED = [
    "clip_high=0.4 num_minibatches=2",
    "clip_high=0.4 .correction.preset=ppo-is",  # new / rollout is not 1 in the first update either
    "preset=sapo tau_negative=2.0 .correction.preset=ppo-is",
    "preset=ppo critic.clip=0.5 num_minibatches=4",
    "preset=gspo clip_low=3e-4",  # what it is anyway
    *(f"preset={name} .rollout.group_size=1" for name in ("reinforce", "reinforce++", "ppo")),
    *(f"preset={name}" for name in objective_presets()),
]


def test_effective_clips_and_those_of_presets_are_accepted_again_as_a_runs_settings(subtests):
    for overrides in ACCEPTED:
        with subtests.test(overrides=overrides):
            config = with_settings(overrides)
            again = RunConfig.model_validate_json(config.model_dump_json())  # all settings are set
            assert again == config
            assert again.model_dump_json() == config.model_dump_json()


def test_presets_know_their_name(subtests):
    for name in objective_presets():
        with subtests.test(name=name):
            assert with_settings(f"preset={name}").objective.name == name
            changed = with_settings(f"preset={name} num_minibatches=2")
            assert changed.objective.name == f"{name} (changed)"


def test_config_prints_objective_presets(capsys):
    assert main(["config", "objective"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(objective_presets())
    assert main(["config", "objective", "gspo"]) == 0
    printed = capsys.readouterr().out
    assert "2507.18071" in printed
    assert json.loads(printed[printed.index("{") :])["ratio_level"] == "sequence"
    assert main(["config", "objective", "gspoo"]) == 2
    assert "gspoo" in capsys.readouterr().err


def test_the_page_is_current():
    page = (ROOT / "docs" / "objectives.md").read_text()
    for table in (markdown_list(), surrogates.markdown_table()):
        assert table in page, f"docs/objectives.md is not current; it should contain\n{table}"
