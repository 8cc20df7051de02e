"""Small groups and batches for the tests of objectives."""

from __future__ import annotations

import torch
from torch import Tensor

from onepolicy.config import ObjectiveConfig
from onepolicy.objective.advantages import compute_advantages
from onepolicy.types import Group, Sample, TokenBatch


def group(rewards: list[float], problem_id: int = 0, slots: tuple[int, ...] = ()) -> Group:
    """Return samples with these rewards and (1 each unless given) trainable slots."""

    def sample(reward: float, count: int) -> Sample:
        zeros = torch.zeros(count, dtype=torch.int32)
        trainable = torch.ones(count, dtype=torch.bool)
        tokens, logp = torch.zeros(count + 1, dtype=torch.int32), torch.zeros(count)
        return Sample(tokens, trainable, logp, zeros, zeros, 1.0, reward, "stop")

    return Group(problem_id, tuple(map(sample, rewards, slots or (1,) * len(rewards))))


def batch(
    lengths: list[int], trainable: Tensor, outcome: list[float], **fields: Tensor
) -> TokenBatch:
    slots, zeros = sum(lengths), torch.zeros(sum(lengths), dtype=torch.int64)
    return TokenBatch(
        input_ids=zeros,
        target_ids=zeros,
        positions=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32),
        segment=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        trainable=trainable,
        version=zeros.int(),
        turn=zeros.int(),
        logp_rollout=torch.zeros(slots),
        temperature=torch.ones(len(lengths)),
        outcome=torch.tensor(outcome),
        group=torch.arange(len(lengths)) // 2,
    ).replace(**fields)


def random_batch(
    seed: int, samples: int = 5, config: ObjectiveConfig | None = None
) -> tuple[Tensor, TokenBatch]:
    """Return a finished batch in float64 with a rejected slot and rollout log-probabilities near
    logp_old, and a logp_new."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 7, (samples,), generator=g).tolist()
    n = sum(lengths)
    trainable = torch.rand(n, generator=g) < 0.7
    trainable[:2] = True
    rejected = torch.zeros(n, dtype=torch.bool)
    rejected[1] = True

    def near(logp: Tensor) -> Tensor:
        return logp + torch.randn(n, generator=g).double() * 0.3

    old = -torch.rand(n, generator=g).double() * 3 - 2
    made = batch(lengths, trainable, torch.randn(samples, generator=g).tolist())
    made = made.replace(
        logp_old=old, logp_ref=near(old), logp_rollout=near(old), value=torch.zeros(n)
    )
    made = compute_advantages(made, ObjectiveConfig() if config is None else config)
    made = made.replace(weight=torch.rand(n, generator=g).double() * 2, keep=trainable & ~rejected)
    return near(old), made
