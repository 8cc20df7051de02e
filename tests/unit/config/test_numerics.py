"""`numerics = on-policy`: the settings that it brings. rule_messages.txt has what it refuses."""

from onepolicy.config import load, resolve
from support.paths import ROOT

FAST = {"out": "x", "steps": 1, "model": {"path": "m"}, "task": {"kind": "chain"}}
TREE = FAST | {"numerics": "on-policy"}


def test_fast_unless_asked_for():
    config = resolve(FAST)
    assert (config.numerics, config.model.dtype) == ("fast", "float32")
    assert config.rollout.engine.dtype == "bfloat16"


def test_engine_follows_the_model():
    for dtype, lm_head in (("float32", "same"), ("bfloat16", "float32")):
        model = {"path": "m", "dtype": dtype, "lm_head": lm_head}
        engine = resolve(TREE | {"model": model}).rollout.engine
        assert (engine.kind, engine.dtype, engine.lm_head) == ("hf", dtype, lm_head)
    other = {"rollout": {"engine": {"max_num_seqs": 3}}}
    assert resolve(TREE | other).rollout.engine.dtype == "float32"
    assert resolve(TREE, ["model.dtype=bfloat16"]).rollout.engine.dtype == "bfloat16"


def test_nothing_is_corrected():
    for mode, fast in (("off", "tis"), ("r3", "recompute")):
        tree = TREE | {"replay": {"mode": mode}}
        assert resolve(tree).correction.preset == "recompute"
        assert resolve(tree, ["numerics=fast"]).correction.preset == fast


def test_the_recipe():
    config = load(ROOT / "recipes" / "on_policy.toml")
    assert (config.numerics, config.rollout.engine.dtype) == ("on-policy", "float32")
    assert config.correction.preset == "ppo-is"


def test_bypass_and_minibatches_are_accepted():
    """With the rollout as behaviour policy there is nothing to score."""
    more = ["objective.num_minibatches=2", "objective.clip_high=0.3"]
    assert not resolve(TREE, ["correction.preset=ppo-is", *more]).scores_old
