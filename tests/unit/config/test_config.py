"""Recipes, overrides and the errors they give."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepolicy.config import R3, JsonlTask, RunConfig, UsageError, apply_override, load, resolve
from onepolicy.config.policy import PolicyConfig
from onepolicy.config.serve import ServeConfig
from support.paths import ROOT

RECIPES = ROOT / "recipes"
MINIMAL = {"out": "runs/x", "steps": 3, "model": {"path": "tiny"}, "task": {"kind": "chain"}}
REACT = [
    "task.kind=react",
    'task.problems={kind="gym", name="chain_sum"}',
    'task.tools=[{kind="calculator"}]',
]


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.toml")), ids=lambda p: p.name)
def test_every_recipe_loads_and_round_trips(recipe):
    config = load(recipe)
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("mode", "preset"),
    [
        ("r3", "recompute"),
        ("off", "tis"),
        ("r2", "tis"),
        ("soft", "recompute"),
        ("weights", "recompute"),
        (None, "recompute"),
    ],
)
def test_correction_follows_replay_unless_set(mode, preset):
    settings = {
        None: [],
        "soft": ["replay.mode=soft", "replay.ratio=0.5"],
        "r2": ["replay.mode=r2", "objective.num_minibatches=2"],
    }.get(mode, [f"replay.mode={mode}"])
    assert resolve(MINIMAL, settings).correction.preset == preset
    assert resolve(MINIMAL, settings).replay.mode == (mode or "r3")
    explicit = resolve(MINIMAL, [*settings, "correction.preset=tis", "correction.weight.high=3"])
    assert explicit.correction.weight.high == 3


def test_replay_without_a_mode_is_r3():
    assert resolve({**MINIMAL, "replay": {}}).replay == R3()


def test_override_types():
    config = resolve(
        MINIMAL,
        [
            "optim.lr=1e-4",
            "optim.betas=[0.8, 0.9]",
            "train.reuse_scoring_forward=true",
            "out=runs/a b",
        ],
    )
    assert config.optim.lr == 1e-4
    assert config.optim.betas == (0.8, 0.9)
    assert config.train.reuse_scoring_forward is True
    assert config.out == "runs/a b"


def test_switching_a_variant_drops_the_old_knobs():
    tree = {**MINIMAL, "correction": {"preset": "tis", "weight": {"high": 4.0}}}
    assert resolve(tree, ["correction.preset=off"]).correction.preset == "recompute"
    assert tree["correction"] == {
        "preset": "tis",
        "weight": {"high": 4.0},
    }  # the recipe itself is not touched
    soft = {**MINIMAL, "replay": {"mode": "soft", "ratio": 0.5}}
    assert resolve(soft, ["replay.mode=off"]).replay.mode == "off"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["optim.lrr=1"], ["optim.lrr", "did you mean optim.lr"]),
        (["rollout.engine.max_num_seq=1"], ["did you mean rollout.engine.max_num_seqs?"]),
        (["correction.preset=off", "correction.cap=3"], ["correction.cap", "unknown setting"]),
        (
            ["correction.preset=off", "correction.weight.high=3"],
            ["low and high bound a weight, but level = none"],
        ),
        (["correction.preset=tsi"], ["none is called 'tsi'; there are recompute, "]),
        (["correction.preset=[1]"], ["correction.preset: Input should be a valid string"]),
        (["objective.preset=[1]"], ["objective.preset: Input should be a valid string"]),
        (
            ["correction.preset=pg-tis"],
            ["pg-tis multiplies", "would count twice", "objective.surrogate = pg"],
        ),
        (
            ["correction.preset=ppo-is", "objective.preset=reinforce"],
            ["ppo-is makes the rollout the behaviour policy", "pg-tis"],
        ),
        (
            ["correction.preset=ppo-is", "replay.mode=r2", "objective.num_minibatches=2"],
            ["r2 replays the routes of the"],
        ),
        (
            ["correction.preset=score-centering"],
            ["score-centering multiplies", "would count twice"],
        ),
        (["task.kind=chain", "task.name=chain_sum"], ["task", "name", "unknown setting"]),
        (["task.kind=nonsense"], ["task", "nonsense", "chain", "gym", "jsonl"]),
        (["steps=many"], ["steps", "many"]),
        (["steps=0"], ["steps", "0"]),
        (["steps.x=3"], ["steps", "not a section"]),
        (["steps"], ["a.b=value"]),
        (["rollout.sampling.top_p=0.9"], ["top_p=0.9", "eval.top_p"]),
        (["rollout.sampling.top_k=5"], ["top_k=5"]),
        (["rollout.group_size=1"], ["rollout.group_size"]),
        (["objective.num_minibatches=3"], ["objective.num_minibatches", "3", "8"]),
        (
            ["train.reuse_scoring_forward=true", "objective.num_minibatches=2"],
            ["train.reuse_scoring_forward"],
        ),
        (
            ["train.reuse_scoring_forward=true", "train.activation_checkpointing=true"],
            ["activation_checkpointing"],
        ),
        (["train.autocast=bfloat16", "model.dtype=bfloat16"], ["train.autocast"]),
        (["eval.greedy=false"], ["eval.k: 0", "eval.greedy=true", "eval.every=0"]),
        (["replay=off"], ["replay: 'off'", "did you mean replay.mode=off?"]),
        (["replay.mode=r4"], ["replay", "r4", "'off', 'r2', 'r3', 'soft', 'weights'"]),
        (
            ["replay.mode=soft"],
            ["replay.ratio: required, but not set; add it to the recipe or give replay.ratio=..."],
        ),
        (["replay.mode=soft", "replay.ratio=1.5"], ["replay.ratio", "1.5"]),
        (["replay.ratio=0.5"], ["replay.ratio: unknown setting with mode=r3", "missing"]),
        (
            ["replay.mode=off", "replay.source=reprefill"],
            ["replay.source: unknown setting with mode=off"],
        ),
        (
            ["replay.mode=r2", "objective.num_minibatches=2", "train.reuse_scoring_forward=true"],
            ["train.reuse_scoring_forward", "replay.mode = r2"],
        ),
        (["correction=off"], ["correction: 'off'", "did you mean correction.preset=off?"]),
        (["optim=3"], ["optim: 3 is a value, but this is a section; its settings: betas"]),
        (
            ["optim.betas=[1.5, 2.0]"],
            ["optim.betas.0", "1.5", "optim.betas.1", "2.0", "less than 1"],
        ),
        (["optim.betas=[-0.1, 0.9]"], ["optim.betas.0", "-0.1"]),
        (["optim.lr=inf"], ["optim.lr", "finite"]),
        (["rollout.sampling.temperature=inf"], ["rollout.sampling.temperature", "finite"]),
        (["optim.weight_decay=nan"], ["optim.weight_decay", "finite"]),
        (["seed=-1"], ["seed", "-1"]),
        (["task.seed=-1"], ["task.seed", "-1"]),
        (
            ["task.kind=gymnasium"],
            ["task.id: required", "give task.id=...", "task.returns: required"],
        ),
        (
            [*REACT, "task.max_turn=3"],
            ["task.max_turn: unknown setting with kind=react", "did you mean task.max_turns?"],
        ),
        ([*REACT, "task.max_turns=0"], ["task.max_turns: ", "(value 0)"]),
        (
            [*REACT, "task.problems.nome=a"],
            ["task.problems.nome", "kind=gym", "did you mean task.problems.name?"],
        ),
        ([*REACT, "task.tools=[]"], ["task.tools: ", "at least 1"]),
        (
            [*REACT, "task.tools=calculator"],
            ["task.tools: 'calculator' is no list; write task.tools=[...]"],
        ),
        (
            [*REACT, 'task.tools=["calculator"]'],
            ["task.tools.0: 'calculator'", 'did you mean { kind = "calculator" }?'],
        ),
        (
            [*REACT, 'task.tools=[{kind="search"}]'],
            ["task.tools.0.corpus: required, but not set; add it to the recipe"],
        ),
        (["seed=9223372036854775808"], ["seed", "9223372036854775808"]),
        (["steps=" + 5000 * "1"], ["steps"]),
        (["steps=" + 5000 * "["], ["steps"]),
        (
            ["task.kind=jsonl", "task.path=a", "task.held_out_path=b", "task.held_out=64"],
            ["task.held_out: 64", "held_out_path = b"],
        ),
    ],
    ids=lambda x: x[0] if x and "=" in str(x[0]) else None,
)
def test_bad_settings_name_field_and_fix(overrides, words):
    with pytest.raises(UsageError) as error:
        resolve(MINIMAL, overrides)
    for word in words:
        assert word in str(error.value)


def test_a_refused_tool_is_not_also_a_missing_one():
    with pytest.raises(UsageError) as error:
        resolve(MINIMAL, [*REACT, 'task.tools=[{kind="python", seconds=0}]'])
    assert str(error.value) == "task.tools.0.seconds: Input should be greater than 0 (value 0)"


def test_missing_and_broken_recipes(tmp_path):
    with pytest.raises(UsageError, match=r"nowhere\.toml: no such recipe"):
        load(tmp_path / "nowhere.toml")
    (tmp_path / "broken.toml").write_text("steps = = 3")
    with pytest.raises(UsageError, match=r"broken\.toml: not valid TOML.*line 1"):
        load(tmp_path / "broken.toml")


def test_recipe_that_is_a_folder_or_not_utf8(tmp_path):
    with pytest.raises(UsageError, match=rf"{tmp_path}: a folder, not a recipe"):
        load(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'out = "\xe9"')
    with pytest.raises(UsageError, match=r"latin\.toml: not UTF-8 .* at byte 7"):
        load(tmp_path / "latin.toml")
    (tmp_path / "deep.toml").write_text("x = " + 5000 * "[")
    with pytest.raises(UsageError, match=r"deep\.toml: not valid TOML"):
        load(tmp_path / "deep.toml")


def test_a_held_out_path_round_trips():
    """The stored settings must not set fields that the recipe left out."""
    task = {"kind": "jsonl", "path": "a", "held_out_path": "b"}
    config = resolve({**MINIMAL, "task": task})
    assert isinstance(config.task, JsonlTask)
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    assert resolve(config.model_dump()) == config


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_seed_bounds(seed):
    assert resolve(MINIMAL, [f"seed={seed}"]).seed == seed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": 8, "experts": 4}, "top_k: 8 is more than experts=4"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads: 3 does not divide heads=4"),
        ({"heads": 2, "kv_heads": 4}, "kv_heads: 4 does not divide heads=2"),
        ({"head_dim": 15}, "head_dim: 15 is odd"),
        ({"seed": -1}, "seed"),
        ({"steps": 4, "mistakes_from": 0.9}, "mistakes_from: 0.9 leaves none of 4 steps"),
    ],
)
def test_policy_of_impossible_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        PolicyConfig.model_validate(settings)


def test_required_setting_is_named():
    with pytest.raises(UsageError, match="steps: required"):
        resolve({k: v for k, v in MINIMAL.items() if k != "steps"})


@given(
    st.dictionaries(st.sampled_from("abc"), st.integers(), max_size=3),
    st.sampled_from("abc"),
    st.integers(),
)
def test_override_sets_one_leaf_and_keeps_the_rest(section, key, value):
    tree = {"s": section, "other": 1}
    after = apply_override(tree, f"s.{key}={value}")
    assert after == {"s": {**section, key: value}, "other": 1}
    assert tree == {"s": section, "other": 1}


def test_settings_of_several_turns():
    react = [
        "task.kind=react",
        "task.problems.kind=gym",
        "task.problems.name=products",
        "task.tools=[{kind='calculator'}]",
    ]
    tree = {**MINIMAL, "task": {}}
    assert (
        resolve(tree, [*react, "replay.duplicate_routes=newest"]).replay.duplicate_routes
        == "newest"
    )
    with pytest.raises(
        UsageError, match=r"overlong_buffer: measures one response.*task\.kind = react has several"
    ):
        resolve(tree, [*react, "objective.overlong_buffer=0.2"])
    server = [
        "rollout.engine.kind=vllm-server",
        "rollout.engine.url=http://127.0.0.1:1",
    ]  # updates may interrupt a turn
    assert (
        resolve(MINIMAL, [*server, "replay.duplicate_routes=newest"]).replay.duplicate_routes
        == "newest"
    )


def test_config_into_a_closed_pipe_is_no_error():
    """The command is `onepolicy config preset | head -3`."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "onepolicy", "config", "preset"],
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


