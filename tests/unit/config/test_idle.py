"""Settings that change nothing beside the others: accepted, and named in one line on stderr."""

import logging
import re
from itertools import product

from onepolicy.cli import main
from onepolicy.cli.common import is_set_by, warn_idle
from onepolicy.config import HFEngineConfig, RunConfig, SGLangConfig, load, resolve
from onepolicy.config.engine import ServeConfig
from onepolicy.config.idle import (
    describe_idle,
    idle_engine_settings,
    idle_policy_settings,
    idle_settings,
)
from onepolicy.config.policy import PolicyConfig
from onepolicy.config.presets import correction_presets, objective_presets
from onepolicy.correct.presets import preset
from support.paths import ROOT

MINIMAL = {"out": "runs/x", "steps": 3, "model": {"path": "tiny"}, "task": {"kind": "chain"}}
SINGLE = "objective.num_minibatches = 1"


def idle(*overrides: str) -> dict[str, str]:
    """Return the idle settings, each of which is named once, and their reasons."""
    found = idle_settings(resolve(MINIMAL, list(overrides)))
    reasons = {each.setting: each.reason for each in found}
    assert len(reasons) == len(found)
    return reasons


EXACT = "old / rollout is exactly 1"
IDLE = [  # overrides, of which the last is idle, and the reason
    ("model.lm_head=float32", "model.dtype = float32"),
    ("rollout.engine.dtype=float32 rollout.engine.lm_head=float32", "engine.dtype = float32"),
    ("rollout.engine.kind=sglang rollout.engine.sync_dir=/x", "rollout.engine.sync = gloo"),
    ("replay.source=reprefill replay.missing=native", "replay.source = reprefill"),
    ("replay.mode=r2", SINGLE),
    ("replay.duplicate_routes=newest", "task.kind = chain"),
    ("correction.denominator=kept", "whose ratio is finite"),
    ('correction.protect=["kl"]', "whose ratio is finite"),
    ("correction.normalise=self", "with a finite ratio are 1"),
    ("correction.preset=geo-rs correction.normalise=batch", "with a finite ratio are 1"),
    ("correction.head_size=5", "correction.centering = none"),
    ('correction.preset=icepop correction.protect=["kl","entropy"]', "no term value"),
    ("objective.lam=0.9", "objective.baseline = group"),
    ("objective.critic.lr=1.0", "objective.baseline = group"),
    ("objective.gamma=0.9", "compares whole responses"),
    ("objective.reduction_length=9", "token-mean"),
    ("objective.overlong_penalty=2.0", "overlong_buffer = 0"),
    ("objective.surrogate=pg objective.clip_low=0.1", "= pg"),
    ("objective.surrogate=sapo objective.dual_clip=3.0", "= sapo"),
    ("objective.tau_positive=2.0", "= ppo"),
    ("objective.surrogate=pg objective.ratio_level=sequence", "objective.surrogate = pg"),
    ("objective.surrogate=cispo objective.ratio_level=sequence-token", "as with sequence"),
    ("objective.kl.reference=x", "objective.kl.coef = 0"),
    ("objective.kl.where=reward", "objective.kl.coef = 0"),
    ("objective.kl.estimator=k1", "objective.kl.coef = 0"),
    ("objective.clip_high=0.4", f"{SINGLE}: .* new / old = 1"),
    ("objective.preset=cispo objective.clip_low=0.5", SINGLE),
    ("correction.preset=opsm objective.dual_clip=3.0", SINGLE),
    ("objective.preset=sapo objective.tau_negative=2", SINGLE),
    ("objective.preset=ppo correction.preset=ppo-is objective.critic.clip=0.5", SINGLE),
    ("train.rank_timeout=5", "train.ranks = 0"),
    ("numerics=on-policy train.logits_chunk=64", "numerics = on-policy"),
    ("correction.preset=ppo-is train.reuse_scoring_forward=true", "ppo-is has no scoring forward"),
    ("cluster.kind=ray cluster.auth=none", "cluster.address is unset"),
    ("eval.temperature=0.5", "eval.k = 0"),
    ("eval.top_p=0.9", "eval.k = 0"),
    ("eval.top_k=5", "eval.k = 0"),
    ("eval.quantised=true", "rollout.quant is unset"),
    ("numerics=on-policy correction.preset=tis", EXACT),
    ("numerics=on-policy correction.preset=k3-rs", EXACT),
    ("numerics=on-policy correction.weight.level=token", EXACT),
    ("numerics=on-policy correction.preset=ppo-is objective.clip_high=0.3", "has ratio 1"),
]
WITH_EFFECT = [
    "steps=3",
    "objective.clip_high=0.4 objective.num_minibatches=2",
    "objective.clip_high=0.4 correction.preset=ppo-is",  # new / rollout is not 1
    "objective.preset=ppo objective.critic.clip=0.5 objective.num_minibatches=4",
    "objective.clip_high=0.28",  # set to what it is anyway
    "objective.kl.coef=0.1 objective.kl.reference=x",
    "model.lm_head=float32 train.autocast=bfloat16",
    "numerics=on-policy model.lm_head=same",
    "train.ranks=2 train.rank_timeout=5",
    "eval.k=4 eval.top_p=0.9",
    "eval.quantised=true rollout.quant=int8",
    "replay.duplicate_routes=newest rollout.engine.kind=vllm-server",
    "replay.mode=r2 objective.num_minibatches=2",
]


