"""Histograms of log rho over fixed bins, which add up over parts and give quantiles."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SMALLEST, GROWTH = 1e-6, 1.02
"""|log rho| below SMALLEST counts as 0; a bin is 2% wide in |log rho|, so a quantile of log rho is
within 1%.
"""
BINS_PER_SIGN = math.ceil(math.log(80.0 / SMALLEST) / math.log(GROWTH)) + 1
BINS = 2 * BINS_PER_SIGN + 1


def histogram(log_ratio: Tensor) -> Tensor:
    """Return [BINS] int64, counts of the finite entries of [n]. Histograms of parts add up."""
    values = log_ratio.float()  # a copy, because the next lines work in place
    values = values[values.isfinite()]
    sign = values.sign()
    values.abs_().clamp_(min=SMALLEST / GROWTH).div_(SMALLEST).log_().div_(
        math.log(GROWTH)
    ).floor_()
    rank = values.add_(1).clamp_(0, BINS_PER_SIGN)  # 0: too small to matter
    return torch.bincount(rank.mul_(sign).add_(BINS_PER_SIGN).int(), minlength=BINS)


def quantiles(counts: Tensor, shares: tuple[float, ...]) -> Tensor:
    """Return [len(shares)] float64, quantiles of rho; NaN if the histogram is empty.

    A quantile is the middle of the bin in which its share of the count is reached.
    """
    cumulative = counts.cumsum(0)
    wanted = torch.tensor(shares, dtype=torch.float64, device=counts.device) * cumulative[-1]
    index = (
        torch.searchsorted(cumulative.double(), wanted.clamp(min=0.5)).clamp(max=BINS - 1)
        - BINS_PER_SIGN
    )
    middle = SMALLEST * GROWTH ** (index.abs().double() - 0.5)
    values = torch.where(index == 0, 0.0, middle * index.sign()).exp()
    return torch.where(cumulative[-1] > 0, values, torch.nan)
