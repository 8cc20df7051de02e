"""An adapter that the embedded engine computes with (train.lora.sync = native).

Only A and B are sent. Linear layers add B A x to W x, unrounded, as the trainer does. For weights
that are no linear layer's (experts, routers) the engine keeps the frozen ones and adds B A to them,
once per sync.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.config import UsageError
from onepolicy.config.lora import LoraConfig
from onepolicy.models import lora
from onepolicy.sync.adapters import Targets


class HeldAdapter:
    """The adapter inside an engine's model. It begins at 0."""

    def __init__(self, model: PreTrainedModel, config: LoraConfig) -> None:
        """Put adapters into the model, which is in the engine's dtype."""
        modules, parameters = Targets(model).choose(config.targets, type(model).__name__)
        self._model, self._scaling = model, config.scaling
        self._frozen = {name: model.get_parameter(name).detach().clone() for name in parameters}
        self._layers: dict[str, lora.LoraLayer] = {}
        if modules:
            alpha = config.scaling * config.rank
            settings = lora.peft_config(
                rank=config.rank, alpha=alpha, modules=modules, parameters=[], base="engine"
            )
            lora.inject(model, settings)
            self._layers = lora.adapted_layers(model)
        model.requires_grad_(False)
        self._factors: lora.Factors = {}

    @torch.no_grad()
    def load(self, factors: lora.Factors) -> None:
        """Load A and B of every adapted weight.

        Raises UsageError unless these are the weights that this engine adapts.
        """
        own = self._layers.keys() | self._frozen.keys()
        different = sorted(own ^ factors.keys())
        if different:
            raise UsageError(f"load_adapter: {different[0]!r} is adapted on one side only")
        for name, (a, b) in factors.items():
            if name in self._frozen:
                self._add_to_frozen(name, a, b)
            else:
                own_a, own_b = lora.factors_of(self._layers[name])
                own_a.copy_(a)
                own_b.copy_(b)
        self._factors = {name: (a.clone(), b.clone()) for name, (a, b) in factors.items()}

    def _add_to_frozen(self, name: str, a: Tensor, b: Tensor) -> None:
        frozen, weight = self._frozen[name], self._model.get_parameter(name)
        module = self._model.get_submodule(name.rpartition(".")[0])
        experts = 1
        if frozen.dim() == 3:
            experts = len(frozen)
        transposed = getattr(module, "is_transposed", False)
        added = lora.product(a, b, self._scaling, experts, transposed=transposed)
        weight.copy_(frozen.float() + added.to(frozen.device))

    def held_factors(self) -> lora.Factors:
        """Return A and B of every adapted weight, as the engine computes with them."""
        return self._factors | {
            name: lora.factors_of(layer) for name, layer in self._layers.items()
        }

    def frozen_weights(self) -> dict[str, Tensor]:
        """Return the weights without the adapter, under the plain model's names."""
        with lora.adapters_off(self._model):
            tensors = dict(lora.merged_tensors(self._model))
        self._model.requires_grad_(False)
        return tensors | self._frozen
