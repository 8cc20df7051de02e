"""Sampling supports in a trainer's batch: the tokens that each sampled token was drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.errors import describe_argument
from onepolicy.support.trace import SupportTrace


def fit_support(support: SupportTrace, slots: int) -> SupportTrace:
    """Return the supports of the first `slots` slots; further ones are missing."""
    rest = slots - len(support)
    if rest > 0:
        return SupportTrace.concat([support, SupportTrace.missing(rest)])
    return support.at(slice(0, slots))


def to_support(payload: Any, tokens: int, *, name: str) -> SupportTrace:
    """Make the supports of a completion from an engine's form of them.

    payload: a SupportTrace; a list of lists of token ids (vLLM's and SGLang's sampling masks), in
    which None or an empty one is missing; an integer tensor or array [tokens, K], filled with -1
    (SkyRL); None: all are missing. tokens: of the completion. name: for the error.

    Raises:
        UsageError: the payload is none of these, or has another number of tokens.
    """
    if payload is None:
        return SupportTrace.missing(tokens)
    if isinstance(payload, SupportTrace):
        support = payload
    elif isinstance(payload, list | tuple):
        support = SupportTrace.from_sets([each or [] for each in payload])
    else:
        rows = torch.as_tensor(payload)
        if rows.dim() != 2 or rows.is_floating_point():
            raise UsageError(
                f"{name} is {describe_argument(rows)}, expected lists of token ids, or integers "
                "[tokens, K] filled with -1"
            )
        support = SupportTrace.from_padded(rows)
    if len(support) != tokens:
        raise UsageError(f"{name} has {len(support)} supports for {tokens} tokens")
    return support


def batch_supports(
    supports: Sequence[SupportTrace], width: int, device: torch.device | str
) -> SupportTrace:
    """Return the supports of B samples as those of a batch [B, width], row after row."""
    return SupportTrace.concat([fit_support(each, width) for each in supports]).to(device)


def add_supports(
    rows: Sequence[dict[str, Any]],
    supports: Sequence[SupportTrace],
    logp_vocabulary: Tensor | None = None,  # [B, T] float32
) -> None:
    """Add the support columns to rows of `dump_row`.

    Args:
        rows: of a step, with `tokens` and `mask`.
        supports: of each row's tokens, from the first one on.
        logp_vocabulary: the trainer's log-probabilities over the whole vocabulary.
    """
    for number, (row, whole) in enumerate(zip(rows, supports, strict=True)):
        support = fit_support(whole, len(row["tokens"])).to("cpu")
        row["support_ids"] = support.ids.tolist()
        row["support_counts"] = support.sizes.tolist()
        if logp_vocabulary is not None:
            row["logp_vocabulary"] = logp_vocabulary[number, : len(row["tokens"])].tolist()
