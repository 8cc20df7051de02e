"""Objectives in the loop: critic, reference, bypass and dynamic sampling train, report and
resume."""

import json

import pytest
import torch
from safetensors.torch import load_file

from onepolicy.cli import main
from onepolicy.config.presets import objective_presets
from onepolicy.train import checkpoint
from support.metrics import rows, timeless

QUICK = ("eval.every=0", "log.counterfactual_every=0")
BYPASS = ("correction.preset=ppo-is", "objective.num_minibatches=2", "eval.every=0")


def test_ppo_with_a_critic_trains_and_resumes_to_the_bit(train):
    whole = train("whole", "steps=2", "objective.preset=ppo", "checkpoint.every=1", *QUICK)
    part = train("part", "steps=1", "objective.preset=ppo", *QUICK)
    assert main(["train", "--resume", str(part), "steps=2"]) == 0
    assert list(map(timeless, rows(whole))) == list(map(timeless, rows(part)))
    for name in ("model", "critic", "critic_optimizer"):
        one, other = (
            load_file(checkpoint.checkpoint_folder(run, 2) / f"{name}.safetensors")
            for run in (whole, part)
        )
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one), name
    losses = [row["train/value_loss"] for row in rows(whole)]
    assert max(losses) > 0  # a step whose rewards are all 0 has nothing to learn
    before, after = (
        load_file(checkpoint.checkpoint_folder(whole, s) / "critic.safetensors") for s in (1, 2)
    )
    assert not torch.equal(before["head.weight"], after["head.weight"])
    assert all(not torch.equal(before[k], after[k]) for k in before if k.endswith("q_proj.weight"))


def test_reference_and_entropy(train):
    """The reference is the run's first policy, so the first step's KL is 0 and later ones are
    not."""
    settings = ("objective.kl.coef=0.1", "objective.entropy_coef=0.01", *QUICK)
    found = rows(train("kl", "steps=2", "replay.mode=off", *settings))
    assert found[0]["train/kl"] == pytest.approx(0, abs=1e-9)
    assert found[1]["train/kl"] > 1e-6


@pytest.mark.full
def test_a_kl_in_the_reward_is_no_term_of_the_loss(train):
    kl = 'objective.kl={coef = 0.1, where = "reward", estimator = "k1"}'
    reward = rows(train("reward", "steps=1", "objective.preset=reinforce++", kl, *QUICK))
    assert "train/kl" not in reward[0]


def test_bypass_measures_in_the_update_without_scoring(train):
    """With one minibatch the update's forward is the scoring forward, so the same rollouts give the
    same measurements."""
    usual = rows(train("usual", "steps=1", *QUICK))[0]
    out = train("bypass", "steps=1", "correction.preset=ppo-is", *QUICK)
    row = rows(out)[0]
    assert row["time/score_saved"] > 0
    assert "time/score_saved" not in usual
    for name in ("mismatch/k3", "mismatch/max_dp", "train/entropy", "routing/routers"):
        assert row[name] == pytest.approx(usual[name], rel=1e-5), name
    assert row["train/ratio_dev"] > 0  # the ratio is new / rollout
    assert usual["train/ratio_dev"] == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["time"]["score_saved"] == row["time/score_saved"]
    probed = train("two", "steps=1", *BYPASS, "log.counterfactual_every=1")
    two = rows(probed)[0]
    assert two["mismatch/k3"] != usual["mismatch/k3"]  # of the first half
    assert two["repeat/max_dlogp"] < 1e-3
    tensors = load_file(probed / "probes" / "step_00001.safetensors")
    for name in ("logp_trainer", "logp_trainer_native"):
        assert len(tensors[name]) == two["correction/slots"]


@pytest.mark.full
def test_bypass_keeps_every_samples_rollout_log_probability(train):
    """Samples of the second minibatch were never scored before the weights moved."""
    out = train("unseen", "steps=1", *BYPASS, "log.counterfactual_every=0")
    first, second = (json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines())
    assert first["mean_logp_trainer"] == pytest.approx(first["mean_logp_rollout"], abs=0.1)
    assert second["mean_logp_trainer"] is None
    assert -5 < second["mean_logp_rollout"] < 0
    assert second["mean_logp_rollout"] != first["mean_logp_rollout"]


def test_live_corrections_run_and_report(train):
    opsm = ("correction.preset=opsm", "objective.num_minibatches=2")
    row = rows(train("opsm", "steps=1", *opsm, *QUICK))[0]
    gate = "correction/rejected/k1.mean.sequence.negative.new"
    assert 0 <= row[gate] <= row["correction/rejected"] <= 1


def test_dapo_replaces_groups_without_signal(train):
    found = rows(train("dapo", "steps=1", "objective.preset=dapo", *QUICK))
    for row in found:
        assert row["train/groups_without_signal"] == 0
        assert row["rollout/groups_kept"] <= 2 <= row["rollout/groups_played"]
        assert (row["rollout/refills"] > 0) == (row["rollout/groups_played"] > 2)


@pytest.mark.slow
@pytest.mark.parametrize("replay", ["r3", "off"])
@pytest.mark.parametrize("name", objective_presets())
def test_every_preset_trains_for_twenty_steps(train, name, replay):
    settings = (f"objective.preset={name}", f"replay.mode={replay}", *QUICK)
    # of few siblings all may fail, and dynamic sampling then finds no problem
    settings += ("rollout.group_size=8", "objective.num_minibatches=2")
    run = train(None, "steps=20", *settings)
    assert len(rows(run)) == 20
