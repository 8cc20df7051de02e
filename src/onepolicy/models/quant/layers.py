"""Linear layers and embeddings that hold int8 or e4m3 codes in place of a weight.

int8 products run on the CPU's VNNI instructions through `torch._int_mm`, 4 to 25 times as fast as float32. No CPU torch
runs on multiplies e4m3 (`torch._scaled_mm` is there a loop of scalar code), so e4m3 weights are converted there when
they are used: a quarter of the memory, the same values as `_scaled_mm`, no speed. GPUs multiply both (`products.py`).
"""

from __future__ import annotations

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

BAG_WIDTH = 512  # inputs up to which every partial sum of 8-bit products is below 2^24
BAG_SIZE = 65_536  # weights of an expert up to which reading them row by row is worth it
MATMUL_CALL_COST = (
    350_000  # multiplications that one expert's two matmuls and their sorting are worth
)


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """One row for each of K experts of N tokens: as they come, or sorted by expert."""

    token: Tensor  # [R]
    expert: Tensor  # [R]
    weight: Tensor  # [R, 1] float32
    counts: list[int] | None  # rows of every expert, if sorted
    back: Tensor | None  # [N, K] the row of (token, k), if sorted
    top_k: int

    @classmethod
    def of(
        cls, top_k_index: Tensor, top_k_weights: Tensor, num_experts: int, *, sort: bool
    ) -> ExpertRows:
        (tokens, top_k), expert = top_k_index.shape, top_k_index.reshape(-1)
        weight, row = (
            top_k_weights.reshape(-1, 1).float(),
            torch.arange(len(expert), device=expert.device),
        )
        if not sort:
            return cls(row // top_k, expert, weight, None, None, top_k)
        order = expert.argsort(stable=True)
        back = torch.empty_like(order).index_copy_(0, order, row).view(tokens, top_k)
        counts = torch.bincount(expert, minlength=num_experts).tolist()
        return cls(order // top_k, expert[order], weight[order], counts, back, top_k)

    def sum(self, out: Tensor) -> Tensor:
        """out [R, H] -> [N, H], weighted."""
        out = out * self.weight
        return (
            out.view(-1, self.top_k, out.shape[1]) if self.back is None else out[self.back]
        ).sum(1)


class Int8Matrices:
    """The weights [E, out, in] of one product of all experts, and the codes of its input."""

    def __init__(self, weight: Tensor, activations: Activations, *, bags: bool) -> None:
        self.activations, self.bags = activations, bags
        self.set_weight(weight)

    def set_weight(self, weight: Tensor) -> None:
        codes, scale = int8_rows(weight)
        self.scale = scale[..., 0]  # [E, out]
        self._shape = codes.mT.shape  # [E, in, out]
        if not self.bags:
            self.codes = codes
            self._matrices = [each.t() for each in codes]
            return
        rows = (
            codes.mT.reshape(-1, codes.shape[1]).view(torch.uint8) ^ 128
        )  # [E * in, out], code + 128
        unit = torch.tensor([1.0, -128.0]).view(torch.uint8).expand(len(rows), -1)
        self.codes = torch.cat([rows, unit], 1)

    def __call__(self, x: Tensor, scale: Tensor, rows: ExpertRows) -> Tensor:
        """x [R, in] int8, scale [R, 1] -> [R, out] float32."""
        product = self._few(x, rows.expert) if rows.counts is None else self._many(x, rows.counts)
        return product * scale * self.scale[rows.expert]

    def _few(self, x: Tensor, expert: Tensor) -> Tensor:
        inputs = x.shape[1]
        index = expert[:, None] * inputs + torch.arange(inputs)
        offsets = bag_offsets(len(x), inputs, inputs, index.dtype)
        return torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
            self.codes, index.view(-1), offsets, False, 0, False, x.float().view(-1), None, False
        )

    def _many(self, x: Tensor, counts: list[int]) -> Tensor:
        out = x.new_empty(len(x), self._shape[2], dtype=torch.int32)
        for own, matrix, target in zip(
            x.split(counts), self._unpacked(), out.split(counts), strict=True
        ):
            if len(own) >= MIN_INT_MM_ROWS or (len(own) and x.device.type == "cpu"):
                torch._int_mm(own, matrix, out=target)
            elif len(own):
                target.copy_(padded_int8_product(own, matrix))
        return out

    def _unpacked(self) -> list[Tensor]:
        """[in, out] int8 of every expert."""
        if not self.bags:
            return self._matrices
        return list((self.codes[:, : self._shape[2]] ^ 128).view(torch.int8).view(self._shape))

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes


class E4M3Matrices:
    """The same of e4m3 codes, as GPUs multiply them: with e4m3 rows, or dequantised with rows in their own dtype."""

    bags = False

    def __init__(self, weight: Tensor, *, activations: bool) -> None:
        self._weight, self._scaled = E4M3Weight(weight), activations
        self.set_weight = self._weight.set_weight

    def activations(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, in] -> what `__call__` takes of its rows."""
        if not self._scaled:
            return x, x.new_ones(len(x), 1, dtype=torch.float32)
        codes, scale = e4m3_rows(x)
        return codes.view(torch.int8), scale  # e4m3 cannot be indexed

    def __call__(self, x: Tensor, scale: Tensor, rows: ExpertRows) -> Tensor:
        """x [R, in], scale [R, 1], sorted by expert -> [R, out]."""
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
    """One layer's experts, of matrices of one kind."""

    up: Int8Matrices | E4M3Matrices
    down: Int8Matrices | E4M3Matrices

    def __init__(self, num_experts: int, cost: int) -> None:
        """cost: multiplications of a row."""
        self.num_experts, self._cost = num_experts, cost

    def __call__(
        self, module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        few = (
            self.up.bags and top_k_index.numel() * self._cost <= MATMUL_CALL_COST * self.num_experts
        )
        rows = ExpertRows.of(top_k_index, top_k_weights, self.num_experts, sort=not few)
        x, scale = self.up.activations(hidden)
        inner = self.up(x[rows.token], scale[rows.token], rows)
        up_bias, down_bias = decode_experts.expert_biases(module)
        inner = decode_experts.expert_activation(module)(
            inner if up_bias is None else inner + up_bias[rows.expert]
        )
        out = self.down(*self.down.activations(inner), rows)
        out = out if down_bias is None else out + down_bias[rows.expert]
        return rows.sum(out).to(hidden.dtype)


class Int8Experts(CodedExperts):
    def __init__(self, up: Tensor, down: Tensor, activations: Sequence[Activations]) -> None:
        """up [E, I', H], down [E, H, I]"""
        super().__init__(len(up), up[0].numel() + down[0].numel())
        widest = max(up.shape[2], down.shape[2])
        bags = up.device.type == "cpu" and widest <= BAG_WIDTH and self._cost <= BAG_SIZE
        self.up, self.down = (
            Int8Matrices(w, a, bags=bags) for w, a in zip((up, down), activations, strict=True)
        )


class E4M3CodedExperts(CodedExperts):
    """For GPUs."""

    def __init__(self, up: Tensor, down: Tensor, *, activations: bool) -> None:
        super().__init__(len(up), up[0].numel() + down[0].numel())
        self.up, self.down = (
            E4M3Matrices(weight, activations=activations) for weight in (up, down)
        )


class E4M3Experts:
    """For the CPU: one layer's weights are converted at a time, while they are used."""

    def __init__(self, up: Tensor, down: Tensor, *, activations: bool) -> None:
        self.up, self.down = E4M3Weight(up, transposed=True), E4M3Weight(down, transposed=True)
        self._activations = activations

    def __call__(
        self, module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        activate, x, dtype = decode_experts.expert_activation(module), hidden, hidden.dtype
        if self._activations:
            own, dtype = activate, torch.float32

            def activate(inner: Tensor) -> Tensor:
                return e4m3_activations(own(inner))

            x = e4m3_activations(hidden)
        weights = (
            self.up.expand(dtype),
            self.down.expand(dtype),
            *decode_experts.expert_biases(module),
        )
        return decode_experts.weighted_experts(weights, activate, x, top_k_index, top_k_weights).to(
            hidden.dtype
        )


Activations = Callable[[Tensor], tuple[Tensor, Tensor]]


def e4m3_activations(x: Tensor) -> Tensor:
    """x [..., n] rounded to e4m3 with a scale per row, as float32."""
    codes, scale = e4m3_rows(x)
    return from_e4m3(codes, torch.float32).mul_(scale * E4M3_UNIT)


class E4M3Weight:
    """A weight [..., in] with one scale per row, or, `transposed`, stored [..., in, out] with one per column."""

    def __init__(self, weight: Tensor, *, transposed: bool = False) -> None:
        self._transposed = transposed
        self.set_weight(weight)

    def set_weight(self, weight: Tensor) -> None:
        codes, scale = e4m3_rows(weight)
        if self._transposed:
            codes, scale = (
                codes.view(torch.int8).transpose(-1, -2).contiguous().view(codes.dtype),
                scale.mT,
            )
        self.codes, self.scale = codes, scale.contiguous()

    def expand(self, dtype: torch.dtype) -> Tensor:
        return from_e4m3(self.codes, torch.float32).mul_(self.scale * E4M3_UNIT).to(dtype)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes


class QuantLinear(nn.Module):
    """In place of nn.Linear. The bias stays a parameter; the weight is taken over by `set_weight`."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.bias = plain.bias
        self.set_weight(plain.weight.detach())

    def set_weight(self, weight: Tensor) -> None:
        raise NotImplementedError

    def rows(self, x: Tensor) -> Tensor:
        """x [N, in] -> float [N, out], without the bias."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        out = self.rows(x.reshape(-1, self.in_features))
        out = out if self.bias is None else out + self.bias
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

    @property
    def nbytes(self) -> int:
        raise NotImplementedError


class Int8Linear(QuantLinear):
    def __init__(self, plain: nn.Linear, activations: Activations) -> None:
        super().__init__(plain)
        self.activations = activations

    def set_weight(self, weight: Tensor) -> None:
        self.codes, scale = int8_rows(weight)  # [out, in]
        self.scale = scale[:, 0]

    def rows(self, x: Tensor) -> Tensor:
        codes, scale = self.activations(x)
        return int8_product(codes, self.codes.t()) * scale * self.scale

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes


class E4M3Linear(QuantLinear):
    def __init__(self, plain: nn.Linear, *, activations: bool) -> None:
        """activations: in e4m3 too, else in their own dtype."""
        super().__init__(plain)
        self.activations = activations

    def set_weight(self, weight: Tensor) -> None:
        self.weight_codes = E4M3Weight(weight)

    def rows(self, x: Tensor) -> Tensor:
        if not self.activations:
            return linear(x, self.weight_codes.expand(x.dtype))
        if x.device.type != "cpu":
            return e4m3_product(*e4m3_rows(x), self.weight_codes.codes, self.weight_codes.scale)
        return linear(e4m3_activations(x), self.weight_codes.expand(torch.float32))

    @property
    def nbytes(self) -> int:
        return self.weight_codes.nbytes


class QuantEmbedding(nn.Module):
    """In place of nn.Embedding: rows are converted when they are looked up."""

    def __init__(
        self, plain: nn.Embedding, *, int8: bool, dtype: Callable[[], torch.dtype]
    ) -> None:
        """dtype: what lookups return, asked at every one."""
        super().__init__()
        self.num_embeddings, self.embedding_dim = plain.num_embeddings, plain.embedding_dim
        self._int8, self._dtype = int8, dtype
        self.set_weight(plain.weight.detach())

    def set_weight(self, weight: Tensor) -> None:
        codes, self.scale = int8_rows(weight) if self._int8 else e4m3_rows(weight)
        self.codes = codes.view(torch.int8)  # e4m3 cannot be indexed

    def forward(self, ids: Tensor) -> Tensor:
        codes, scale = self.codes[ids], self.scale[ids]
        values = codes.float() if self._int8 else from_e4m3(codes, torch.float32) * E4M3_UNIT
        return (values * scale).to(self._dtype())

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes
