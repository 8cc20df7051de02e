"""The vocabulary projection in float32 while the layers below it stay in bfloat16.

A bfloat16 projection rounds logits of 10 to steps of 1/16: the main source of mismatch in MiniMax-M1
(arXiv:2506.13585), mended there as here: float32 weights, float32 hidden states.
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
    """Replaces the forward of a model's output layer; its parameters and state dict stay what they are."""

    def __init__(self, model: PreTrainedModel, *, field: str, copy: bool = False) -> None:
        """copy: keep float32 weights of our own, taken now and by `update_copy`; else those of the model, cast at every call,
        so that gradients reach them (and, tied, the embedding). UsageError, naming `field`, for a head of another kind.
        """
        head = model.get_output_embeddings()
        if not is_plain_linear(head):
            raise UsageError(
                f"{field}: the output layer of {type(model).__name__} is {type(head).__name__}, not a plain linear "
                "layer, so it is not known how to compute it in float32; leave the setting out"
            )
        self._head, self._own = head, {}
        if copy:
            self._own = {
                name: tensor.detach().float().clone() for name, tensor in head.named_parameters()
            }
        head.forward = self._project

    def _project(self, hidden: Tensor) -> Tensor:
        """[..., H] of any dtype -> [..., V] float32."""
        weight, bias = (
            self._own.get("weight", self._head.weight),
            self._own.get("bias", self._head.bias),
        )
        product = getattr(self._head, "product", linear)  # of a layer that has become ours
        with torch.autocast(hidden.device.type, enabled=False):
            return product(hidden.float(), weight.float(), None if bias is None else bias.float())

    def update_copy(self, ours: Tensor, theirs: Tensor) -> None:
        """A sync wrote `theirs` over `ours`: if that is a tensor of the head, our copy takes it over unrounded."""
        for name, copy in self._own.items():
            if getattr(self._head, name).data_ptr() == ours.data_ptr():
                copy.copy_(theirs)


def install_fp32_head(
    model: PreTrainedModel, dtype: torch.dtype, *, field: str, copy: bool = False
) -> Fp32Head:
    """Cast the model to `dtype` but for its head (Fp32Head). UsageError if its logits do not come out in float32."""
    head = Fp32Head(model, field=field, copy=copy)
    cast_model(model, dtype)
    token = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    with torch.no_grad():
        found = model(input_ids=token, use_cache=False).logits.dtype
    if found != torch.float32:
        raise UsageError(
            f"{field}: {type(model).__name__} hands on logits in {found} whatever its output layer computes; leave the "
            "setting out"
        )
    return head


def load_weights(model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> None:
    """All tensors of a state dict, cast to the model's dtype; of an Fp32Head with weights of its own, unrounded; those
    of a quantised model into its format."""
    own = dict(weights)
    stored = (
        quantised.quantised_weights
        if (quantised := getattr(model, "quantised", None)) is not None
        else {}
    )
    for name, each in stored.items():
        each.set_weight(own[name])
    model.load_state_dict(
        {name: tensor for name, tensor in own.items() if name not in stored}, strict=not stored
    )
    head = getattr(getattr(model.get_output_embeddings(), "forward", None), "__self__", None)
    if isinstance(head, Fp32Head):
        for name, tensor in model.state_dict().items():
            head.update_copy(tensor, own[name])
