"""Recipes, overrides and the errors they give."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepolicy.config import RunConfig, UsageError, apply_override, load, resolve

RECIPES = Path(__file__).parents[2] / "recipes"
MINIMAL = {"out": "runs/x", "steps": 3, "model": {"path": "tiny"}, "task": {"kind": "chain"}}


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.toml")), ids=lambda p: p.name)
def test_every_recipe_loads_and_round_trips(recipe):
    config = load(recipe)
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(("mode", "kind"), [("r3", "off"), ("off", "tis")])
def test_correction_follows_replay_unless_set(mode, kind):
    assert resolve(MINIMAL, [f"replay.mode={mode}"]).correction.kind == kind
    explicit = resolve(MINIMAL, [f"replay.mode={mode}", "correction.kind=tis", "correction.cap=3"])
    assert explicit.correction.cap == 3


def test_override_types():
    config = resolve(MINIMAL, ["optim.lr=1e-4", "optim.betas=[0.8, 0.9]", "eval.greedy=false", "out=runs/a b"])
    assert config.optim.lr == 1e-4
    assert config.optim.betas == (0.8, 0.9)
    assert config.eval.greedy is False
    assert config.out == "runs/a b"


def test_switching_a_variant_drops_the_old_knobs():
    tree = {**MINIMAL, "correction": {"kind": "tis", "cap": 4.0}}
    assert resolve(tree, ["correction.kind=off"]).correction.kind == "off"
    assert tree["correction"] == {"kind": "tis", "cap": 4.0}  # the recipe itself is not touched


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["optim.lrr=1"], ["optim.lrr", "did you mean optim.lr"]),
        (["rollout.engine.slot=1"], ["rollout.engine", "slots"]),
        (["correction.kind=off", "correction.cap=3"], ["correction", "cap", "unknown setting"]),
        (["task.kind=chain", "task.name=chain_sum"], ["task", "name", "unknown setting"]),
        (["task.kind=nonsense"], ["task", "nonsense", "chain", "gym", "jsonl"]),
        (["steps=many"], ["steps", "many"]),
        (["steps=0"], ["steps", "0"]),
        (["optim=3"], ["optim", "3"]),
        (["steps.x=3"], ["steps", "not a section"]),
        (["steps"], ["a.b=value"]),
        (["rollout.sampling.top_p=0.9"], ["top_p=0.9", "eval.top_p"]),
        (["rollout.sampling.top_k=5"], ["top_k=5"]),
        (["rollout.group_size=1"], ["rollout.group_size"]),
        (["objective.mini_steps=3"], ["objective.mini_steps", "3", "8"]),
        (["train.reuse_scoring_forward=true", "objective.mini_steps=2"], ["train.reuse_scoring_forward"]),
        (["train.reuse_scoring_forward=true", "train.activation_checkpointing=true"], ["activation_checkpointing"]),
        (["train.autocast=bfloat16", "model.dtype=bfloat16"], ["train.autocast"]),
    ],
    ids=lambda x: x[0] if x and "=" in str(x[0]) else None,
)
def test_bad_settings_name_field_and_mend(overrides, words):
    with pytest.raises(UsageError) as error:
        resolve(MINIMAL, overrides)
    for word in words:
        assert word in str(error.value)


def test_missing_and_broken_recipes(tmp_path):
    with pytest.raises(UsageError, match=r"nowhere\.toml: no such recipe"):
        load(tmp_path / "nowhere.toml")
    (tmp_path / "broken.toml").write_text("steps = = 3")
    with pytest.raises(UsageError, match=r"broken\.toml: not valid TOML.*line 1"):
        load(tmp_path / "broken.toml")


def test_required_setting_is_named():
    with pytest.raises(UsageError, match="steps: required"):
        resolve({k: v for k, v in MINIMAL.items() if k != "steps"})


@given(st.dictionaries(st.sampled_from("abc"), st.integers(), max_size=3), st.sampled_from("abc"), st.integers())
def test_override_sets_one_leaf_and_keeps_the_rest(section, key, value):
    tree = {"s": section, "other": 1}
    after = apply_override(tree, f"s.{key}={value}")
    assert after == {"s": {**section, key: value}, "other": 1}
    assert tree == {"s": section, "other": 1}
