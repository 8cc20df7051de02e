"""Recipes, overrides and the errors they give."""

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onepolicy.config import R3, JsonlTask, RunConfig, UsageError, apply_override, load, resolve
from onepolicy.config.engine import ServeConfig
from onepolicy.config.policy import PolicyConfig
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


MINIBATCHES = "objective.num_minibatches=2"
REUSE = "train.reuse_scoring_forward=true"
JSONL = ("task.kind=jsonl", "task.path=a", "task.held_out_path=b")
REFUSED = [  # overrides, words of the message
    ("optim.lrr=1", "optim.lrr", "did you mean optim.lr"),
    ("rollout.engine.max_num_seq=1", "did you mean rollout.engine.max_num_seqs?"),
    (["correction.preset=off", "correction.cap=3"], "correction.cap", "unknown setting"),
    (["correction.preset=off", "correction.weight.high=3"], "bound a weight, but level = none"),
    ("correction.preset=tsi", "none is called 'tsi'; there are recompute, "),
    ("correction.preset=[1]", "correction.preset: Input should be a valid string"),
    ("objective.preset=[1]", "objective.preset: Input should be a valid string"),
    ("correction.preset=pg-tis", "pg-tis multiplies", "twice", "objective.surrogate = pg"),
    (["correction.preset=ppo-is", "objective.preset=reinforce"], "ppo-is makes the rollout", "pg-"),
    (["correction.preset=ppo-is", "replay.mode=r2", MINIBATCHES], "r2 replays the routes of the"),
    ("correction.preset=score-centering", "score-centering multiplies", "would count twice"),
    (["task.kind=chain", "task.name=chain_sum"], "task", "name", "unknown setting"),
    ("task.kind=nonsense", "task", "nonsense", "chain", "gym", "jsonl"),
    ("steps=many", "steps", "many"),
    ("steps=0", "steps", "0"),
    ("steps.x=3", "steps", "not a section"),
    ("steps", "a.b=value"),
    ("rollout.sampling.top_p=0.9", "top_p=0.9", "eval.top_p"),
    ("rollout.sampling.top_k=5", "top_k=5"),
    ("rollout.group_size=1", "rollout.group_size"),
    ("objective.num_minibatches=3", "objective.num_minibatches", "3", "8"),
    ([REUSE, MINIBATCHES], "train.reuse_scoring_forward"),
    ([REUSE, "train.activation_checkpointing=true"], "activation_checkpointing"),
    (["train.autocast=bfloat16", "model.dtype=bfloat16"], "train.autocast"),
    ("eval.greedy=false", "eval.k: 0", "eval.greedy=true", "eval.every=0"),
    ("replay=off", "replay: 'off'", "did you mean replay.mode=off?"),
    ("replay.mode=r4", "replay", "r4", "'off', 'r2', 'r3', 'soft', 'weights'"),
    ("replay.mode=soft", "replay.ratio: required, but not set; add it to the recipe or give"),
    (["replay.mode=soft", "replay.ratio=1.5"], "replay.ratio", "1.5"),
    ("replay.ratio=0.5", "replay.ratio: unknown setting with mode=r3", "missing"),
    (["replay.mode=off", "replay.source=reprefill"], "replay.source: unknown", "mode=off"),
    (["replay.mode=r2", MINIBATCHES, REUSE], "train.reuse_scoring_forward", "replay.mode = r2"),
    ("correction=off", "correction: 'off'", "did you mean correction.preset=off?"),
    ("optim=3", "optim: 3 is a value, but this is a section; its settings: betas"),
    ("optim.betas=[1.5, 2.0]", "optim.betas.0", "1.5", "optim.betas.1", "2.0", "less than 1"),
    ("optim.betas=[-0.1, 0.9]", "optim.betas.0", "-0.1"),
    ("optim.lr=inf", "optim.lr", "finite"),
    ("rollout.sampling.temperature=inf", "rollout.sampling.temperature", "finite"),
    ("optim.weight_decay=nan", "optim.weight_decay", "finite"),
    ("seed=-1", "seed", "-1"),
    ("task.seed=-1", "task.seed", "-1"),
    ("task.kind=gymnasium", "task.id: required", "give task.id=...", "task.returns: required"),
    ([*REACT, "task.max_turn=3"], "unknown setting with kind=react", "mean task.max_turns?"),
    ([*REACT, "task.max_turns=0"], "task.max_turns: ", "(value 0)"),
    ([*REACT, "task.problems.nome=a"], "task.problems.nome", "kind=gym", "task.problems.name?"),
    ([*REACT, "task.tools=[]"], "task.tools: ", "at least 1"),
    ([*REACT, "task.tools=calculator"], "'calculator' is no list; write task.tools=[...]"),
    ([*REACT, 'task.tools=["calculator"]'], "task.tools.0: ", 'mean { kind = "calculator" }?'),
    ([*REACT, 'task.tools=[{kind="search"}]'], "task.tools.0.corpus: required, but not set"),
    ("seed=9223372036854775808", "seed", "9223372036854775808"),
    ("steps=" + 5000 * "1", "steps"),
    ("steps=" + 5000 * "[", "steps"),
    ([*JSONL, "task.held_out=64"], "task.held_out: 64", "held_out_path = b"),
]


def test_bad_settings_name_field_and_fix(subtests):
    for overrides, *words in REFUSED:
        if isinstance(overrides, str):
            overrides = [overrides]
        with subtests.test(overrides[-1][:50]):
            with pytest.raises(UsageError) as error:
                resolve(MINIMAL, overrides)
            assert [word for word in words if word not in str(error.value)] == []


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


def test_policy_of_impossible_settings(subtests):
    for fields, words in (
        ({"top_k": 8, "experts": 4}, "top_k: 8 is more than experts=4"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads: 3 does not divide heads=4"),
        ({"heads": 2, "kv_heads": 4}, "kv_heads: 4 does not divide heads=2"),
        ({"head_dim": 15}, "head_dim: 15 is odd"),
        ({"seed": -1}, "seed"),
        ({"steps": 4, "mistakes_from": 0.9}, "mistakes_from: 0.9 leaves none of 4 steps"),
    ):
        with subtests.test(words), pytest.raises(ValueError, match=words):
            PolicyConfig.model_validate(fields)


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
    words = r"overlong_buffer: measures one response.*task\.kind = react has several"
    with pytest.raises(UsageError, match=words):
        resolve(MINIMAL, [*REACT, "objective.overlong_buffer=0.2"])


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


def test_a_step_of_more_samples_than_end_is_refused():
    group = "rollout.group_size=1024"
    resolve(MINIMAL, ["rollout.prompts_per_step=4096", group])
    words = r"rollout.prompts_per_step: 4097 prompts .* are 4,195,328 samples a step"
    with pytest.raises(UsageError, match=words):
        resolve(MINIMAL, ["rollout.prompts_per_step=4097", group])
