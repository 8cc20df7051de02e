"""A batch of groups whose samples share a prompt, and what a learner makes of it."""

import torch

from onepolicy.objective.advantages import compute_advantages
from onepolicy.replay.routers import Routers
from onepolicy.train.pack import pack
from onepolicy.types import Group, RoutingTrace, TokenBatch
from support.learner_steps import random_sample
from support.models import VOCAB


def siblings(
    prompts=(9, 5, 1), members=3, *, routes_differ_at: int | None = None, temperature: float = 1.0
) -> TokenBatch:
    """Return groups whose samples begin with the same tokens and routes.

    prompts: tokens of each group's prompt. routes_differ_at: slot at which siblings have other
    routes.
    """
    generator = torch.Generator().manual_seed(7)
    groups = []
    for number, prompt in enumerate(prompts):
        samples = []
        for member in range(members):
            outcome = float(member - 1) + 0.25 * number
            sample = random_sample(prompt + 4 + 5 * member, outcome, generator, temperature)
            if samples:
                leader = samples[0]
                sample.tokens[:prompt] = leader.tokens[:prompt]
                sample.routing.ids[:prompt] = leader.routing.ids[:prompt]
                # no accident makes the first token of the responses the same
                other = (leader.tokens[prompt] + member) % VOCAB
                sample.tokens[prompt] = other
                if routes_differ_at is not None and routes_differ_at < prompt:
                    moved = (sample.routing.ids[routes_differ_at] + 1) % 8
                    sample.routing.ids[routes_differ_at] = moved
            trainable = torch.arange(len(sample.tokens) - 1) >= prompt - 1
            logp = torch.where(trainable, -3.0, torch.nan)
            sample.trainable.copy_(trainable)
            sample.logp_rollout.copy_(logp)
            samples.append(sample)
        groups.append(Group(number, tuple(samples)))
    return pack(groups)


def with_routes_of(batch: TokenBatch, routers: Routers, *, weights: bool = False) -> TokenBatch:
    """Return the batch with random routes of this model, the same for siblings' equal slots.

    weights: with random weights of the experts, as engines send them for replay.mode = weights.
    """
    source = first_equal_slots(batch)
    generator = torch.Generator().manual_seed(11)
    shape = batch.num_slots, len(routers.layers), routers.num_experts
    ids = torch.rand(shape, generator=generator).topk(routers.top_k).indices[source]
    given = None
    if weights:
        given = torch.rand(ids.shape, generator=generator)[source] + 0.1
    valid = torch.ones(batch.num_slots, dtype=torch.bool)
    trace = RoutingTrace(
        ids.to(torch.uint8), valid, routers.layers, routers.num_experts, weights=given
    )
    return batch.replace(routing=trace)


def with_top_ids(batch: TokenBatch, top: int) -> TokenBatch:
    """Return the batch with random likeliest tokens of every slot, as an engine sends them."""
    generator = torch.Generator().manual_seed(13)
    likely = torch.rand(batch.num_slots, VOCAB, generator=generator).log_softmax(-1).topk(top)
    return batch.replace(top_ids=likely.indices.int(), top_logp_rollout=likely.values)


def first_equal_slots(batch: TokenBatch) -> torch.Tensor:
    """Return for each slot [T] int64 the first slot of its group after the same tokens."""
    known: dict[tuple[int, ...], int] = {}
    bounds = batch.cu_seqlens.tolist()
    found = []
    for sample, start in enumerate(bounds[:-1]):
        tokens = batch.input_ids[start : bounds[sample + 1]].tolist()
        for i in range(len(tokens)):
            path = (int(batch.group[sample]), *tokens[: i + 1])
            found.append(known.setdefault(path, start + i))
    return torch.tensor(found)


def scored_and_gradients(learner, batch):
    """Return the scored batch and the gradients of all parameters, before the optimiser's step."""
    scored = learner.score(batch)
    ones = torch.ones(scored.num_slots)
    scored = compute_advantages(
        scored.replace(weight=ones, keep=scored.trainable.clone()), learner.config.objective
    )
    found = {}

    def keep(*_, **__):
        named = learner.model.named_parameters()
        found.update({n: p.grad.clone() for n, p in named if p.grad is not None})

    learner.optimizer.register_step_pre_hook(keep)
    in_update = learner.step(scored).scored
    if in_update is not None:
        scored = in_update
    return scored, found


def distance(one, other) -> float:
    """Return the L2 distance of two gradients, relative to the second."""
    assert one.keys() == other.keys()
    flat = [torch.cat([grads[n].double().flatten() for n in other]) for grads in (one, other)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())
