"""Linear layers, experts and embeddings that hold int8 or e4m3 codes in place of a weight.

int8 products run on the CPU's VNNI instructions through `torch._int_mm`, 4 to 25 times as fast as
float32. No CPU that torch runs on multiplies e4m3; `torch._scaled_mm` is a loop of scalar code
there. So e4m3 weights are converted when they are used. They take a quarter of the memory and give
the values of `_scaled_mm`, but save no time. GPUs multiply both (`formats.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onepolicy.models import decode_experts
from onepolicy.models.embedding_bag_matmul import bag_offsets
from onepolicy.models.linear import linear
from onepolicy.models.quant.formats import (
    E4M3,
    E4M3_UNIT,
    MIN_INT_MM_ROWS,
    e4m3_product,
    e4m3_rows,
    from_e4m3,
    int8_product,
    int8_rows,
    padded_int8_product,
)

BAG_WIDTH = 512  # up to so many inputs, every partial sum of 8-bit products is below 2^24
BAG_SIZE = 65_536  # up to so many weights per expert, reading them row by row can be faster
# Multiplications that take as long as sorting and two matmul calls for one expert
MATMUL_CALL_COST = 350_000

Activations = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A conversion of activations x [N, in] to codes [N, in] and scales [N, 1]."""


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """One row for each of K experts of N tokens, in the order of the tokens or sorted by expert."""

    token: Tensor  # [R]
    expert: Tensor  # [R]
    weight: Tensor  # [R, 1] float32
    counts: list[int] | None  # rows of every expert; None: not sorted
    back: Tensor | None  # [N, K] the row of (token, k); None: not sorted
    top_k: int

    @classmethod
    def of(
        cls, top_k_index: Tensor, top_k_weights: Tensor, num_experts: int, *, sort: bool
    ) -> ExpertRows:
        """Return the rows of top_k_index [N, K], weighted by top_k_weights [N, K]."""
        (tokens, top_k), expert = top_k_index.shape, top_k_index.reshape(-1)
        weight = top_k_weights.reshape(-1, 1).float()
        row = torch.arange(len(expert), device=expert.device)
        if not sort:
            return cls(row // top_k, expert, weight, None, None, top_k)
        order = expert.argsort(stable=True)
        back = torch.empty_like(order).index_copy_(0, order, row).view(tokens, top_k)
        counts = torch.bincount(expert, minlength=num_experts).tolist()
        return cls(order // top_k, expert[order], weight[order], counts, back, top_k)

    def sum(self, out: Tensor) -> Tensor:
        """Return each token's weighted sum of its rows. out [R, H] -> [N, H]."""
        out = out * self.weight
        if self.back is None:
            return out.view(-1, self.top_k, out.shape[1]).sum(1)
        return out[self.back].sum(1)


class Int8Matrices:
    """Codes in int8 of one projection's weights [E, out, in], for all experts.

    activations: conversion of the input to codes. bags: keep the codes in the form that
    `embedding_bag` reads row by row.
    """

    def __init__(self, weight: Tensor, activations: Activations, *, bags: bool) -> None:
        self.activations, self.bags = activations, bags
        self.set_weight(weight)

    def set_weight(self, weight: Tensor) -> None:
        """Quantise weight [E, out, in] and keep its codes."""
        codes, scale = int8_rows(weight.contiguous())  # as a GPU's kernels read them
        self.scale = scale[..., 0]  # [E, out]
        self._shape = codes.mT.shape  # [E, in, out]
        if not self.bags:
            self.codes = codes
            self._matrices = [each.t() for each in codes]
            return
        # [E * in, out], code + 128
        rows = codes.mT.reshape(-1, codes.shape[1]).view(torch.uint8) ^ 128
        unit = torch.tensor([1.0, -128.0]).view(torch.uint8).expand(len(rows), -1)
        self.codes = torch.cat([rows, unit], 1)

    def __call__(self, x: Tensor, scale: Tensor, rows: ExpertRows) -> Tensor:
        """Multiply every row by its expert's weight. x [R, in] int8, scale [R, 1] -> [R, out]."""
        if rows.counts is None:
            product = self.by_rows(x, rows.expert)
        else:
            product = self._by_expert(x, rows.counts)
        return product * scale * self.scale[rows.expert]

    def by_rows(self, x: Tensor, expert: Tensor) -> Tensor:
        """Return codes' products [R, out] float32 of x [R, in], reading weights row by row."""
        inputs = x.shape[1]
        index = expert[:, None] * inputs + torch.arange(inputs)
        offsets = bag_offsets(len(x), inputs, inputs, index.dtype)
        return torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
            self.codes, index.view(-1), offsets, False, 0, False, x.float().view(-1), None, False
        )

    def _by_expert(self, x: Tensor, counts: list[int]) -> Tensor:
        """Return codes' products [R, out] int32 of x [R, in], with one matmul per expert."""
        out = x.new_empty(len(x), self._shape[2], dtype=torch.int32)
        parts = zip(x.split(counts), self._unpacked(), out.split(counts), strict=True)
        for rows, matrix, target in parts:
            if len(rows) >= MIN_INT_MM_ROWS or (len(rows) and x.device.type == "cpu"):
                torch._int_mm(rows, matrix, out=target)
            elif len(rows):
                target.copy_(padded_int8_product(rows, matrix))
        return out

    def _unpacked(self) -> list[Tensor]:
        """Return the codes [in, out] int8 of every expert."""
        if not self.bags:
            return self._matrices
        return list((self.codes[:, : self._shape[2]] ^ 128).view(torch.int8).view(self._shape))

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes


class E4M3Matrices:
    """Codes in e4m3 of one projection's weights [E, out, in], for all experts, on a GPU.

    activations: multiply with e4m3 rows. Otherwise weights are dequantised, and rows keep their
    dtype.
    """

    bags = False

    def __init__(self, weight: Tensor, *, activations: bool) -> None:
        self._weight, self._scaled = E4M3Weight(weight), activations
        self.set_weight = self._weight.set_weight

    def activations(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows and scales [N, 1] that `__call__` takes, of x [N, in]."""
        if not self._scaled:
            return x, x.new_ones(len(x), 1, dtype=torch.float32)
        codes, scale = e4m3_rows(x)
        return codes.view(torch.int8), scale  # e4m3 cannot be indexed

    def __call__(self, x: Tensor, scale: Tensor, rows: ExpertRows) -> Tensor:
        """Multiply sorted rows by their expert's weight. x [R, in], scale [R, 1] -> [R, out]."""
        assert rows.counts is not None
        parts = zip(
            x.split(rows.counts),
            scale.split(rows.counts),
            self._weight.codes,
            self._weight.scale,
            strict=True,
        )
        return torch.cat([self._one(*part) for part in parts if len(part[0])])

    def _one(self, x: Tensor, scale: Tensor, codes: Tensor, weight_scale: Tensor) -> Tensor:
        if self._scaled:
            return e4m3_product(x.view(E4M3), scale, codes, weight_scale)
        return x @ from_e4m3(codes, torch.float32).mul_(weight_scale * E4M3_UNIT).to(x.dtype).t()

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes


class CodedExperts:
    """One layer's experts, multiplied in codes."""

    up: Int8Matrices | E4M3Matrices
    down: Int8Matrices | E4M3Matrices

    def __init__(self, num_experts: int, cost: int) -> None:
        """Keep the numbers that decide how to multiply. cost: multiplications of a row."""
        self.num_experts, self._cost = num_experts, cost

    def __call__(
        self, module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        cost = top_k_index.numel() * self._cost
        by_rows = self.up.bags and cost <= MATMUL_CALL_COST * self.num_experts
        rows = ExpertRows.of(top_k_index, top_k_weights, self.num_experts, sort=not by_rows)
        up_bias, down_bias = decode_experts.expert_biases(module)
        x, scale = self.up.activations(hidden)
        inner = self.up(x[rows.token], scale[rows.token], rows)
        if up_bias is not None:
            inner = inner + up_bias[rows.expert]
        inner = decode_experts.expert_activation(module)(inner)
        out = self.down(*self.down.activations(inner), rows)
        if down_bias is not None:
            out = out + down_bias[rows.expert]
        return rows.sum(out).to(hidden.dtype)


class Int8Experts(CodedExperts):
    """One layer's experts in int8."""

    def __init__(self, up: Tensor, down: Tensor, activations: Sequence[Activations]) -> None:
        """Quantise up [E, I', H] and down [E, H, I]. activations: of the two inputs."""
        super().__init__(len(up), up[0].numel() + down[0].numel())
        widest = max(up.shape[2], down.shape[2])
        bags = up.device.type == "cpu" and widest <= BAG_WIDTH and self._cost <= BAG_SIZE
        of_up, of_down = activations
        self.up = Int8Matrices(up, of_up, bags=bags)
        self.down = Int8Matrices(down, of_down, bags=bags)


class E4M3CodedExperts(CodedExperts):
    """One layer's experts in e4m3, on a GPU."""

    def __init__(self, up: Tensor, down: Tensor, *, activations: bool) -> None:
        super().__init__(len(up), up[0].numel() + down[0].numel())
        self.up = E4M3Matrices(up, activations=activations)
        self.down = E4M3Matrices(down, activations=activations)


class E4M3Experts:
    """One layer's experts in e4m3, on a CPU, with weights that are converted while they are used.

    activations: round them to e4m3 too.
    """

    def __init__(self, up: Tensor, down: Tensor, *, activations: bool) -> None:
        self.up, self.down = E4M3Weight(up, transposed=True), E4M3Weight(down, transposed=True)
        self._activations = activations

    def __call__(
        self, module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        activation, x = decode_experts.expert_activation(module), hidden
        activate = activation
        if self._activations:
            x = e4m3_activations(hidden)

            def activate(inner: Tensor) -> Tensor:
                return e4m3_activations(activation(inner))

        up, down = self.up.dequantise(x.dtype), self.down.dequantise(x.dtype)
        weights = (up, down, *decode_experts.expert_biases(module))
        out = decode_experts.weighted_experts(weights, activate, x, top_k_index, top_k_weights)
        return out.to(hidden.dtype)


def e4m3_activations(x: Tensor) -> Tensor:
    """Return x [..., n] rounded to e4m3 with a scale per row, in float32."""
    codes, scale = e4m3_rows(x)
    return from_e4m3(codes, torch.float32).mul_(scale * E4M3_UNIT)


class E4M3Weight:
    """Codes in e4m3 of a weight [..., out, in], with one scale per output.

    transposed: keep the codes as [..., in, out].
    """

    def __init__(self, weight: Tensor, *, transposed: bool = False) -> None:
        self._transposed = transposed
        self.set_weight(weight)

    def set_weight(self, weight: Tensor) -> None:
        """Quantise the weight and keep its codes."""
        codes, scale = e4m3_rows(weight.contiguous())  # as a GPU's kernels read them
        if self._transposed:
            codes = codes.view(torch.int8).transpose(-1, -2).contiguous().view(codes.dtype)
            scale = scale.mT
        self.codes, self.scale = codes, scale.contiguous()

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """Return the weight's rounded values."""
        return from_e4m3(self.codes, torch.float32).mul_(self.scale * E4M3_UNIT).to(dtype)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes


class QuantLinear(nn.Module, ABC):
    """A replacement for nn.Linear. The bias stays a parameter; the weight is kept as codes."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.bias = plain.bias
        self.set_weight(plain.weight.detach())

    @abstractmethod
    def set_weight(self, weight: Tensor) -> None: ...

    @abstractmethod
    def multiply(self, x: Tensor) -> Tensor:
        """Return x @ weight.T in floating point. x [N, in] -> [N, out]."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.multiply(x.reshape(-1, self.in_features))
        if self.bias is not None:
            out = out + self.bias
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

    @property
    @abstractmethod
    def nbytes(self) -> int: ...


class Int8Linear(QuantLinear):
    """A linear layer with an int8 weight. activations: conversion of its input to codes."""

    def __init__(self, plain: nn.Linear, activations: Activations) -> None:
        super().__init__(plain)
        self.activations = activations

    def set_weight(self, weight: Tensor) -> None:
        self.codes, scale = int8_rows(weight)  # [out, in]
        self.scale = scale[:, 0]

    def multiply(self, x: Tensor) -> Tensor:
        codes, scale = self.activations(x)
        return int8_product(codes, self.codes.t()) * scale * self.scale

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes


class E4M3Linear(QuantLinear):
    """A linear layer with an e4m3 weight. activations: round its input to e4m3 too."""

    def __init__(self, plain: nn.Linear, *, activations: bool) -> None:
        super().__init__(plain)
        self.activations = activations

    def set_weight(self, weight: Tensor) -> None:
        self.weight_codes = E4M3Weight(weight)

    def multiply(self, x: Tensor) -> Tensor:
        if not self.activations:
            return linear(x, self.weight_codes.dequantise(x.dtype))
        if x.device.type != "cpu":
            return e4m3_product(*e4m3_rows(x), self.weight_codes.codes, self.weight_codes.scale)
        return linear(e4m3_activations(x), self.weight_codes.dequantise(torch.float32))

    @property
    def nbytes(self) -> int:
        return self.weight_codes.nbytes


class QuantEmbedding(nn.Module):
    """A replacement for nn.Embedding that converts rows when they are looked up.

    int8: keep int8 codes, else e4m3 codes. dtype: returns the dtype of lookups, called at each.
    """

    def __init__(
        self, plain: nn.Embedding, *, int8: bool, dtype: Callable[[], torch.dtype]
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = plain.num_embeddings, plain.embedding_dim
        self._int8, self._dtype = int8, dtype
        self.set_weight(plain.weight.detach())

    def set_weight(self, weight: Tensor) -> None:
        """Quantise the weight and keep its codes."""
        if self._int8:
            codes, self.scale = int8_rows(weight)
        else:
            codes, self.scale = e4m3_rows(weight)
        self.codes = codes.view(torch.int8)  # e4m3 cannot be indexed

    def forward(self, ids: Tensor) -> Tensor:
        codes, scale = self.codes[ids], self.scale[ids]
        if self._int8:
            values = codes.float()
        else:
            values = from_e4m3(codes, torch.float32) * E4M3_UNIT
        return (values * scale).to(self._dtype())

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes
