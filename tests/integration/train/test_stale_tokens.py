"""Training on tokens of older weights, against the sum over samples written out by hand."""

import asyncio
import statistics

import pytest
import torch

from onepolicy.build.components import build_components
from onepolicy.config import ModelConfig, load
from onepolicy.models.load import load_model
from onepolicy.objective.advantages import compute_outcomes
from onepolicy.replay.checks import RoutingError
from onepolicy.replay.routers import bind_routers
from onepolicy.run.hooks import build_hooks
from onepolicy.run.step import StepTimer, sample_rollouts, train_on_rollouts
from onepolicy.sync.push import push_weights
from onepolicy.train.pack import pack

STALE = ["out=unused", "rollout.max_staleness=1"]
ENGINE = ["dtype=float32", "max_num_seqs=24"]
SETTINGS = [*STALE, *(f"rollout.engine.{setting}" for setting in ENGINE)]
SETTINGS += ["rollout.prompts_per_step=6", "optim.clip_norm=1e9"]
SETTINGS += ["replay.min_agreement=0", "objective.entropy_coef=0"]


def played(parts, step):
    """Push the learner's weights to the engine, and return the rollouts of a step."""

    async def play():
        await push_weights(parts.learner, parts.engine)
        return await sample_rollouts(parts, step)

    return asyncio.run(play())


@pytest.mark.few(1)
@pytest.mark.parametrize("most", [None, 1.0])
def test_old_tokens_have_the_gradient_of_the_trained_weights(recipe, policy, most):
    """The gradient is the sum over tokens of min(rho, most) A grad log p / N. p and rho are of the
    new weights with the old ones' experts, q and rewards of the old weights. Without TIS the weight
    is 1."""
    correction = ["preset=recompute"] if most is None else ["preset=tis", f"weight.high={most}"]
    config = load(recipe, [*SETTINGS, *(f"correction.{setting}" for setting in correction)])
    parts, _ = build_components(config)
    learner, found, rollouts = parts.learner, {}, played(parts, 1)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter += parameter.std() * torch.randn_like(parameter)
    learner.version = 1
    weights = {name: tensor.clone() for name, tensor in learner.named_weights()}

    def keep_gradients(*_, **__):
        found.update((n, g.clone()) for n, g in gradients(learner.model).items())

    learner.optimizer.register_step_pre_hook(keep_gradients)
    metrics = train_on_rollouts(parts, build_hooks(parts), 1, rollouts, StepTimer()).metrics
    model = load_model(ModelConfig(path=str(policy)), torch.float32, torch.device("cpu"))
    model.load_state_dict(weights)
    rhos = by_hand(model, rollouts.groups, most)
    assert sum(rho > 1.05 for rho in rhos) > 10  # or the cap would not be seen
    assert metrics["mismatch/k3"] > 1e-3
    expected = gradients(model)
    norm = torch.stack([grad.norm() for grad in expected.values()]).norm()
    assert norm > 1e-2
    assert expected.keys() == found.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=float(2e-5 * norm), rtol=1e-3, msg=name)


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def by_hand(model, groups, most):
    """Leave the gradients in the model and return rho of every token."""
    routers, samples = bind_routers(model), [s for group in groups for s in group.samples]
    tokens, rhos = sum(int(s.trainable.sum()) for s in samples), []
    for group in groups:
        rewards = [s.reward for s in group.samples]
        if len(set(rewards)) == 1:
            continue
        for one in group.samples:
            advantage = one.reward - statistics.fmean(rewards)
            advantage /= statistics.stdev(rewards) + 1e-6
            path, mine = one.tokens.long()[None], one.trainable
            with routers.replay(one.routing, check=False):
                logits = model(input_ids=path[:, :-1], use_cache=False).logits[0]
                logp = torch.log_softmax(logits, -1).gather(-1, path[0, 1:, None])[mine, 0]
                rho = (logp.detach() - one.logp_rollout[mine]).exp()
                weight = torch.ones_like(rho) if most is None else rho.clamp(max=most)
                (-advantage * (weight * logp).sum() / tokens).backward()
            rhos += rho.tolist()
    return rhos


def test_routes_without_agreement_may_be_wrong_or_old(recipe):
    """The error mentions old weights if, and only if, the tokens are of older weights."""
    config = load(recipe, STALE)
    parts, _ = build_components(config)
    batch = pack(compute_outcomes(played(parts, 0).groups, config.objective))
    batch = batch.replace(routing=batch.routing.at(torch.arange(batch.num_slots).roll(1)))
    for version in (0, 3):
        parts.learner.version = version
        with pytest.raises(RoutingError, match="agree in") as error:
            parts.learner.score(batch)
        assert ("sampled 3 updates ago" in str(error.value)) is (version == 3)
