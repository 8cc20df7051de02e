"""The vocabulary projection in float32, while the layers below it stay in bfloat16.

A bfloat16 projection rounds logits of 10 to steps of 1/16. MiniMax-M1 found it the main source of
mismatch, and fixed it in the same way: float32 weights and float32 hidden states
(arXiv:2506.13585).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.config import UsageError
from onepolicy.models.linear import is_plain_linear, linear
from onepolicy.models.load import cast_model


class Fp32Head:
    """A replacement for the forward of a model's output layer.

    The layer's parameters and state dict stay the same.
    """

    def __init__(self, model: PreTrainedModel, *, field: str, copy: bool = False) -> None:
        """Replace the forward.

        Args:
            model: the model, whose output layer must be a plain linear layer.
            field: the setting, for messages.
            copy: keep separate float32 weights, taken now and by `update_copy`. Otherwise the
                model's weights are cast in every call, so that gradients reach them and, if tied,
                the embedding.

        Raises:
            UsageError: the output layer is of another kind.
        """
        head = model.get_output_embeddings()
        if not is_plain_linear(head):
            raise UsageError(
                f"{field}: the output layer of {type(model).__name__} is {type(head).__name__}, "
                "not a plain linear layer, so it is not known how to compute it in float32; leave "
                "the setting out"
            )
        self._head = head
        self._copies: dict[str, Tensor] = {}
        if copy:
            for name, tensor in head.named_parameters():
                self._copies[name] = tensor.detach().float().clone()
        head.forward = self._project

    def _project(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] float32 of hidden states [..., H] of any dtype."""
        weight = self._copies.get("weight", self._head.weight)
        bias = self._copies.get("bias", self._head.bias)
        if bias is not None:
            bias = bias.float()
        product = getattr(self._head, "product", linear)  # of an InvariantLinear
        with torch.autocast(hidden.device.type, enabled=False):
            return product(hidden.float(), weight.float(), bias)

    def update_copy(self, parameter: Tensor, value: Tensor) -> None:
        """Take over the unrounded `value` that a weight sync wrote to `parameter`.

        Does nothing if `parameter` is not one of the head, or the head has no copies.
        """
        for name, copy in self._copies.items():
            if getattr(self._head, name).data_ptr() == parameter.data_ptr():
                copy.copy_(value)


def install_fp32_head(
    model: PreTrainedModel, dtype: torch.dtype, *, field: str, copy: bool = False
) -> Fp32Head:
    """Cast the model to `dtype`, except its head, and return the head.

    field, copy: as of `Fp32Head`.

    Raises:
        UsageError: the output layer is not plain, or the model's logits are not float32.
    """
    head = Fp32Head(model, field=field, copy=copy)
    cast_model(model, dtype)
    token = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    with torch.no_grad():
        found = model(input_ids=token, use_cache=False).logits.dtype
    if found != torch.float32:
        raise UsageError(
            f"{field}: {type(model).__name__} returns logits in {found} whatever its output layer "
            "computes; leave the setting out"
        )
    return head


def load_weights(model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load all tensors of a state dict into the model.

    They are cast to the model's dtype. The copies of an Fp32Head are not rounded. A quantised
    model's weights are quantised.
    """
    given = dict(weights)
    quantised = getattr(model, "quantised", None)
    quantised_weights = {}
    if quantised is not None:
        quantised_weights = quantised.quantised_weights
    for name, weight in quantised_weights.items():
        weight.set_weight(given[name])
    plain = {name: tensor for name, tensor in given.items() if name not in quantised_weights}
    model.load_state_dict(plain, strict=not quantised_weights)
    head = getattr(getattr(model.get_output_embeddings(), "forward", None), "__self__", None)
    if isinstance(head, Fp32Head):
        for name, tensor in model.state_dict().items():
            head.update_copy(tensor, given[name])
