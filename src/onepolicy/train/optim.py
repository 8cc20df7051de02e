"""The optimiser, its learning rate, and gradient clipping."""

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

MASTER = "master"  # key in the optimiser's state of a parameter: its float32 value

# Norms between these need no scaling: float32 holds the squares of their gradients. Gradients with
# a smaller or larger norm are scaled into this range first.
SMALL_NORM, LARGE_NORM = 1e-10, 1e18


def learning_rate(config: OptimConfig, update: int, done: float) -> float:
    """Return the learning rate of optimiser step `update` (from 0).

    done: fraction of the run's steps that is done. It is not a fraction of optimiser steps, because
    a parent run with another number of minibatches has counted these differently.
    """
    warmup = min(1.0, (update + 1) / (config.warmup_steps + 1))
    decay = 1 - done if config.lr_decay == "linear" else 1.0
    return config.lr * warmup * decay


class MasterAdamW(torch.optim.AdamW):
    """AdamW with float32 moments and float32 master weights, for parameters in any dtype.

    The parameters are the master weights, rounded. In bfloat16 alone, an update of less than 1/256
    of a weight would be lost.
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

    def saved_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the parameter's state as checkpoints hold it: float32. Empty before a step."""
        return self.state.get(parameter, {})

    def empty_state(self, parameter: Tensor) -> Tensor:
        """Return a tensor to read a moment or master of the parameter into. See `put_state`."""
        return torch.empty_like(parameter, dtype=torch.float32)

    def put_state(self, parameter: Tensor, key: str, value: Tensor) -> None:
        """Set a value of `saved_state`. Masters of a bfloat16 run are a float32 fork's weights."""
        if key == MASTER and parameter.dtype == torch.float32:
            parameter.data.copy_(value)
        else:
            self.state[parameter][key] = value.to(parameter.device, torch.float32)


def clip_gradients(model: nn.Module, limit: float) -> float:
    """Scale the gradients to a total norm of at most `limit`. Return the norm before scaling.

    The norm is over all ranks of a sharded model. Squares are added in float32 or wider, whatever
    dtype the gradients have: bfloat16 has 8 bits, and a sum of many of its numbers has fewer.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = _norm(gradients)
    if _to_float(norm) < SMALL_NORM:
        norm = _norm(gradients, scale=2.0**90)
    elif not _to_float(norm) <= LARGE_NORM:
        norm = _norm(gradients, scale=2.0**-70)
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return _to_float(norm)


def _norm(gradients: Sequence[Tensor], scale: float = 1.0) -> Tensor:
    """Return the total norm of the gradients.

    scale: a power of two by which gradients are multiplied while their squares are added.
    """
    norms = []
    for grad in gradients:
        dtype = torch.promote_types(grad.dtype, torch.float32)
        scaled = grad
        if scale != 1:
            scaled = grad.to(dtype) * scale
        norms.append(torch.linalg.vector_norm(scaled, dtype=dtype))
    if not norms:
        return torch.tensor(0.0)
    on_one_device = torch.stack([norm.to(norms[0].device) for norm in norms])
    return torch.linalg.vector_norm(on_one_device) / scale


def _to_float(norm: Tensor) -> float:
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    return float(norm)


def count_skipped_update(skipped: int, max_skipped: int, norms: list[float], step: int) -> int:
    """Return the number of updates skipped in a row, after one more.

    norms: of the policy's gradients and, if there is a critic, of the critic's. One is not finite.
    Raises TrainingError if more than `max_skipped` updates in a row would be skipped.
    """
    norm = next(norm for norm in norms if not norm < math.inf)
    if skipped < max_skipped:
        return skipped + 1
    network = ""
    if norms[0] < math.inf:
        network = "of the critic "
    before = ""
    if max_skipped:
        before = f" after {skipped} in a row that were skipped (optim.max_skipped)"
    raise TrainingError(
        f"gradient norm {network}is {norm} in step {step}{before}; this update was not made. Fork "
        "from an earlier checkpoint with a lower optim.lr, and look at mismatch/k3 and "
        "train/entropy before it"
    )


def norm_metrics(norms: list[float], max_skipped: int) -> dict[str, float]:
    """Return the gradient-norm metrics of a step's updates. Log a warning for skipped updates.

    max_skipped: optim.max_skipped.
    """
    finite = [norm for norm in norms if math.isfinite(norm)]
    skipped = len(norms) - len(finite)
    if skipped:
        LOG.warning(
            "%d of %d updates of this step were skipped: their gradients are not finite",
            skipped,
            len(norms),
        )
    metrics = {}
    if max_skipped:
        metrics["train/updates_skipped"] = float(skipped)
    metrics["train/grad_norm"] = max(finite, default=math.nan)
    return metrics
