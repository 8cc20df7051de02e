"""Sampling of many requests at once, each from its own distribution with its own random numbers.

Inverse transform sampling: the n-th uniform number of a request's seed and its logits decide its
n-th token. The rest of the batch has no influence. The returned log-probability is that of the
distribution sampled from, in float32, by `log_softmax` and gather as on the trainer's side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.models.top_k_top_p import WHOLE_VOCABULARY, apply_min_p, apply_top_k_top_p
from onepolicy.support.trace import KeptSet, kept_sets
from onepolicy.types import Sampling

# part of the numerics contract with the trainer
LOGP_METHOD = "log_softmax of float32 logits / temperature, then gather"
LARGE_VOCABULARY, BLOCK = 8192, 512
"""Tokens from which a CPU draws by blocks, and those of a block."""


@dataclass(frozen=True, slots=True)
class BatchSampling:
    """Sampling parameters of B rows. A tensor is None if every row has the default."""

    temperature: Tensor | None  # [B, 1] float32; 1 for greedy rows
    greedy: Tensor | None  # [B] bool
    top_k: Tensor | None  # [B, 1] int64, WHOLE_VOCABULARY where a row keeps all
    top_p: Tensor | None  # [B, 1] float32
    min_p: Tensor | None = None  # [B, 1] float32
    top_logprobs: int = 0  # the largest of any row
    support: Tensor | None = None  # [B] bool, rows that return the tokens they are drawn from
    support_logp: bool = False  # some row wants the log-probabilities of these, too

    @classmethod
    def from_requests(cls, rows: Sequence[Sampling], device: torch.device) -> BatchSampling:
        def column(
            values: list[float] | list[int], default: float, dtype: torch.dtype
        ) -> Tensor | None:
            if all(value == default for value in values):
                return None
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        greedy = None
        if any(row.temperature == 0 for row in rows):
            greedy = torch.tensor([row.temperature == 0 for row in rows], device=device)
        support = None
        if any(row.support for row in rows):
            support = torch.tensor([row.support for row in rows], device=device)
        columns = zip(*map(_effective_parameters, rows), strict=True)
        temperature, top_k, top_p, min_p = map(list, columns)
        return cls(
            column(temperature, 1.0, torch.float32),
            greedy,
            column(top_k, WHOLE_VOCABULARY, torch.int64),
            column(top_p, 1.0, torch.float32),
            column(min_p, 0.0, torch.float32),
            max(row.top_logprobs for row in rows),
            support,
            any(row.support_logp for row in rows),
        )


def _effective_parameters(sampling: Sampling) -> tuple[float, int, float, float]:
    """Return temperature, top_k, top_p and min_p; for a greedy row those that change nothing."""
    if sampling.temperature == 0:
        return 1.0, WHOLE_VOCABULARY, 1.0, 0.0
    return sampling.temperature, sampling.top_k or WHOLE_VOCABULARY, sampling.top_p, sampling.min_p


class Sampled(NamedTuple):
    """The tokens sampled for B rows, with k = top_logprobs of the batch."""

    tokens: Tensor  # [B] int64
    logp: Tensor  # [B] float32
    top_ids: Tensor | None  # [B, k] int64, most likely first; None if k is 0
    top_logp: Tensor | None  # [B, k] float32
    support: Sequence[KeptSet] = ()  # [B], what each was drawn from, if one asks for it


def uniform_numbers(seed: int, count: int, num_drawn: int = 0) -> np.ndarray:
    """Return [count] float64 in [0, 1), a pure function of the seed.

    The first `num_drawn` numbers of the seed are left out.
    """
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
    return generator.random(num_drawn + count)[num_drawn:]


def sample_tokens(logits: Tensor, uniform: Tensor, rows: BatchSampling) -> Sampled:
    """Sample one token of each row. logits [B, V] float32, uniform [B] float64."""
    tempered = logits
    if rows.temperature is not None:
        tempered = logits / rows.temperature
    tempered = narrow(tempered, rows)
    logp = torch.log_softmax(tempered, -1)
    tokens = _invert_cdf(logp.exp(), uniform)
    if rows.greedy is not None:
        tokens = torch.where(rows.greedy[:, None], logits.argmax(-1, keepdim=True), tokens)
    top_logp: Tensor | None = None
    top_ids: Tensor | None = None
    if rows.top_logprobs:
        top_logp, top_ids = logp.topk(rows.top_logprobs, -1)
    support: Sequence[KeptSet] = ()
    if rows.support is not None:
        kept = (tempered > -torch.inf) & rows.support[:, None]
        values = logp if rows.support_logp else None
        support = kept_sets(kept, values)
    return Sampled(tokens[:, 0], logp.gather(-1, tokens)[:, 0], top_ids, top_logp, support)


def narrow(tempered: Tensor, rows: BatchSampling) -> Tensor:
    """Return [B, V]: -inf where min_p, top_k or top_p cut, in this order as vLLM."""
    if rows.min_p is not None:
        tempered = apply_min_p(tempered, rows.min_p)
    if rows.top_k is not None or rows.top_p is not None:
        tempered = apply_top_k_top_p(tempered, top_k=rows.top_k, top_p=rows.top_p)
    return tempered


def _invert_cdf(probability: Tensor, uniform: Tensor) -> Tensor:
    """Return [B, 1] int64: the token at which the running sum of each row passes `uniform`."""
    if probability.shape[1] >= LARGE_VOCABULARY and probability.device.type == "cpu":
        return invert_cdf_by_blocks(probability, uniform)
    cdf = probability.cumsum(-1, dtype=torch.float64)
    target = uniform[:, None] * cdf[:, -1:]  # rounding may leave the total a little off 1
    tokens = torch.searchsorted(cdf, target, right=True)  # skips zero probabilities
    return tokens.clamp_(max=probability.shape[1] - 1)


def invert_cdf_by_blocks(probability: Tensor, uniform: Tensor) -> Tensor:
    """Return [B, 1] int64: the token of each row at which the running sum passes `uniform`.

    A float64 running sum over 152k tokens takes twice the time of their softmax on a CPU. Here a
    float32 sum of each block decides the block, and a float64 running sum within it the token. A
    block's probability then has float32's rounding, as the probabilities themselves have.
    A token of probability 0 is never returned. probability: [B, V] float32. uniform: [B] float64
    in [0, 1).
    """
    size = probability.shape[1]
    whole = size // BLOCK * BLOCK
    sums = probability[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1)
    sums = torch.cat([sums, probability[:, whole:].sum(-1, keepdim=True)], -1).double()
    ends = sums.cumsum(-1)
    target = uniform[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, target, right=True).clamp_(max=sums.shape[1] - 1)
    begins = ends.gather(-1, block) - sums.gather(-1, block)
    part = ((target - begins) / sums.gather(-1, block)).clamp_(0, 1)
    # the last block may be shorter: zeros fill it up
    columns = block * BLOCK + torch.arange(BLOCK, device=block.device)
    inside = probability.gather(-1, columns.clamp(max=size - 1)).double()
    inside = inside.masked_fill_(columns >= size, 0).cumsum_(-1)
    # a part of 1 - 2**-53 may round to the whole, which no running sum passes
    below = torch.minimum(part * inside[:, -1:], inside[:, -1:].nextafter(torch.zeros_like(part)))
    return (block * BLOCK + torch.searchsorted(inside, below, right=True)).clamp_(max=size - 1)


def check_sampling(sampling: Sampling) -> None:
    """Raise UsageError for parameters that define no distribution."""
    t = sampling.temperature
    expected = {
        "temperature": (t == 0 or 1e-6 <= t < np.inf, "0 (greedy), or 1e-6 or more"),
        "max_tokens": (sampling.max_tokens >= 1, "at least 1"),
        "top_p": (0 < sampling.top_p <= 1, "in (0, 1]; 1 keeps the whole vocabulary"),
        "top_k": (0 <= sampling.top_k <= WHOLE_VOCABULARY, "a number of tokens; 0 keeps all"),
        "min_p": (0 <= sampling.min_p < 1, "in [0, 1); 0 keeps the whole vocabulary"),
        "top_logprobs": (sampling.top_logprobs >= 0, "0 or more; 0 asks for none"),
        "stop": (all(abs(token) < 2**31 for token in sampling.stop), "of token ids alone"),
    }
    for name, (is_good, words) in expected.items():
        if not is_good:
            raise UsageError(f"{name}: {getattr(sampling, name)} is not {words}")
