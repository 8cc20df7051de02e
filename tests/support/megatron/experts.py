"""The tokens that each expert of a Megatron model is given, seen at the experts themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class ExpertLog:
    """The inputs of the MoE layers and of their experts in the last forward."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.fed: dict[Any, Tensor] = {}  # MoE layer -> [S, B, H]
        self.given: dict[Any, dict[int, Tensor]] = {}  # MoE layer -> expert -> [n, H]

    def note_layer(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        self.fed[layer] = args[0].detach().clone()

    def note_expert(self, layer: nn.Module, expert: int, args: tuple[Any, ...]) -> None:
        self.given.setdefault(layer, {})[expert] = args[0].detach().clone()

    def used(self) -> Tensor:
        """Return [B * S, L, E] bool: whether a token, sample by sample, reached an expert.

        A token is found again by its hidden state, so no two of them may be equal.
        """
        columns = []
        for layer in self.layers:
            hidden = self.fed[layer].transpose(0, 1).flatten(0, 1)  # [B * S, H]
            assert len(hidden.unique(dim=0)) == len(hidden)
            experts = [
                (hidden[:, None] == self.given[layer][expert]).all(-1).any(1)
                for expert in range(len(layer.experts.local_experts))
            ]
            columns.append(torch.stack(experts, 1))
        return torch.stack(columns, 1)


@contextmanager
def watched_experts(model: nn.Module) -> Iterator[ExpertLog]:
    """Log the inputs of all MoE layers of the decoder and of their experts."""
    layers = [layer.mlp for layer in model.decoder.layers if hasattr(layer.mlp, "router")]
    log, hooks = ExpertLog(layers), []
    for layer in layers:
        hooks.append(layer.register_forward_pre_hook(log.note_layer))
        for number, expert in enumerate(layer.experts.local_experts):
            hooks.append(
                expert.register_forward_pre_hook(
                    lambda _, args, layer=layer, number=number: log.note_expert(layer, number, args)
                )
            )
    try:
        yield log
    finally:
        for hook in hooks:
            hook.remove()


def one_hot(ids: Tensor, experts: int) -> Tensor:  # [T, L, K] -> [T, L, E] bool
    return torch.zeros(*ids.shape[:2], experts, dtype=torch.bool).scatter(2, ids.long(), True)
