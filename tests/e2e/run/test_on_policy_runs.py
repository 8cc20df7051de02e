"""Whole training runs with numerics = on-policy: exact in every setting. The weights are the same
to the bit whatever the engine's batch size, refills and prefix hits."""

import pytest
import torch
from safetensors.torch import load_file

from onepolicy.cli import main
from support.metrics import rows
from support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

AGENT = ROOT / "recipes" / "agent_sums.toml"
POLICY = ROOT / "benchmarks" / "evidence" / "policies" / "two-of-8"
STEPS = 4
RECIPE = """
out = "set by the test"
steps = {steps}
numerics = "on-policy"
model = {{ path = "{policy}" }}
task = {{ kind = "chain", ops = 4 }}
rollout.prompts_per_step = 4
rollout.group_size = 4
rollout.sampling = {{ max_tokens = 48 }}
rollout.engine.max_num_seqs = 16
optim = {{ lr = 1e-4 }}
train = {{ threads = 1 }}
eval = {{ every = 0 }}
log = {{ counterfactual_every = 2, tensorboard = false, report = false }}
"""


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    folder = tmp_path_factory.mktemp("on-policy")
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(steps=STEPS, policy=POLICY))

    def run(name, *overrides):
        out = folder / name
        if not out.exists():
            assert main(["train", str(recipe), f"out={out}", *overrides]) == 0
        return out

    return run


def exact(run):
    found = [row for row in rows(run) if "mismatch/k3" in row]
    assert len(found) == STEPS
    for row in found:
        assert (row["mismatch/k3"], row["mismatch/differing"]) == (0.0, 0.0)
        assert row.get("routing/routers", 0.0) == 0.0
        assert row.get("counterfactual/mismatch/differing", 0.0) == 0.0
        assert row.get("repeat/k3", 0.0) == 0.0
    return found


def weights(run, step=STEPS):
    return load_file(run / "checkpoints" / f"step_{step:05d}" / "model.safetensors")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("replay", ["r3", "off"])
@pytest.mark.parametrize("minibatches", [1, 2])
def test_every_step_is_exact(train, dtype, replay, minibatches):
    settings = [f"model.dtype={dtype}", f"replay.mode={replay}"]
    settings += [f"objective.num_minibatches={minibatches}"]
    exact(train("-".join(settings), *settings))


@pytest.mark.parametrize(
    "settings",
    [
        ("train.activation_checkpointing=true",),
        ("train.reuse_scoring_forward=true",),
        ("objective.kl.coef=0.01",),
        ("correction.preset=ppo-is", "objective.num_minibatches=2"),
        ("model.dtype=bfloat16", "model.lm_head=float32"),
        ("rollout.sampling.temperature=0.8", "train.tokens_per_micro_batch=200"),
        ("objective.preset=ppo",),
    ],
    ids=lambda settings: settings[0],
)
def test_with_other_settings(train, settings):
    found = exact(train(settings[0], *settings))
    if "objective.kl.coef=0.01" in settings:
        assert found[0]["train/kl"] == 0.0  # the reference is the policy, and computes as it does


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_episodes_with_tools_and_a_cache_that_is_hit(sums_policy, tmp_path, dtype):
    run, types = tmp_path / "run", [f"model.dtype={dtype}", f"rollout.engine.dtype={dtype}"]
    size = [f"steps={STEPS}", "rollout.prompts_per_step=4", "rollout.group_size=4"]
    size += ["eval.every=0", *(f"log.{each}=false" for each in ("report", "tensorboard"))]
    settings = ["numerics=on-policy", *types, *size, "log.counterfactual_every=2"]
    command = ["train", str(AGENT), f"model.path={sums_policy}", f"out={run}", *settings]
    assert main(command) == 0
    # every turn after the first finds its history cached
    assert max(row["train/turns"] for row in exact(run)) > 1.5


def test_the_engine_does_not_move_the_weights(train):
    """The engine's rows, refills and prefix hits decide only which tokens are computed together."""
    base = weights(train("base"))
    for name, settings in {
        "few-slots": ("rollout.engine.max_num_seqs=3",),
        "no-reuse": ("rollout.engine.enable_prefix_caching=false", "rollout.engine.max_num_seqs=7"),
        "again": (),
    }.items():
        other = weights(train(name, *settings))
        for key, value in base.items():
            assert torch.equal(value, other[key]), (name, key)


@pytest.mark.parametrize("settings", [("train.tokens_per_micro_batch=200",), ("train.threads=2",)])
def test_another_split_or_thread_count(train, settings):
    """Log-probabilities of one checkpoint are equal to the bit. Weights after one update are equal
    to the tolerance of a sum."""
    before, size = torch.get_num_threads(), ("steps=1", "checkpoint.every=1")
    try:
        one, other = (
            train(name, *more, *size, "log.counterfactual_every=1")
            for name, more in (("one", ()), (settings[0], settings))
        )
    finally:
        torch.set_num_threads(before)
    a, b = (load_file(run / "probes" / "step_00001.safetensors") for run in (one, other))
    for name in ("tokens", "logp_rollout", "logp_trainer", "logp_trainer_native", "routes_trainer"):
        assert torch.equal(a[name], b[name]), name
    a, b = (weights(run, step=1) for run in (one, other))
    gap = torch.cat([(a[name] - b[name]).abs().flatten() for name in a])
    # AdamW moves a weight by its learning rate, whichever way a gradient near 0 rounds
    assert gap.max() <= 2.1e-4
    assert gap.mean() < 1e-6
