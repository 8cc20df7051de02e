"""Gradients of adapters on several ranks.

FSDP2 shards the frozen weights. A and B were added after it, so it leaves them alone: every rank
has all of them, the same sum of gradients, and so the same optimiser state and the same update.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


def sum_gradients(model: nn.Module) -> None:
    """Add up the gradients of all trainable parameters over the ranks, in float32.

    They are summed and not averaged, as FSDP2's are here, because the loss weight of a slot is that
    of the whole minibatch. A parameter that no rank has a gradient of keeps none.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    present = torch.tensor([float(p.grad is not None) for p in trained], device=trained[0].device)
    flat = [present]
    for parameter in trained:
        grad = parameter.grad
        if grad is None:
            grad = torch.zeros_like(parameter)
        flat.append(grad.float().flatten())
    summed = torch.cat(flat)
    dist.all_reduce(summed)
    counts, *gradients = summed.split([each.numel() for each in flat])
    for parameter, count, grad in zip(trained, counts.tolist(), gradients, strict=True):
        if count:
            parameter.grad = grad.view_as(parameter).to(parameter.dtype)