def test_an_idle_setting_is_accepted_and_named_with_its_reason(subtests):
    for typed, reason in IDLE:
        with subtests.test(typed):
            overrides = typed.split()
            found = idle(*overrides)
            assert list(found) == [overrides[-1].partition("=")[0]]
            assert re.search(reason, *found.values())


def test_settings_with_an_effect_are_not_named(subtests):
    for typed in WITH_EFFECT:
        with subtests.test(typed):
            assert idle(*typed.split()) == {}


def test_values_of_an_objective_preset_are_never_idle(subtests):
    """`surrogate = pg` or another baseline leaves clip ranges and lam of a preset without use."""
    other = ["baseline=group", "surrogate=pg", "normalise=none", "ratio_level=token"]
    for name, more in product(objective_presets(), ([], other)):
        with subtests.test(name, more=more):
            found = idle(f"objective.preset={name}", *(f"objective.{each}" for each in more))
            assert set(found) <= {"objective.ratio_level"}


def test_values_of_a_correction_preset_are_never_idle(subtests):
    for name in correction_presets():
        overrides = [f"correction.preset={name}"]
        if preset(name).surrogate == "pg":
            overrides.append("objective.preset=reinforce")
        with subtests.test(name):
            assert idle(*overrides) == {}


def test_no_recipe_has_an_idle_setting():
    found = {path: idle_settings(load(path)) for path in (ROOT / "recipes").rglob("*.toml")}
    assert len(found) > 5
    assert {path: each for path, each in found.items() if each} == {}


def test_a_sweep_over_num_minibatches_runs_with_a_fixed_clip_range():
    for count, named in ((1, ["objective.clip_low"]), (2, []), (4, [])):
        found = idle("objective.clip_low=0.1", f"objective.num_minibatches={count}")
        assert list(found) == named


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


def test_idle_settings_of_the_other_commands():
    policy = PolicyConfig(mistakes=0.0, mistakes_from=0.5)
    assert [each.setting for each in idle_policy_settings(policy)] == ["mistakes_from"]
    assert list(idle_policy_settings(PolicyConfig())) == []
    serve = ServeConfig(dtype="float32", lm_head="float32")
    assert [each.setting for each in idle_engine_settings(serve)] == ["lm_head"]
    assert list(idle_engine_settings(HFEngineConfig(lm_head="float32"))) == []
    assert list(idle_engine_settings(SGLangConfig(sync="disk", sync_dir="/x"))) == []


def test_a_sglang_server_reads_its_adapters_from_sync_dir():
    typed = ["rollout.engine.kind=sglang", "rollout.engine.sync_dir=/x", "train.lora.rank=4"]
    assert list(idle(*typed)) == ["rollout.engine.sync_dir"]
    assert idle(*typed, "train.lora.sync=native") == {}


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


def test_a_server_of_ours_names_them_too(monkeypatch, capsys):
    monkeypatch.setattr("onepolicy.launch.engine_server.serve_model", lambda *_, **__: 0)
    assert main(["engine", "serve", "tiny", "dtype=float32", "lm_head=float32"]) == 0
    assert "no effect here: lm_head = float32 (dtype = float32)" in capsys.readouterr().err


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
