"""Gradients of whole learner steps against losses written out in float64 on the stock model, sample
by sample."""

import itertools
import math

import pytest
import torch

from onepolicy.objective.advantages import compute_advantages
from support.learner_steps import batch_of, learner_of
from support.models import make

WORST = 2e-4  # of a gradient's norm: float32 against float64, packed against alone
HEAT = 0.7


def captured(learner):
    """Return the gradients of its next step, {name: float64}, without taking the step."""
    found = {}

    def keep(_):
        found.update(
            {n: p.grad.double() for n, p in learner.model.named_parameters() if p.grad is not None}
        )
        if learner.critic is not None:
            values = learner.critic.values.named_parameters()
            found.update({f"critic.{n}": p.grad.double() for n, p in values if p.grad is not None})
        return 0.0

    learner._optimizer_step = keep
    return found


def stepped(learner):
    """Return a scored batch whose old log-probabilities and values are not those of the weights,
    and the step's gradients."""
    generator = torch.Generator().manual_seed(1)

    def noise(size):
        return size * torch.randn(batch.num_slots, generator=generator)

    batch = learner.score(batch_of(HEAT).replace(routing=None))
    batch = batch.replace(logp_old=torch.where(batch.trainable, batch.logp_old + noise(0.3), 0.0))
    if learner.critic is not None:
        batch = batch.replace(value=torch.where(batch.trainable, noise(0.5), 0.0))
    batch = compute_advantages(batch, learner.config.objective)
    batch = batch.replace(weight=torch.ones(batch.num_slots), keep=batch.trainable)
    found = captured(learner)
    learner.step(batch)
    return batch, found


def whole():
    """Return the same model in float64, on the family's own loop over experts."""
    model = make("qwen3_moe").double()
    model.set_experts_implementation("eager")
    return model


def samples_of(batch, model):
    """Return (log-probabilities, slots) of each sample's trainable slots, in float64, from a
    forward of that sample alone."""
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        mask = batch.trainable[start:end]
        logits = model(input_ids=batch.input_ids[None, start:end], use_cache=False).logits[0] / HEAT
        logp = logits.log_softmax(-1).gather(-1, batch.target_ids[start:end, None].long())[:, 0]
        yield logp[mask], torch.arange(start, end)[mask]


def close(found, wanted):
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        difference = float((found[name] - gradient).norm())
        assert difference <= WORST * float(gradient.norm()) + 1e-9, name
    assert sum(float(gradient.norm()) for gradient in wanted.values()) > 0.01


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
    model = whole()
    total = torch.zeros((), dtype=torch.float64)
    for sample, (logp, slots) in enumerate(samples_of(batch, model)):
        total = (
            total
            + written(logp, batch.logp_old[slots].double(), float(batch.outcome[sample]))
            / batch.num_samples
        )
    total.backward()
    close(found, gradients(model))


def test_gradients_of_a_ppo_step_and_of_its_critic():
    """The terms are GAE by its recursion (1506.02438 eq. 16), whitened, the clipped surrogate and
    the clipped value loss."""
    learner = learner_of("replay.mode=off", "objective.preset=ppo", "objective.critic.clip=0.2")
    with torch.no_grad():
        learner.critic.values.head.weight.normal_(
            0, 0.3, generator=torch.Generator().manual_seed(4)
        )
    batch, found = stepped(learner)

    advantages, returns = [], []
    parts = [
        (batch.trainable & (batch.segment == s)).nonzero()[:, 0] for s in range(batch.num_samples)
    ]
    for sample, slots in enumerate(parts):
        value, ahead, after = batch.value[slots].double().tolist(), 0.0, 0.0
        own = [0.0] * len(value)
        for t in reversed(range(len(value))):
            reward = float(batch.outcome[sample]) if t == len(value) - 1 else 0.0
            ahead = reward + after - value[t] + 0.95 * ahead
            own[t], after = ahead, value[t]
        advantages += own
        returns += [a + v for a, v in zip(own, value, strict=True)]
    raw, target = (torch.tensor(x, dtype=torch.float64) for x in (advantages, returns))
    white = (raw - raw.mean()) / (raw.var() + 1e-8).sqrt()

    model = whole()
    critic = whole().base_model
    head = torch.nn.Linear(64, 1).double()
    head.load_state_dict(learner.critic.values.head.state_dict())
    policy = value_total = torch.zeros((), dtype=torch.float64)
    begin, count = 0, int(batch.trainable.sum())
    for (logp, slots), (start, end) in zip(
        samples_of(batch, model), itertools.pairwise(batch.cu_seqlens.tolist()), strict=True
    ):
        at = slice(begin, begin + len(slots))
        begin += len(slots)
        ratio = (logp - batch.logp_old[slots].double()).exp()
        bounded = ratio.clamp(0.8, 1.2)
        policy = policy - torch.minimum(ratio * white[at], bounded * white[at]).sum() / count
        hidden = critic(
            input_ids=batch.input_ids[None, start:end], use_cache=False
        ).last_hidden_state[0]
        value = head(hidden)[:, 0][slots - start]
        before = batch.value[slots].double()
        near = before + (value - before).clamp(-0.2, 0.2)
        value_total = (
            value_total
            + torch.maximum((value - target[at]) ** 2, (near - target[at]) ** 2).sum() / 2 / count
        )
    policy.backward()
    value_total.backward()
    wanted = (
        gradients(model) | gradients(critic, "critic.backbone.") | gradients(head, "critic.head.")
    )
    close(found, wanted)
    assert math.isfinite(sum(float(g.norm()) for g in wanted.values()))
