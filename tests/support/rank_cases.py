"""Settings that the learner on several ranks is compared under, and the comparison."""

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from onepolicy.build.learner import build_learner
from onepolicy.build.sharded_learner import build_sharded_learner
from onepolicy.config import resolve
from onepolicy.correct.reweight import reweight
from onepolicy.launch.agent import environment, on_loopback, rank_variables
from onepolicy.launch.ranks import joined_ranks
from onepolicy.objective.advantages import compute_advantages
from onepolicy.support.trace import SupportTrace
from onepolicy.train.optim import clip_gradients
from onepolicy.types import RoutingTrace
from support.learner_steps import BASE, batch_of
from support.models import VOCAB
from support.siblings import siblings, with_routes_of

STEPS = 2
QWEN = ["replay.min_agreement=0"]
RECOMPUTE, LARGE = "train.activation_checkpointing=true", "train.tokens_per_micro_batch=1000"
CENTERED = ["correction.preset=score-centering", "objective.surrogate=pg"]
KL_ENTROPY = ["objective.kl.coef=0.1", "objective.entropy_coef=0.01"]
SCORED = ("logp_old", "entropy", "gate_mass", "logp_ref", "value", "top_logp_old")
SCORED += ("entropy_vocabulary", "logp_vocabulary", "displaced")
CASES = {
    "qwen3_moe": QWEN,
    "deepseek_v3": QWEN,
    "one_micro_batch_each": [*QWEN, LARGE],
    "idle": [*QWEN, "train.tokens_per_micro_batch=15"],
    "recompute": [*QWEN, RECOMPUTE],
    "chunked": [*QWEN, "train.logits_chunk=3", "objective.entropy_coef=0.01"],
    "chunked_recompute": [*QWEN, "train.logits_chunk=3", RECOMPUTE, *CENTERED],
    "host_state": [*QWEN, "optim.state=host"],
    "reuse": [*QWEN, "train.reuse_scoring_forward=true"],
    "r2": ["replay.mode=r2", "objective.num_minibatches=2"],
    "idle_soft": ["replay.mode=soft", "replay.ratio=0.9", *QWEN, "train.tokens_per_micro_batch=15"],
    "soft": ["replay.mode=soft", "replay.ratio=0.9", *QWEN],
    "weights": ["replay.mode=weights", *QWEN],
    "off": ["replay.mode=off"],
    "critic_kl_entropy": [*QWEN, "objective.preset=ppo", *KL_ENTROPY],
    "bypass": [*QWEN, "correction.preset=ppo-is", "objective.num_minibatches=2"],
    "centering": [*QWEN, *CENTERED],
    "supports": [*QWEN, "rollout.sampling.top_p=0.9", "train.logits_chunk=3"],
}
SIBLINGS = {
    "r3": QWEN,
    "deepseek_v3": QWEN,
    "one_micro_batch_each": [*QWEN, LARGE],
    "several_rounds": [*QWEN, "train.tokens_per_micro_batch=60"],
    "own_forward": [*QWEN, "train.reuse_scoring_forward=false", LARGE],
    "reuse": [*QWEN, "train.reuse_scoring_forward=true", "train.tokens_per_micro_batch=60"],
    "recompute": [*QWEN, RECOMPUTE],
    "r2": ["replay.mode=r2", "objective.num_minibatches=2"],
    "weights": ["replay.mode=weights", *QWEN],
    "off": ["replay.mode=off"],
    "kl_entropy": [*QWEN, *KL_ENTROPY],
    "bypass": [*QWEN, "correction.preset=ppo-is"],
}
"""Settings of batches whose samples share prompts."""


@contextmanager
def joined(count, folder):
    """Yield the ranks of a run. This process is rank 0; the others are processes of their own.

    They meet in `folder`.
    """
    overrides = ["train.rank_timeout=300", "train.threads=1", "train.device=cpu"]
    settings = resolve(BASE, [f"train.ranks={count}", *overrides])
    variables = rank_variables(str(folder), 1) | on_loopback() | {"WORLD_SIZE": str(count)}
    command, children = [sys.executable, "-m", "onepolicy", "train"], []
    joining = joined_ranks(settings)
    try:
        with environment(variables):
            for rank in range(1, count):
                children.append(subprocess.Popen(command, env=os.environ | {"RANK": str(rank)}))
            with environment({"RANK": "0"}):
                ranks = joining.__enter__()
        yield ranks
        joining.__exit__(None, None, None)
        assert [child.wait(60) for child in children] == [0] * (count - 1)
    finally:
        for child in children:
            child.kill()
            child.wait()


def config_of(folder, overrides, count):
    rest = ["optim.lr=1e-3", "optim.eps=1e-3", "rollout.prompts_per_step=4", f"model.path={folder}"]
    if not any("tokens_per_micro_batch" in o for o in overrides):
        rest.append("train.tokens_per_micro_batch=30")
    tree = BASE | {"optim": {}, "train": {"device": "cpu"}}
    return resolve(tree, [*overrides, *rest, f"train.ranks={count}"])


def learner_on(others, folder, overrides):
    config = config_of(folder, overrides, 0 if others is None else others.world_size)
    return learner_of(config, config.model, others)


def learner_of(config, model, others):
    if others is None:
        return build_learner(config, model)
    return build_sharded_learner(config, model, others)


