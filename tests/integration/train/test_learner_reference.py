"""Gradients of whole learner steps against losses written out in float64 on the stock model, sample
by sample."""

import itertools
import math

import pytest
import torch

from onepolicy.objective.advantages import compute_advantages
from support.learner_steps import batch_of, learner_of
from support.models import make
from support.plain_forward import each_sample, of_targets

WORST = 2e-4  # of a gradient's norm: float32 against float64, packed against alone
HEAT = 0.7


def stepped(learner):
    """Return a scored batch whose old log-probabilities and values are not those of the weights,
    and the step's gradients {name: float64}."""
    generator = torch.Generator().manual_seed(1)

    def noise(size):
        return size * torch.randn(batch.num_slots, generator=generator)

    batch = learner.score(batch_of(HEAT).replace(routing=None))
    batch = batch.replace(logp_old=torch.where(batch.trainable, batch.logp_old + noise(0.3), 0.0))
    if learner.critic is not None:
        batch = batch.replace(value=torch.where(batch.trainable, noise(0.5), 0.0))
    batch = compute_advantages(batch, learner.config.objective)
    batch = batch.replace(weight=torch.ones(batch.num_slots), keep=batch.trainable)
    found = {}

    def keep(model, prefix=""):
        copies = {name: gradient.double() for name, gradient in gradients(model, prefix).items()}
        found.update(copies)

    learner.optimizer.register_step_pre_hook(lambda *_, **__: keep(learner.model))
    if learner.critic is not None:
        critic = learner.critic
        critic.optimizer.register_step_pre_hook(lambda *_, **__: keep(critic.values, "critic."))
    learner.step(batch)
    return batch, found


def whole():
    """Return the same model in float64, on the family's own loop over experts."""
    model = make("qwen3_moe").double()
    model.set_experts_implementation("eager")
    return model


def samples_of(batch, model):
    """Yield (log-probabilities, slots) of each sample's trainable slots, in float64."""
    for part, logp in each_sample(model, batch, HEAT):
        mask = batch.trainable[part]
        slots = torch.arange(part.start, part.stop)
        yield of_targets(logp, batch, part)[mask], slots[mask]


def close(found, wanted):
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        difference = float((found[name] - gradient).norm())
        assert difference <= WORST * float(gradient.norm()) + 1e-9, name
    assert 0.01 < sum(float(gradient.norm()) for gradient in wanted.values()) < math.inf


def gradients(model, prefix=""):
    return {prefix + n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def topr(logp, old, advantage):
    """Compute 2503.14286 eq. 3: min(product of the ratios, 1) where the advantage is negative,
    summed over the sample."""
    ratio = float((logp.detach() - old).sum().exp())
    weight = min(ratio, 1.0) if advantage < 0 else 1.0
    return -weight * advantage * logp.sum()


def gmpo(logp, old, advantage):
    """Compute 2507.20673 eq. 4: the geometric mean of ratios, each clipped pessimistically to
    [exp(-0.4), exp(0.4)]."""
    log_ratio = logp - old
    clipped = log_ratio.clamp(max=0.4) if advantage > 0 else log_ratio.clamp(min=-0.4)
    return -clipped.mean().exp() * advantage


@pytest.mark.parametrize("written", [topr, gmpo])
def test_gradient_of_a_step(written):
    learner = learner_of("replay.mode=off", f"objective.preset={written.__name__}")
    batch, found = stepped(learner)
    model, total = whole(), torch.zeros((), dtype=torch.float64)
    for sample, (logp, slots) in enumerate(samples_of(batch, model)):
        old, advantage = batch.logp_old[slots].double(), float(batch.outcome[sample])
        total = total + written(logp, old, advantage) / batch.num_samples
    total.backward()
    close(found, gradients(model))


def generalised_advantages(values, outcome):
    """Compute 1506.02438 eq. 16 by its recursion, with lambda 0.95 and gamma 1."""
    ahead = after = 0.0
    found = [0.0] * len(values)
    for t in reversed(range(len(values))):
        reward = outcome if t == len(values) - 1 else 0.0
        ahead = reward + after - values[t] + 0.95 * ahead
        found[t], after = ahead, values[t]
    return found


def test_gradients_of_a_ppo_step_and_of_its_critic():
    """The terms are GAE, whitened, the clipped surrogate and the clipped value loss."""
    learner = learner_of("replay.mode=off", "objective.preset=ppo", "objective.critic.clip=0.2")
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        learner.critic.values.head.weight.normal_(0, 0.3, generator=generator)
    head = torch.nn.Linear(64, 1).double()
    head.load_state_dict(learner.critic.values.head.state_dict())
    batch, found = stepped(learner)

    advantages, returns = [], []
    for sample in range(batch.num_samples):
        slots = (batch.trainable & (batch.segment == sample)).nonzero()[:, 0]
        values = batch.value[slots].double().tolist()
        own = generalised_advantages(values, float(batch.outcome[sample]))
        advantages += own
        returns += [a + v for a, v in zip(own, values, strict=True)]
    raw, target = (torch.tensor(x, dtype=torch.float64) for x in (advantages, returns))
    white = (raw - raw.mean()) / (raw.var() + 1e-8).sqrt()

    model, critic = whole(), whole().base_model
    policy = value_total = torch.zeros((), dtype=torch.float64)
    begin, count = 0, int(batch.trainable.sum())
    bounds = itertools.pairwise(batch.cu_seqlens.tolist())
    for (logp, slots), (start, end) in zip(samples_of(batch, model), bounds, strict=True):
        at = slice(begin, begin + len(slots))
        begin += len(slots)
        ratio = (logp - batch.logp_old[slots].double()).exp()
        bounded = ratio.clamp(0.8, 1.2)
        policy = policy - torch.minimum(ratio * white[at], bounded * white[at]).sum() / count
        hidden = critic(input_ids=batch.input_ids[None, start:end], use_cache=False)
        value = head(hidden.last_hidden_state[0])[:, 0][slots - start]
        before = batch.value[slots].double()
        near = before + (value - before).clamp(-0.2, 0.2)
        losses = torch.maximum((value - target[at]) ** 2, (near - target[at]) ** 2)
        value_total = value_total + losses.sum() / 2 / count
    policy.backward()
    value_total.backward()
    on_critic = gradients(critic, "critic.backbone.") | gradients(head, "critic.head.")
    close(found, gradients(model) | on_critic)
