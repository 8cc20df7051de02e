"""Random batches with samples of given lengths."""

import torch

from onepolicy.types import RoutingTrace, TokenBatch


def batch_with(lengths):
    slots, samples = sum(lengths), len(lengths)
    generator = torch.Generator().manual_seed(slots)
    ids = torch.rand(slots, 2, 300, generator=generator).topk(2).indices.to(torch.uint16)
    return TokenBatch(
        input_ids=torch.arange(slots),
        target_ids=torch.arange(slots) + 1,
        positions=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        segment=torch.arange(samples).repeat_interleave(torch.tensor(lengths)),
        trainable=torch.ones(slots, dtype=torch.bool),
        version=torch.zeros(slots, dtype=torch.int32),
        turn=torch.zeros(slots, dtype=torch.int32),
        logp_rollout=torch.randn(slots, generator=generator),
        temperature=torch.ones(samples),
        outcome=torch.randn(samples, generator=generator),
        group=torch.arange(samples),
        routing=RoutingTrace(ids, torch.ones(slots, dtype=torch.bool), (1, 3), 300),
        keep=torch.ones(slots, dtype=torch.bool),
        loss_weight=torch.rand(slots, generator=generator),
    )