def batch_for(learner):
    """Return the samples of learner_steps with routes of this model, some rows without."""
    batch, config = batch_of(temperature=0.8), learner.config
    if config.train.tokens_per_micro_batch == 15:
        batch = batch.select([1, 3, 5])  # four micro-batches of two ranks, three samples
    generator = torch.Generator().manual_seed(0)
    routers, shape = learner.routers, (batch.num_slots, len(learner.routers.layers))
    weights = torch.rand(*shape, routers.top_k, generator=generator) + 0.1
    if config.replay.mode != "weights":
        weights = None
    drawn, trace = torch.rand(*shape, routers.num_experts, generator=generator), None
    if config.replay.mode in ("r3", "soft", "weights"):
        ids = drawn.topk(routers.top_k).indices.to(torch.uint8)
        valid = torch.arange(batch.num_slots) % 7 != 3
        trace = RoutingTrace(ids, valid, routers.layers, routers.num_experts, weights=weights)
    batch = batch.replace(routing=trace)
    if (top := config.correction.top_logprobs(64)) > 0:
        likely = torch.rand(batch.num_slots, 64, generator=generator).log_softmax(-1).topk(top)
        batch = batch.replace(top_ids=likely.indices.int(), top_logp_rollout=likely.values)
    if config.rollout.sampling.narrows:
        kept = torch.rand(batch.num_slots, VOCAB, generator=generator) < 0.6
        kept[torch.arange(batch.num_slots), batch.target_ids] = True
        batch = batch.replace(support=SupportTrace.from_mask(kept & batch.trainable[:, None]))
    return batch


def siblings_for(learner):
    """Return groups with shared prompts, and routes of this model."""
    batch, replay = siblings(temperature=0.8), learner.config.replay.mode
    if replay not in ("r3", "weights"):
        return batch.replace(routing=None)
    return with_routes_of(batch, learner.routers, weights=replay == "weights")


def one_step(learner, batch):
    cfg = learner.config
    batch = compute_advantages(learner.score(batch), cfg.objective)
    applied = reweight(
        batch.logp_rollout if batch.logp_old is None else batch.logp_old,
        batch.logp_rollout,
        batch.trainable,
        cfg.correction.fixed_part,
        segment=batch.segment,
        turn=batch.turn,
        advantage=batch.advantage,
    )
    batch = batch.replace(weight=applied.weight, keep=applied.keep)
    return batch, *learner.step(batch)


def weights_of(learner):
    return {name: tensor.detach().clone() for name, tensor in learner.named_weights()}


def assert_equal_steps(overrides, several, folder, batch_for=batch_for):
    """Check that STEPS steps on these ranks equal those in one process, on the same data.

    batch_for: makes the batch of a learner.
    """
    one, ranked = (learner_on(others, folder, overrides) for others in (None, several))
    start = weights_of(one)
    for _ in range(STEPS):
        steps = (one_step(each, batch_for(each)) for each in (one, ranked))
        (expected, metrics, seen), (found, ranked_metrics, ranked_seen) = steps
        for name in (*SCORED, "trainer_top_logp"):
            one_side, other_side = getattr(found, name), getattr(expected, name)
            if other_side is None:
                assert one_side is None, name
            else:
                torch.testing.assert_close(one_side, other_side, rtol=1e-4, atol=2e-4)
        assert metrics.keys() == ranked_metrics.keys()
        assert_close(ranked_metrics, metrics)
        assert (ranked_seen is None) == (seen is None)
        if seen is not None:
            torch.testing.assert_close(ranked_seen.logp_old, seen.logp_old, rtol=1e-4, atol=2e-4)
            assert (ranked_seen.routing_native.ids == seen.routing_native.ids).float().mean() > 0.99
    first, last = weights_of(one), weights_of(ranked)
    assert first.keys() == last.keys()
    moved = max(float((first[n] - start[n]).abs().max()) for n in first)
    for name, tensor in first.items():
        torch.testing.assert_close(
            last[name], tensor, rtol=0, atol=0.02 * moved, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert ranked.version == STEPS


def assert_close(found, expected):
    for name, value in expected.items():
        if not name.startswith("time/"):
            assert found[name] == pytest.approx(value, rel=2e-3, abs=2e-5), name


def gradients_of_a_step(learner, monkeypatch):
    """Return the gradients of one optimiser step, before they are clipped."""
    found = {}

    def clip(model, limit):
        found.update((n, p.grad.clone()) for n, p in model.named_parameters() if p.grad is not None)
        return clip_gradients(model, limit)

    with monkeypatch.context() as patch:
        patch.setattr("onepolicy.train.learner.clip_gradients", clip)
        one_step(learner, batch_for(learner))
    return found


def assert_equal_gradients(overrides, several, folder, monkeypatch):
    """Check that gradients of adapters on these ranks are those of one process."""
    one, ranked = (learner_on(others, folder, overrides) for others in (None, several))
    for learner in (one, ranked):  # B is 0 at first, and so is the gradient of A
        one_step(learner, batch_for(learner))
    expected, found = (gradients_of_a_step(each, monkeypatch) for each in (one, ranked))
    assert found.keys() == expected.keys()
    assert all(".lora_" in name for name in found)
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        assert scale > 0, name
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-4 * scale)
