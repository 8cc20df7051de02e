"""The optimiser and its learning rate."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from onepolicy.config import TrainingError
from onepolicy.config.model import OptimConfig

LOG = logging.getLogger(__name__)


def learning_rate(config: OptimConfig, update: int, done: float) -> float:
    """Of optimiser step `update` (from 0), with this share of the run's steps done.

    Not a share of optimiser steps: a parent with other mini_steps, or steps with fewer, have counted otherwise.
    """
    warm = min(1.0, (update + 1) / (config.warmup_steps + 1))
    left = 1 - done if config.lr_decay == "linear" else 1.0
    return config.lr * warm * left


MASTER = "master"  # state of a parameter: its float32 value


class MasterAdamW(torch.optim.AdamW):
    """AdamW of parameters in any dtype with moments and weights in float32; the parameters are the weights rounded.

    In bfloat16 alone an update of less than 1/256 of a weight is lost.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        rounded = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.dtype != torch.float32:
                    rounded[parameter] = parameter.data
                    grad, parameter.grad = parameter.grad.float(), None
                    parameter.data = self.state[parameter].pop(MASTER, parameter.data.float())
                    parameter.grad = grad
        try:
            super().step()
        finally:
            for parameter, data in rounded.items():
                parameter.grad = None
                self.state[parameter][MASTER] = parameter.data
                parameter.data = data.copy_(parameter.data)


def adamw(model: nn.Module, config: OptimConfig, device: torch.device) -> MasterAdamW:
    return MasterAdamW(
        model.parameters(),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=device.type in ("cpu", "cuda"),
    )


def clip_gradients(model: nn.Module, limit: float) -> float:
    """Scale the gradients to a total norm of at most `limit`; the norm before, over all ranks of a sharded model.

    Squares are added up in float32 at least, whatever the gradients are in: bfloat16 has 8 bits, and a sum of many of
    its numbers fewer.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = _norm(gradients)
    if _number(norm) < SMALL:
        norm = _norm(gradients, shift=2.0**90)
    elif not _number(norm) <= LARGE:
        norm = _norm(gradients, shift=2.0**-70)
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return _number(norm)


SMALL, LARGE = (
    1e-10,
    1e18,
)  # norms; float32 holds the squares of what lies between, or of what is shifted there


def _norm(gradients: Sequence[Tensor], shift: float = 1.0) -> Tensor:
    """shift: a power of two that the gradients are multiplied by while their squares are added up."""
    parts = []
    for grad in gradients:
        wide = torch.promote_types(grad.dtype, torch.float32)
        shifted = grad
        if shift != 1:
            shifted = grad.to(wide) * shift
        parts.append(torch.linalg.vector_norm(shifted, dtype=wide))
    if not parts:
        return torch.tensor(0.0)
    return (
        torch.linalg.vector_norm(torch.stack([part.to(parts[0].device) for part in parts])) / shift
    )


def _number(norm: Tensor) -> float:
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def may_skip(skipped: int, most: int, norms: list[float], step: int) -> int:
    """The number of updates in a row that were not made, after one more; TrainingError if that is over `most`.

    norms: of the policy's gradients and the critic's, if there is one; one of them is not finite.
    """
    whose = "" if not norms[0] < math.inf else "of the critic "
    bad = next(norm for norm in norms if not norm < math.inf)
    if skipped >= most:
        before = f" after {skipped} in a row that were skipped (optim.max_skipped)" if most else ""
        raise TrainingError(
            f"gradient norm {whose}is {bad} in step {step}{before}; this update was not made. Fork from an earlier "
            "checkpoint with a lower optim.lr, and look at mismatch/k3 and train/entropy before it"
        )
    return skipped + 1


def norm_metrics(norms: list[float], most: int) -> dict[str, float]:
    """Of a step's updates, for the log; those that were skipped are said aloud. most: optim.max_skipped."""
    finite = [norm for norm in norms if math.isfinite(norm)]
    skipped = len(norms) - len(finite)
    if skipped:
        LOG.warning(
            "%d of %d updates of this step were skipped: their gradients are not finite",
            skipped,
            len(norms),
        )
    counted = {"train/updates_skipped": float(skipped)} if most else {}
    return counted | {"train/grad_norm": max(finite, default=math.nan)}