UNBOUNDED = {
    f"{of}.{end}" for of in ("Bounds", "Gate", "Weight") for end in ("low", "high")
}  # only compared with


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


@pytest.mark.parametrize(
    ("override", "most"),
    [
        ("rollout.engine.max_num_seqs=1000000000", "65536"),
        (f"rollout.engine.max_num_seqs={10**20}", "65536"),
        (f"rollout.engine.max_len={10**12}", "16777216"),
        (f"rollout.group_size={10**12}", "65536"),
        (f"rollout.prompts_per_step={10**23}", "1048576"),
        (f"rollout.sampling.max_tokens={10**12}", "16777216"),
        ("rollout.sampling.temperature=1e300", "1000000000000"),
        ("optim.lr=1e300", "1000"),
        (f"steps={10**30}", "2147483647"),
        (f"eval.problems={10**12}", "1048576"),
        (f"eval.k={10**12}", "1048576"),
        (f"train.threads={10**9}", "65536"),
        (f"train.ranks={10**9}", "65536"),
    ],
)
def test_an_absurd_setting_is_refused_with_its_bound(override, most):
    name = override.split("=")[0]
    with pytest.raises(
        UsageError, match=rf"^{name}: Input should be less than or equal to {most}\b.* \(value "
    ):
        load(RECIPES / "quickstart.toml", [override])


def test_a_step_of_more_samples_than_end_is_refused():
    load(RECIPES / "quickstart.toml", ["rollout.prompts_per_step=4096", "rollout.group_size=1024"])
    with pytest.raises(
        UsageError, match=r"rollout.prompts_per_step: 4097 prompts .* are 4,195,328 samples a step"
    ):
        load(
            RECIPES / "quickstart.toml",
            ["rollout.prompts_per_step=4097", "rollout.group_size=1024"],
        )
