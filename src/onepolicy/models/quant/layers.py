"""Linear layers and embeddings that hold int8 or e4m3 codes in place of a weight.

int8 products run on the CPU's VNNI instructions through `torch._int_mm`, 4 to 25 times as fast as float32. No CPU torch
runs on multiplies e4m3 (`torch._scaled_mm` is there a loop of scalar code), so e4m3 weights are converted there when
they are used: a quarter of the memory, the same values as `_scaled_mm`, no speed. GPUs multiply both (`products.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from onepolicy.models.linear import linear
from onepolicy.models.quant.formats import E4M3_UNIT, e4m3_rows, from_e4m3, int8_rows
from onepolicy.models.quant.products import e4m3_product, int8_product

Activations = Callable[[Tensor], tuple[Tensor, Tensor]]


def e4m3_activations(x: Tensor) -> Tensor:
    """x [..., n] rounded to e4m3 with a scale per row, as float32."""
    codes, scale = e4m3_rows(x)
    return from_e4m3(codes, torch.float32).mul_(scale * E4M3_UNIT)


class E4M3Weight:
    """A weight [..., in] with one scale per row, or, `transposed`, stored [..., in, out] with one per column."""

    def __init__(self, weight: Tensor, *, transposed: bool = False) -> None:
        self._transposed = transposed
        self.take(weight)

    def take(self, weight: Tensor) -> None:
        codes, scale = e4m3_rows(weight)
        if self._transposed:
            codes, scale = codes.view(torch.int8).transpose(-1, -2).contiguous().view(codes.dtype), scale.mT
        self.codes, self.scale = codes, scale.contiguous()

    def expand(self, dtype: torch.dtype) -> Tensor:
        return from_e4m3(self.codes, torch.float32).mul_(self.scale * E4M3_UNIT).to(dtype)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes


class QuantLinear(nn.Module):
    """In place of nn.Linear. The bias stays a parameter; the weight is taken over by `take`."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.bias = plain.bias
        self.take(plain.weight.detach())

    def take(self, weight: Tensor) -> None:
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

    def take(self, weight: Tensor) -> None:
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

    def take(self, weight: Tensor) -> None:
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

    def __init__(self, plain: nn.Embedding, *, int8: bool, dtype: Callable[[], torch.dtype]) -> None:
        """dtype: what lookups return, asked at every one."""
        super().__init__()
        self.num_embeddings, self.embedding_dim = plain.num_embeddings, plain.embedding_dim
        self._int8, self._dtype = int8, dtype
        self.take(plain.weight.detach())

    def take(self, weight: Tensor) -> None:
        codes, self.scale = int8_rows(weight) if self._int8 else e4m3_rows(weight)
        self.codes = codes.view(torch.int8)  # e4m3 cannot be indexed

    def forward(self, ids: Tensor) -> Tensor:
        codes, scale = self.codes[ids], self.scale[ids]
        values = codes.float() if self._int8 else from_e4m3(codes, torch.float32) * E4M3_UNIT
        return (values * scale).to(self._dtype())

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes
