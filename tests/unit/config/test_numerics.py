"""`numerics = on-policy`: the settings that it brings, and those that it refuses."""

import pytest

from onepolicy.config import UsageError, load, resolve
from support.paths import ROOT

TREE = {
    "out": "x",
    "steps": 1,
    "model": {"path": "m"},
    "task": {"kind": "chain"},
    "numerics": "on-policy",
}


def test_fast_unless_asked_for():
    tree = {name: value for name, value in TREE.items() if name != "numerics"}
    config = resolve(tree)
    assert (config.numerics, config.rollout.engine.dtype, config.model.dtype) == (
        "fast",
        "bfloat16",
        "float32",
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_follows_the_model(dtype):
    model = {"path": "m", "dtype": dtype, "lm_head": "float32" if dtype == "bfloat16" else "same"}
    engine = resolve(TREE | {"model": model}).rollout.engine
    assert (engine.kind, engine.dtype, engine.lm_head) == ("hf", dtype, model["lm_head"])
    assert (
        resolve(TREE | {"rollout": {"engine": {"max_num_seqs": 3}}}).rollout.engine.dtype
        == "float32"
    )
    assert resolve(TREE, ["model.dtype=bfloat16"]).rollout.engine.dtype == "bfloat16"


@pytest.mark.parametrize("replay", [{"mode": "off"}, {"mode": "r3"}])
def test_nothing_is_corrected(replay):
    assert resolve(TREE | {"replay": replay}).correction.preset == "recompute"
    fast = resolve(TREE | {"replay": replay}, ["numerics=fast"])
    assert fast.correction.preset == ("tis" if replay["mode"] == "off" else "recompute")


def test_the_recipe():
    config = load(ROOT / "recipes" / "on_policy.toml")
    assert (config.numerics, config.rollout.engine.dtype, config.correction.preset) == (
        "on-policy",
        "float32",
        "ppo-is",
    )


def test_bypass_and_minibatches_are_accepted():
    """With the rollout as behaviour policy, the run leaves out a scoring that could find
    nothing."""
    config = resolve(
        TREE, ["correction.preset=ppo-is", "objective.num_minibatches=2", "objective.clip_high=0.3"]
    )
    assert not config.scores_old


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rollout.engine.kind=vllm"],
            r"rollout\.engine\.kind: vllm, but .* use hf, or numerics = fast",
        ),
        (["rollout.engine.kind=sglang"], r"rollout\.engine\.kind: sglang"),
        (
            ["rollout.engine.dtype=bfloat16"],
            r"rollout\.engine\.dtype: bfloat16 and model\.dtype: float32, .* leave",
        ),
        (
            ["model.dtype=bfloat16", "model.lm_head=float32", "rollout.engine.lm_head=same"],
            r"rollout\.engine\.lm_head: same and model\.lm_head: float32",
        ),
        (["train.autocast=bfloat16"], r"train\.autocast: bfloat16, .* set it to off"),
        (
            ["replay.source=reprefill"],
            r"replay\.source: reprefill is for engines that return no routes",
        ),
    ],
)
def test_settings_that_break_on_policy_numerics_are_refused(overrides, message):
    with pytest.raises(UsageError, match=message):
        resolve(TREE, overrides)
    if not any("clip" in each for each in overrides):
        resolve(TREE, [*overrides, "numerics=fast"])  # it is the mode that refuses it
