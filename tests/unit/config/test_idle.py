"""Settings that change nothing beside the others: accepted, and named in one line on stderr."""

from __future__ import annotations

import logging
import re

import pytest

from onepolicy.cli import main
from onepolicy.cli.common import is_set_by, warn_idle
from onepolicy.config import HFEngineConfig, RunConfig, SGLangConfig, load, resolve
from onepolicy.config.correction import correction_presets
from onepolicy.config.idle import (
    describe_idle,
    idle_engine_settings,
    idle_policy_settings,
    idle_settings,
)
from onepolicy.config.objective import objective_presets
from onepolicy.config.policy import PolicyConfig
from onepolicy.config.serve import ServeConfig
from onepolicy.correct.presets import preset
from support.paths import ROOT

MINIMAL = {"out": "runs/x", "steps": 3, "model": {"path": "tiny"}, "task": {"kind": "chain"}}
SINGLE = "objective.num_minibatches = 1"


def idle(*overrides: str) -> dict[str, str]:
    """Return the idle settings and their reasons."""
    return {each.setting: each.reason for each in idle_settings(resolve(MINIMAL, list(overrides)))}


@pytest.mark.parametrize(
    ("overrides", "setting", "reason"),
    [
        (["model.lm_head=float32"], "model.lm_head", "model.dtype = float32"),
        (
            ["rollout.engine.dtype=float32", "rollout.engine.lm_head=float32"],
            "rollout.engine.lm_head",
            "rollout.engine.dtype = float32",
        ),
        (
            ["rollout.engine.kind=sglang", "rollout.engine.sync_dir=/x"],
            "rollout.engine.sync_dir",
            "rollout.engine.sync = gloo",
        ),
        (
            ["replay.source=reprefill", "replay.missing=native"],
            "replay.missing",
            "replay.source = reprefill",
        ),
        (["replay.mode=r2"], "replay.mode", SINGLE),
        (["replay.duplicate_routes=newest"], "replay.duplicate_routes", "task.kind = chain"),
        (["correction.denominator=kept"], "correction.denominator", "whose ratio is finite"),
        (['correction.protect=["kl"]'], "correction.protect", "whose ratio is finite"),
        (["correction.normalise=self"], "correction.normalise", "with a finite ratio are 1"),
        (["correction.head_size=5"], "correction.head_size", "correction.centering = none"),
        (
            ["correction.preset=icepop", 'correction.protect=["kl", "entropy"]'],
            "correction.protect",
            "no term value",
        ),
        (["objective.lam=0.9"], "objective.lam", "objective.baseline = group"),
        (["objective.critic.lr=1.0"], "objective.critic.lr", "objective.baseline = group"),
        (["objective.gamma=0.9"], "objective.gamma", "compares whole responses"),
        (["objective.reduction_length=9"], "objective.reduction_length", "token-mean"),
        (["objective.overlong_penalty=2.0"], "objective.overlong_penalty", "overlong_buffer = 0"),
        (["objective.surrogate=pg", "objective.clip_low=0.1"], "objective.clip_low", "= pg"),
        (["objective.surrogate=sapo", "objective.dual_clip=3.0"], "objective.dual_clip", "= sapo"),
        (["objective.tau_positive=2.0"], "objective.tau_positive", "= ppo"),
        (
            ["objective.surrogate=pg", "objective.ratio_level=sequence"],
            "objective.ratio_level",
            "objective.surrogate = pg",
        ),
        (
            ["objective.surrogate=cispo", "objective.ratio_level=sequence-token"],
            "objective.ratio_level",
            "as with sequence",
        ),
        (["objective.kl.reference=x"], "objective.kl.reference", "objective.kl.coef = 0"),
        (["objective.kl.where=reward"], "objective.kl.where", "objective.kl.coef = 0"),
        (["objective.kl.estimator=k1"], "objective.kl.estimator", "objective.kl.coef = 0"),
        (["objective.clip_high=0.4"], "objective.clip_high", f"{SINGLE}: .* new / old = 1"),
        (["objective.preset=cispo", "objective.clip_low=0.5"], "objective.clip_low", SINGLE),
        (
            ["objective.dual_clip=3.0", "correction.preset=opsm"],
            "objective.dual_clip",
            SINGLE,
        ),
        (["objective.preset=sapo", "objective.tau_negative=2"], "objective.tau_negative", SINGLE),
        (
            ["objective.preset=ppo", "objective.critic.clip=0.5", "correction.preset=ppo-is"],
            "objective.critic.clip",
            SINGLE,
        ),
        (["train.rank_timeout=5"], "train.rank_timeout", "train.ranks = 0"),
        (
            ["numerics=on-policy", "train.logits_chunk=64"],
            "train.logits_chunk",
            "numerics = on-policy",
        ),
        (
            ["correction.preset=ppo-is", "train.reuse_scoring_forward=true"],
            "train.reuse_scoring_forward",
            "correction ppo-is has no scoring forward",
        ),
        (["cluster.kind=ray", "cluster.auth=none"], "cluster.auth", "cluster.address is unset"),
        (["eval.temperature=0.5"], "eval.temperature", "eval.k = 0"),
        (["eval.top_p=0.9"], "eval.top_p", "eval.k = 0"),
        (["eval.top_k=5"], "eval.top_k", "eval.k = 0"),
        (["eval.quantised=true"], "eval.quantised", "rollout.quant is unset"),
        (
            ["numerics=on-policy", "correction.preset=tis"],
            "correction.preset",
            "old / rollout is exactly 1",
        ),
        (
            ["numerics=on-policy", "correction.preset=k3-rs"],
            "correction.preset",
            "old / rollout is exactly 1",
        ),
        (
            ["numerics=on-policy", "correction={weight={level='token'}}"],
            "correction.weight.level",
            "old / rollout is exactly 1",
        ),
        (
            ["numerics=on-policy", "correction.preset=ppo-is", "objective.clip_high=0.3"],
            "objective.clip_high",
            "has ratio 1",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_idle_setting_is_accepted_and_named_with_its_reason(overrides, setting, reason):
    found = idle(*overrides)
    assert list(found) == [setting]
    assert re.search(reason, found[setting])


@pytest.mark.parametrize(
    "overrides",
    [
        ["steps=3"],
        ["objective.clip_high=0.4", "objective.num_minibatches=2"],
        ["objective.clip_high=0.4", "correction.preset=ppo-is"],  # new / rollout is not 1
        ["objective.preset=ppo", "objective.critic.clip=0.5", "objective.num_minibatches=4"],
        ["objective.clip_high=0.28"],  # set to what it is anyway
        ["objective.kl.coef=0.1", "objective.kl.reference=x"],
        ["model.lm_head=float32", "train.autocast=bfloat16"],
        ["numerics=on-policy", "model.lm_head=same"],
        ["train.ranks=2", "train.rank_timeout=5"],
        ["eval.k=4", "eval.top_p=0.9"],
        ["eval.quantised=true", "rollout.quant=int8"],
        ["replay.duplicate_routes=newest", "rollout.engine.kind=vllm-server"],
        ["replay.mode=r2", "objective.num_minibatches=2"],
    ],
    ids=" ".join,
)
def test_settings_with_an_effect_are_not_named(overrides):
    assert idle(*overrides) == {}


@pytest.mark.parametrize("name", objective_presets())
@pytest.mark.parametrize("baseline", [None, "group"])
def test_values_of_an_objective_preset_are_never_idle(name, baseline):
    """`surrogate = pg` or another baseline leaves clip ranges and lam of a preset without use."""
    overrides = [f"objective.preset={name}"]
    if baseline is not None:
        overrides += [f"objective.baseline={baseline}", "objective.surrogate=pg"]
        overrides += ["objective.normalise=none", "objective.ratio_level=token"]
    found = idle(*overrides)
    assert set(found) <= {"objective.ratio_level"}


@pytest.mark.parametrize("name", correction_presets())
def test_values_of_a_correction_preset_are_never_idle(name):
    overrides = [f"correction.preset={name}"]
    if preset(name).surrogate == "pg":
        overrides.append("objective.preset=reinforce")
    assert idle(*overrides) == {}


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").rglob("*.toml")), ids=lambda p: p.name)
def test_no_recipe_has_an_idle_setting(recipe):
    assert idle_settings(load(recipe)) == []


def test_a_sweep_over_num_minibatches_runs_with_a_fixed_clip_range():
    for count, named in ((1, ["objective.clip_low"]), (2, []), (4, [])):
        overrides = ["objective.clip_low=0.1", f"objective.num_minibatches={count}"]
        assert list(idle(*overrides)) == named


def test_a_sweep_over_the_coefficient_of_a_kl_in_the_reward_runs():
    """Without a coefficient rewards are compared as without a KL."""
    fixed = ["objective.kl.where=reward", "objective.normalise=none"]
    assert list(idle(*fixed)) == ["objective.kl.where"]
    assert idle(*fixed, "objective.kl.coef=0.1") == {}


def test_several_idle_settings_are_one_line():
    config = resolve(MINIMAL, ["eval.top_p=0.9", "objective.lam=0.9", "objective.kl.where=reward"])
    assert describe_idle(idle_settings(config)) == (
        "no effect here: objective.lam = 0.9 (objective.baseline = group); "
        "objective.kl.where = reward (objective.kl.coef = 0); "
        "eval.top_p = 0.9 (eval.k = 0 samples nothing)"
    )


def test_each_idle_setting_is_named_once():
    found = idle_settings(resolve(MINIMAL, ["objective.surrogate=pg", "objective.clip_low=0.1"]))
    assert [each.setting for each in found] == ["objective.clip_low"]


def test_idle_settings_of_the_other_commands():
    policy = PolicyConfig(mistakes=0.0, mistakes_from=0.5)
    assert [each.setting for each in idle_policy_settings(policy)] == ["mistakes_from"]
    assert list(idle_policy_settings(PolicyConfig())) == []
    serve = ServeConfig(dtype="float32", lm_head="float32")
    assert [each.setting for each in idle_engine_settings(serve)] == ["lm_head"]
    assert list(idle_engine_settings(HFEngineConfig(lm_head="float32"))) == []
    server = SGLangConfig(sync="disk", sync_dir="/x")
    assert list(idle_engine_settings(server)) == []


def test_a_sglang_server_reads_its_adapters_from_sync_dir():
    typed = ["rollout.engine.kind=sglang", "rollout.engine.sync_dir=/x", "train.lora.rank=4"]
    names = [each.setting for each in idle_settings(resolve(MINIMAL, typed))]
    assert names == ["rollout.engine.sync_dir"]
    assert idle_settings(resolve(MINIMAL, [*typed, "train.lora.sync=native"])) == []


def test_config_writes_the_line_on_stderr_only(tmp_path, capsys):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'out = "runs/x"\nsteps = 3\nmodel.path = "tiny"\ntask.kind = "chain"\neval.top_p = 0.9\n'
    )
    assert main(["config", str(recipe), "objective.clip_low=0.1"]) == 0
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert line.startswith("onepolicy: no effect here: objective.clip_low = 0.1 (")
    assert line.endswith("; eval.top_p = 0.9 (eval.k = 0 samples nothing)")
    assert "no effect" not in shown.out


def test_commands_that_read_some_sections_name_typed_settings_only(capsys):
    config = resolve(MINIMAL, ["eval.top_p=0.9", "objective.lam=0.9"])
    warn_idle(idle_settings(config), ["eval.top_p=0.9"])
    assert capsys.readouterr().err == (
        "onepolicy: no effect here: eval.top_p = 0.9 (eval.k = 0 samples nothing)\n"
    )
    warn_idle(idle_settings(config), ["eval.k=0"])
    assert capsys.readouterr().err == ""
    assert is_set_by("objective.kl.where", ["objective.kl"])
    assert not is_set_by("objective.kl.where", ["objective.k"])


def test_stored_settings_with_idle_ones_are_read_again_without_a_line(caplog):
    config = resolve(MINIMAL, ["objective.clip_low=0.1", "eval.top_p=0.9"])
    with caplog.at_level(logging.INFO):
        assert RunConfig.model_validate_json(config.model_dump_json()) == config
    assert caplog.messages == []
