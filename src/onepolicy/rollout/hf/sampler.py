"""Sample tokens of many requests at once, each from its own distribution and its own random numbers.

Inverse transform sampling: request i's n-th token is decided by the n-th uniform of its seed and by its logits, never
by what else is in the batch. The returned log-probability is that of the distribution sampled from, in float32, by
`log_softmax` and gather as on the trainer's side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.models.top_k_top_p import WHOLE_VOCABULARY, apply_top_k_top_p
from onepolicy.types import Sampling

LOGP_METHOD = (
    "log_softmax of float32 logits / temperature, then gather"  # for the contract with the trainer
)


@dataclass(frozen=True, slots=True)
class BatchSampling:
    """Sampling parameters of B rows. A field is None if no row uses what it is for."""

    temperature: Tensor | None  # [B, 1] float32; 1 for greedy rows
    greedy: Tensor | None  # [B] bool
    top_k: Tensor | None  # [B, 1] int64, WHOLE where a row keeps all
    top_p: Tensor | None  # [B, 1] float32
    top_logprobs: int = 0  # most that a row asks for

    @classmethod
    def from_requests(cls, rows: Sequence[Sampling], device: torch.device) -> BatchSampling:
        def column(
            values: list[float] | list[int], off: float, dtype: torch.dtype
        ) -> Tensor | None:
            return (
                None
                if all(v == off for v in values)
                else torch.tensor(values, dtype=dtype, device=device)[:, None]
            )

        greedy = [r.temperature == 0 for r in rows]
        return cls(
            column([r.temperature or 1.0 for r in rows], 1.0, torch.float32),
            torch.tensor(greedy, device=device) if any(greedy) else None,
            column(
                [r.top_k if r.top_k and r.temperature else WHOLE_VOCABULARY for r in rows],
                WHOLE_VOCABULARY,
                torch.int64,
            ),
            column([r.top_p if r.temperature else 1.0 for r in rows], 1.0, torch.float32),
            max(r.top_logprobs for r in rows),
        )


class Sampled(NamedTuple):
    tokens: Tensor  # [B] int64
    logp: Tensor  # [B] float32
    top_ids: (
        Tensor | None
    )  # [B, k] int64, likeliest first, k = rows.top_logprobs; None if that is 0
    top_logp: Tensor | None  # [B, k] float32


def uniform_numbers(seed: int, count: int, drawn: int = 0) -> np.ndarray:
    """[count] float64 in [0, 1), a pure function of the seed: those after its first `drawn`."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed))).random(
        drawn + count
    )[drawn:]


def sample_tokens(logits: Tensor, uniform: Tensor, rows: BatchSampling) -> Sampled:
    """One token of each row. logits [B, V] float32, uniform [B] float64."""
    tempered = logits if rows.temperature is None else logits / rows.temperature
    if rows.top_k is not None or rows.top_p is not None:
        tempered = apply_top_k_top_p(tempered, top_k=rows.top_k, top_p=rows.top_p)
    logp = torch.log_softmax(tempered, -1)
    cdf = logp.exp().cumsum(-1, dtype=torch.float64)
    target = uniform[:, None] * cdf[:, -1:]  # rounding may leave the total a little off 1
    tokens = torch.searchsorted(cdf, target, right=True).clamp_(
        max=logits.shape[1] - 1
    )  # skips zero probabilities
    if rows.greedy is not None:
        tokens = torch.where(rows.greedy[:, None], logits.argmax(-1, keepdim=True), tokens)
    top_logp, top_ids = logp.topk(rows.top_logprobs, -1) if rows.top_logprobs else (None, None)
    return Sampled(tokens[:, 0], logp.gather(-1, tokens)[:, 0], top_ids, top_logp)


def check_sampling(sampling: Sampling) -> None:
    """Raises UsageError for parameters no distribution belongs to."""
    if not (np.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise UsageError(
            f"temperature: {sampling.temperature} is not a finite number >= 0 (0 is greedy)"
        )
    if sampling.max_tokens < 1:
        raise UsageError(f"max_tokens: {sampling.max_tokens}; sample at least 1 token")
    if not 0 < sampling.top_p <= 1:
        raise UsageError(f"top_p: {sampling.top_p} is not in (0, 1]; 1 keeps the whole vocabulary")
    if sampling.top_k < 0:
        raise UsageError(f"top_k: {sampling.top_k} is negative; 0 keeps the whole vocabulary")
    if sampling.top_logprobs < 0:
        raise UsageError(f"top_logprobs: {sampling.top_logprobs} is negative; 0 asks for none")
