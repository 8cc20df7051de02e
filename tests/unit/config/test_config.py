"""Recipes, overrides and the errors they give."""

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onepolicy.config import R3, JsonlTask, RunConfig, UsageError, apply_override, load, resolve
from onepolicy.config.policy import PolicyConfig
from onepolicy.config.rules import value_at
from onepolicy.config.serve import ServeConfig
from support.paths import ROOT

RECIPES = ROOT / "recipes"
MINIMAL = {"out": "runs/x", "steps": 3, "model": {"path": "tiny"}, "task": {"kind": "chain"}}
REACT = [
    "task.kind=react",
    'task.problems={kind="gym", name="chain_sum"}',
    'task.tools=[{kind="calculator"}]',
]


def test_every_recipe_loads_and_round_trips(subtests):
    for recipe in sorted(RECIPES.glob("*.toml")):
        with subtests.test(recipe.name):
            config = load(recipe)
            assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_correction_follows_replay_unless_set(subtests):
    for mode, preset, typed in (
        ("r3", "recompute", []),
        ("r3", "recompute", ["replay.mode=r3"]),
        ("off", "tis", ["replay.mode=off"]),
        ("r2", "tis", ["replay.mode=r2", "objective.num_minibatches=2"]),
        ("soft", "recompute", ["replay.mode=soft", "replay.ratio=0.5"]),
        ("weights", "recompute", ["replay.mode=weights"]),
    ):
        with subtests.test(mode, typed=typed):
            config = resolve(MINIMAL, typed)
            assert (config.correction.preset, config.replay.mode) == (preset, mode)
            typed += ["correction.preset=tis", "correction.weight.high=3"]
            assert resolve(MINIMAL, typed).correction.weight.high == 3


def test_replay_without_a_mode_is_r3():
    assert resolve({**MINIMAL, "replay": {}}).replay == R3()


def test_override_types():
    typed = ["optim.lr=1e-4", "optim.betas=[0.8, 0.9]", "out=runs/a b"]
    config = resolve(MINIMAL, [*typed, "train.reuse_scoring_forward=true"])
    assert config.optim.lr == 1e-4
    assert config.optim.betas == (0.8, 0.9)
    assert config.train.reuse_scoring_forward is True
    assert config.out == "runs/a b"


def test_switching_a_variant_drops_the_old_knobs():
    tree = {**MINIMAL, "correction": {"preset": "tis", "weight": {"high": 4.0}}}
    assert resolve(tree, ["correction.preset=off"]).correction.preset == "recompute"
    # the recipe itself is not touched
    assert tree["correction"] == {"preset": "tis", "weight": {"high": 4.0}}
    soft = {**MINIMAL, "replay": {"mode": "soft", "ratio": 0.5}}
    assert resolve(soft, ["replay.mode=off"]).replay.mode == "off"


def test_another_engine_keeps_what_was_typed_beside_it():
    recipe = {**MINIMAL, "rollout": {"engine": {"kind": "hf", "max_num_seqs": 96}}}
    engine = resolve(recipe, ["rollout.engine.max_len=512", "rollout.engine.kind=vllm"])
    assert engine.rollout.engine.max_len == 512
    assert engine.rollout.engine.max_num_seqs == 64  # the default: the recipe's goes
    with pytest.raises(UsageError, match=r"rollout\.engine\.kv_cache_gib: unknown"):
        resolve(recipe, ["rollout.engine.kv_cache_gib=2", "rollout.engine.kind=vllm-server"])
    # of two kinds, as where an arm of `compare` has its own, the first one's settings go
    server = ["rollout.engine.kind=vllm-server", "rollout.engine.url=http://a:1"]
    assert resolve(recipe, [*server, "rollout.engine.kind=hf"]).rollout.engine.kind == "hf"


def test_a_preset_keeps_what_was_typed_beside_it(subtests):
    """Whatever the order: the last preset, and the settings of its section."""
    recipe = {**MINIMAL, "objective": {"preset": "reinforce++", "num_minibatches": 4}}
    two, gspo = "objective.num_minibatches=2", "objective.preset=gspo"
    for typed, preset, minibatches in (
        ([gspo], "gspo", 1),
        ([gspo, two], "gspo", 2),
        ([two, gspo], "gspo", 2),
        (["objective.preset=rloo", two, gspo], "gspo", 2),
        ([two, gspo, "objective.preset=rloo"], "rloo", 2),
        ([two, "objective={preset='rloo'}", gspo], "gspo", 1),
    ):
        with subtests.test(typed=typed):
            objective = resolve(recipe, typed).objective
            assert (objective.preset, objective.num_minibatches) == (preset, minibatches)


def test_overrides_of_a_stored_run(subtests):
    """A stored run writes sections that are not there as null, and the default of held_out."""
    stored = resolve(MINIMAL, ["task.kind=jsonl", "task.path=a"]).model_dump()
    for typed, path, value in (
        (["rollout.quant.format=int8"], "rollout.quant", {"format": "int8"}),
        (["rollout.pressure.scale=0.6", "replay.min_agreement=0"], "rollout.pressure.scale", 0.6),
        (["task.held_out_path=b"], "task.held_out_path", "b"),
    ):
        with subtests.test(typed=typed):
            found = value_at(resolve(stored, typed), path)
            assert found == value or found.model_dump().items() >= value.items()
    for recipe, typed, path, value in (  # and a recipe may write a bare word
        ({"train": {"lora": "off"}}, "train.lora.rank=16", "train.lora.rank", 16),
        ({"rollout": {"pressure": "off"}}, "rollout.pressure.scale=2", "rollout.pressure.scale", 2),
        ({"rollout": {"quant": "off"}}, "rollout.quant.format=fp8", "rollout.quant.format", "fp8"),
        ({"rollout": {"quant": "simulated"}}, "rollout.quant.bits=3", "rollout.quant.bits", 3),
    ):
        with subtests.test(typed, recipe=recipe):
            config = resolve(MINIMAL | recipe, [typed, "replay.min_agreement=0"])
            assert value_at(config, path) == value
    with pytest.raises(UsageError, match="leave one of the two out"):
        resolve(stored, ["task.held_out=5", "task.held_out_path=b"])
    with pytest.raises(UsageError, match=r"optim\.lr is a value, not a section"):
        resolve(stored, ["optim.lr.x=5"])


