"""Frozen weights in 4 bits, NF4 of QLoRA (arXiv:2305.14314), rounded and read by bitsandbytes.

A weight rests as codes of 4 bits, and a float32 scale for every BLOCK of them. Whoever reads it
gets a new dequantised tensor. Linear layers keep none for the backward and dequantise again.

bitsandbytes is given blocks as rows: 0.50.2 reads a weight wrongly on a CPU with AVX-512 if its
rows are no multiple of a block. Weights are rounded on the CPU, so every machine has the same base.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from onepolicy.config import UsageError
from onepolicy.models import lora
from onepolicy.models.linear import linear

try:
    from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper
except ImportError:
    raise UsageError(
        "train.lora.base: nf4 needs bitsandbytes, which is not installed; run pip install "
        "'onepolicy[qlora]', or leave it out"
    ) from None

BLOCK = 64  # elements that share a scale
SLICE = 2**16  # blocks that are rounded at once, in about 20 bytes an element


class Nf4(nn.Module):
    """The rule that reads a weight (torch.nn.utils.parametrize): its codes, dequantised."""

    def __init__(self, shape: torch.Size, state: QuantState) -> None:
        super().__init__()
        self.shape, self.state = shape, state
        self.change: Callable[[Tensor], Tensor] | None = None
        """Applied to what is read, if it is set."""

    @torch.no_grad()
    def forward(self, codes: Tensor) -> Tensor:
        """Return the weight that the codes stand for, in the shape and dtype that it had."""
        elements = dequantize_4bit(codes, self.state).view(-1)
        weight = elements[: self.shape.numel()].view(self.shape)
        if self.change is not None:
            return self.change(weight)
        return weight


def encode(weight: Tensor) -> tuple[Tensor, Nf4]:
    """Return the codes of a weight and the rule that reads them, on the weight's device.

    Codes: [n / 2, 1] uint8, of n elements, which are filled up to whole blocks with 0.
    """
    elements = weight.detach().reshape(-1).cpu()
    blocks = nn.functional.pad(elements, (0, -len(elements) % BLOCK)).view(-1, BLOCK)
    codes, scales = [], []
    for part in blocks.split(SLICE):
        code, state = quantize_4bit(part, blocksize=BLOCK, quant_type="nf4")
        codes.append(code)
        scales.append(state.absmax)
    state.absmax, state.shape = torch.cat(scales), blocks.shape  # of all blocks
    state.to(weight.device)
    return torch.cat(codes).to(weight.device), Nf4(weight.shape, state)


def rounded(weight: Tensor) -> Tensor:
    """Return a weight as it is after storing it in nf4, in its dtype."""
    codes, read = encode(weight)
    dequantised: Tensor = read(codes)
    return dequantised


# --- a model that computes with such weights ------------------------------------------------------


def store(model: nn.Module, names: Collection[str]) -> None:
    """Store weights of a model with adapters in nf4. names: in the plain model."""
    found = set()
    for path, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            continue
        plain = path.replace(lora.WRAPPED, "")
        for parameter, _ in list(module.named_parameters(recurse=False)):
            if f"{plain}.{parameter}" in names:
                _store(module, parameter)
                found.add(f"{plain}.{parameter}")
    assert found == set(names), "names are those of the plain model's parameters"
    for name, layer in lora.adapted_layers(model).items():
        if name in names and isinstance(layer, ParamWrapper):
            layer.__class__ = Nf4Wrapper


def _store(module: nn.Module, parameter: str) -> None:
    codes, nf4 = encode(getattr(module, parameter))
    delattr(module, parameter)
    module.register_buffer(parameter, codes)  # optimisers refuse integer parameters
    if isinstance(module, nn.Linear):
        module.__class__ = Nf4Linear
    parametrize.register_parametrization(module, parameter, nf4, unsafe=True)


def stored_bytes(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of all weights in nf4, and what they took before."""
    now = before = 0
    for nf4 in model.modules():
        if isinstance(nf4, parametrize.ParametrizationList) and isinstance(nf4[0], Nf4):
            now += nf4.original.nbytes + nf4[0].state.absmax.nbytes
            before += nf4[0].shape.numel() * nf4[0].state.dtype.itemsize
    return now, before


class Nf4Linear(nn.Linear):
    """A linear layer whose weight is dequantised for its forward, and again for its backward."""

    def forward(self, x: Tensor) -> Tensor:
        rules = lora.rules_of(self, "weight")
        if len(rules) > 1:  # an adapter of Nf4Wrapper, which has a gradient
            return linear(x, self.weight, self.bias)
        out: Tensor = _Multiply.apply(x, rules, self.bias)
        return out


class _Multiply(torch.autograd.Function):
    """The product x @ weight.T + bias, with a gradient for x. weight: returns the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Callable[[], Tensor], bias: Tensor | None) -> Tensor:
        ctx.weight, ctx.dtype = weight, x.dtype
        return linear(x, weight(), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        weight = ctx.weight().to(grad.dtype)
        return linear(grad, weight.T).to(ctx.dtype), None, None


class Nf4Wrapper(ParamWrapper):
    """peft's layer around a weight that is no linear layer's to it, and is in nf4.

    peft 0.21.2 cannot take its adapter off such a weight after a forward: the next one has it
    twice, or fails.
    """

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        """Let the module read its weight with the adapter added."""
        if not active_adapters:
            yield
            return
        rules = lora.rules_of(self.get_base_layer(), self.parameter_name)
        rules.append(_Added(self))
        try:
            with parametrize.cached():
                yield
        finally:
            del rules[-1]


class _Added(nn.Module):
    """The rule that adds an adapter to a weight, with gradients for A and B."""

    def __init__(self, layer: Nf4Wrapper) -> None:
        super().__init__()
        self._layer = [layer]  # in a list, so that it is no part of this module

    def forward(self, weight: Tensor) -> Tensor:
        (layer,) = self._layer
        a, b = lora.factors_of(layer)
        scaling = layer.scaling[lora.ADAPTER]
        with torch.autocast(weight.device.type, enabled=False):
            if layer.num_experts == 1:
                return weight + (b @ a * scaling).to(weight.dtype)
            a = a.view(layer.num_experts, -1, a.shape[1])  # [E, r, I]
            left, right = b.view(len(b), -1, layer.num_experts).permute(2, 0, 1), a
            if getattr(layer.get_base_layer(), "is_transposed", False):
                left, right = right.transpose(1, 2), left.transpose(1, 2)
            left, right = left.to(weight.dtype), right.to(weight.dtype)
            return torch.baddbmm(weight, left, right, alpha=scaling)


# --- the base of a checkpoint ---------------------------------------------------------------------


def restore_base(model: PreTrainedModel, folder: Path) -> None:
    """Round the weights of a plain float32 model that the run of an adapter had in nf4.

    They are rounded to the run's dtype first. Raises UsageError for one that is not in the model.
    """
    stored = json.loads(lora.read_header(folder)[lora.NF4])
    parameters = dict(model.named_parameters())
    for name in stored["weights"]:
        if name not in parameters:
            raise UsageError(
                f"model.path: {type(model).__name__} has no {name}, which the adapter in {folder} "
                "had in nf4; use the base that it was trained on"
            )
        weight = parameters[name].data.to(getattr(torch, stored["dtype"]))
        parameters[name].data = rounded(weight).float()