def test_values_of_any_length_and_depth_are_refused():
    for value in (5000 * "1", 5000 * "["):
        with pytest.raises(UsageError, match=r"\Asteps: "):
            resolve(MINIMAL, [f"steps={value}"])


def test_a_refused_tool_is_not_also_a_missing_one():
    with pytest.raises(UsageError) as error:
        resolve(MINIMAL, [*REACT, 'task.tools=[{kind="python", seconds=0}]'])
    assert str(error.value) == "task.tools.0.seconds: Input should be greater than 0 (value 0)"


def test_missing_and_broken_recipes(tmp_path):
    for name, content, words in (
        ("nowhere.toml", None, r"nowhere\.toml: no such recipe"),
        ("", None, rf"{tmp_path}: a folder, not a recipe"),
        ("broken.toml", b"steps = = 3", r"broken\.toml: not valid TOML.*line 1"),
        ("deep.toml", b"x = " + 5000 * b"[", r"deep\.toml: not valid TOML"),
        ("latin.toml", b'out = "\xe9"', r"latin\.toml: not UTF-8 .* at byte 7"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=words):
            load(tmp_path / name)


def test_a_held_out_path_round_trips():
    """The stored settings must not set fields that the recipe left out."""
    task = {"kind": "jsonl", "path": "a", "held_out_path": "b"}
    config = resolve({**MINIMAL, "task": task})
    assert isinstance(config.task, JsonlTask)
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    assert resolve(config.model_dump()) == config


def test_seed_bounds():
    for seed in (0, 2**63 - 1):
        assert resolve(MINIMAL, [f"seed={seed}"]).seed == seed


def test_required_setting_is_named():
    with pytest.raises(UsageError, match="steps: required"):
        resolve({k: v for k, v in MINIMAL.items() if k != "steps"})


SECTIONS = st.dictionaries(st.sampled_from("abc"), st.integers(), max_size=3)


@settings(max_examples=30)
@given(SECTIONS, st.sampled_from("abc"), st.integers())
def test_override_sets_one_leaf_and_keeps_the_rest(section, key, value):
    tree = {"s": section, "other": 1}
    after = apply_override(tree, f"s.{key}={value}")
    assert after == {"s": {**section, key: value}, "other": 1}
    assert tree == {"s": section, "other": 1}


def test_settings_of_several_turns():
    server = ["rollout.engine.kind=vllm-server", "rollout.engine.url=http://127.0.0.1:1"]
    for several in (REACT, server):  # updates may interrupt a turn of a server
        run = resolve(MINIMAL, [*several, "replay.duplicate_routes=newest"])
        assert run.replay.duplicate_routes == "newest"


@pytest.mark.process
def test_config_into_a_closed_pipe_is_no_error():
    """The command is `onepolicy config preset | head -3`."""
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "onepolicy", "config", "preset"]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


BOUNDED = ("Bounds", "Gate", "Weight")
UNBOUNDED = {f"{of}.{end}" for of in BOUNDED for end in ("low", "high")}  # only compared with


@pytest.mark.parametrize("kind", [RunConfig, PolicyConfig, ServeConfig])
def test_every_number_has_a_largest_value(kind):
    schema = kind.model_json_schema()
    without, seen = set(), 0
    for section, about in {kind.__name__: schema, **schema["$defs"]}.items():
        for name, field in about.get("properties", {}).items():
            for variant in [field, *field.get("anyOf", ())]:
                if variant.get("type") in ("integer", "number"):
                    seen += 1
                    if not {"maximum", "exclusiveMaximum"} & variant.keys():
                        without.add(f"{section}.{name}")
    assert seen >= 5
    assert without <= UNBOUNDED


def test_an_absurd_setting_is_refused_with_its_bound(subtests):
    for name, value, most in (
        ("rollout.engine.max_num_seqs", 10**9, 65536),
        ("rollout.engine.max_num_seqs", 10**20, 65536),
        ("rollout.engine.max_len", 10**12, 16777216),
        ("rollout.group_size", 10**12, 65536),
        ("rollout.prompts_per_step", 10**23, 1048576),
        ("rollout.sampling.max_tokens", 10**12, 16777216),
        ("rollout.sampling.temperature", "1e300", 1000000000000),
        ("optim.lr", "1e300", 1000),
        ("steps", 10**30, 2147483647),
        ("eval.problems", 10**12, 1048576),
        ("eval.k", 10**12, 1048576),
        ("train.threads", 10**9, 65536),
        ("train.ranks", 10**9, 65536),
    ):
        words = rf"^{name}: Input should be less than or equal to {most}\b.* \(value "
        with subtests.test(name, value=value), pytest.raises(UsageError, match=words):
            resolve(MINIMAL, [f"{name}={value}"])


def test_a_recipe_that_says_nothing_keeps_a_few_checkpoints():
    """A run of thousands of steps does not fill a disk; 0, which keeps all, has to be typed."""
    assert load(RECIPES / "quickstart.toml", ["steps=4000"]).checkpoint.keep == 3
