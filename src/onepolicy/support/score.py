"""Log-probabilities over the support: the distribution that top-k, top-p and min-p left.

An engine that samples with top-p draws from the kept tokens, and its log-probabilities are those of
the softmax over them. The trainer's are comparable if its softmax is over the same tokens.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from onepolicy.arguments import require_one_device, require_tensor
from onepolicy.errors import UsageError, describe_argument
from onepolicy.support.checks import check_supports
from onepolicy.support.trace import SupportTrace


class SupportScores(NamedTuple):
    """Scores of m slots over their sets. NaN where the set lacks the token or was not captured."""

    logp: Tensor  # [m] float32, of the sampled token; carries the graph
    entropy: Tensor  # [m] float32, nats; carries the graph
    kept_logp: Tensor  # [n] float32, of every id of the sets; carries the graph


def log_probs(
    logits: Tensor,
    tokens: Tensor,
    *,
    support: SupportTrace | None = None,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the log-probabilities of sampled tokens, over the tokens that they were drawn from.

    Their gradient reaches the logits of the set and no others. With a support, the softmax is
    computed in float32 from these logits alone: no second table of [T, V] is made.

    Args:
        logits: [T, V] floating; row t predicts `tokens[t]`.
        tokens: [T] integer.
        support: the sets that the engine drew from. None: the whole vocabulary.
        temperature: of sampling, a number or [T].
        mask: [T] bool, slots to score. Others may lack a set and return 0. None: all.

    Returns:
        [T] float32, with the graph of the logits.

    Raises:
        UsageError: the arguments do not fit together.
        SupportError: a slot to score has no set, or a set without its own token. Neither is filled
            in: over the whole vocabulary, every ratio would be wrong.
    """
    slots = _check_arguments(logits, tokens, mask)
    own, divisor = tokens.long()[slots], _temperature_of(temperature, len(logits), slots)
    _check_tokens(own, slots, logits.shape[1])
    if support is None:
        tempered = logits[slots].float() / divisor
        found = torch.log_softmax(tempered, -1).gather(-1, own[:, None])[:, 0]
    else:
        _check_support(support, logits, tokens, mask)
        found = support_scores(logits, own, support.at(slots), rows=slots, divisor=divisor).logp
    return found.new_zeros(len(logits)).index_copy(0, slots, found)


def support_scores(
    logits: Tensor,
    tokens: Tensor,
    support: SupportTrace,
    *,
    rows: Tensor | None = None,
    divisor: float | Tensor = 1.0,
) -> SupportScores:
    """Score m slots over their sets.

    logits: [n, V] floating. tokens: [m] int64, the sampled ones. rows: [m] int64, row of each slot;
    None: its own. divisor: of the logits, a number or [m, 1].
    """
    slots, sizes = support.slot_of, support.sizes
    places = slots if rows is None else rows[slots]
    kept = logits.reshape(-1).index_select(0, places * logits.shape[-1] + support.ids).float()
    if isinstance(divisor, Tensor) and divisor.dim():
        divisor = divisor[:, 0][slots]
    kept = kept / divisor
    # Without a set the maximum would be -inf, and -inf - -inf is not a number.
    top = _reduce(kept.detach(), "max", sizes).nan_to_num(neginf=0.0)
    total = _reduce((kept - top[slots]).exp(), "sum", sizes)
    log_total = total.log() + top
    sampled = support.ids == tokens[slots]
    of_token = _reduce(torch.where(sampled, kept, 0.0), "sum", sizes)
    known = _reduce(sampled.float(), "sum", sizes) == 1
    logp = torch.where(known, of_token - log_total, math.nan)
    of_kept = kept - log_total[slots]
    # A token that the head rules out adds 0, as p log p tends to 0.
    terms = torch.where(of_kept.isneginf(), 0.0, of_kept.exp() * of_kept.clamp(min=-1e4))
    entropy = torch.where(known, -_reduce(terms, "sum", sizes), math.nan)
    return SupportScores(logp, entropy, of_kept)


def support_logits(tempered: Tensor, support: SupportTrace) -> Tensor:
    """Return the logits with -inf outside of the sets, as the engine's sampler has them.

    The on-policy mode needs it: a softmax over this table has the bits of the engine's.
    tempered: [m, V].
    """
    kept = torch.zeros_like(tempered, dtype=torch.bool)
    kept[support.slot_of, support.ids.long()] = True
    return tempered.masked_fill(~kept, -math.inf)


def _reduce(values: Tensor, how: str, sizes: Tensor) -> Tensor:
    """Return the sum or maximum of each slot's values, in a fixed order on every device."""
    found: Tensor = torch.segment_reduce(values, how, lengths=sizes, unsafe=True)
    return found


def _check_arguments(logits: Tensor, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Return the slots [m] to score. Raises UsageError."""
    require_tensor("log_probs", "logits", logits, "floats")
    require_tensor("log_probs", "tokens", tokens, "ids")
    if logits.dim() != 2 or not logits.shape[1]:
        raise UsageError(
            f"log_probs: logits is {describe_argument(logits)}, expected floating [T, V]; for a "
            "batch [B, T, V] flatten the first two dimensions of every argument"
        )
    if tokens.shape != logits.shape[:1]:
        raise UsageError(
            f"log_probs: tokens is {describe_argument(tokens)}, expected integers "
            f"[{len(logits)}], one for each row of logits"
        )
    require_one_device("log_probs", {"logits": logits, "tokens": tokens}, values=False)
    if mask is None:
        return torch.arange(len(logits), device=logits.device)
    require_tensor("log_probs", "mask", mask, "bool")
    if mask.shape != tokens.shape or mask.dtype != torch.bool:
        raise UsageError(
            f"log_probs: mask is {describe_argument(mask)}, expected bool [{len(logits)}]"
        )
    require_one_device("log_probs", {"logits": logits, "mask": mask}, values=False)
    return mask.nonzero()[:, 0]


def _has_values(found: Tensor) -> bool:
    """Return whether values can be asked for: not of a fake tensor, or as a graph is made."""
    return type(found) is Tensor and not found.is_meta and not torch.compiler.is_compiling()


def _check_tokens(own: Tensor, slots: Tensor, vocabulary: int) -> None:
    """Raise UsageError for an id outside of the vocabulary, such as the -100 of ignored labels."""
    if not _has_values(own):
        return
    outside = ((own < 0) | (own >= vocabulary)).nonzero()[:1, 0]
    if len(outside):
        place = int(outside)
        raise UsageError(
            f"log_probs: tokens is {int(own[place])} at slot {int(slots[place])}, expected ids "
            f"below {vocabulary}; clear the mask at slots without a token"
        )


def _check_support(
    support: SupportTrace, logits: Tensor, tokens: Tensor, mask: Tensor | None
) -> None:
    if len(support) != len(logits):
        raise UsageError(
            f"log_probs: support has {len(support)} slots, logits {len(logits)}; the set of row t "
            "is the one that tokens[t] was drawn from"
        )
    if support.ids.device != logits.device:
        raise UsageError(
            f"log_probs: support is on {support.ids.device}, logits on {logits.device}; use "
            "support.to(logits.device)"
        )
    support.check_values(logits.shape[1])
    check_supports(support, tokens, mask, name="log_probs")


def _temperature_of(temperature: float | Tensor, rows: int, slots: Tensor) -> float | Tensor:
    if not isinstance(temperature, Tensor):
        if isinstance(temperature, bool) or not isinstance(temperature, Real):
            raise UsageError(
                f"log_probs: temperature is {describe_argument(temperature)}, expected a number or "
                f"a tensor [{rows}]"
            )
        if not (math.isfinite(temperature) and temperature > 0):
            raise UsageError(
                f"log_probs: temperature is {temperature}, expected a number above 0; greedy "
                "tokens have no log-probability to train on"
            )
        return float(temperature)
    require_tensor("log_probs", "temperature", temperature, "numbers")
    if temperature.dim() == 0:
        _check_temperatures(temperature[None], slots)
        return temperature
    if temperature.shape != (rows,):
        raise UsageError(
            f"log_probs: temperature is {describe_argument(temperature)}, expected a number or "
            f"[{rows}]"
        )
    both = {"logits": slots, "temperature": temperature}
    require_one_device("log_probs", both, values=False)
    own = temperature[slots]
    _check_temperatures(own, slots)
    return own[:, None]


def _check_temperatures(own: Tensor, slots: Tensor) -> None:
    """Raise UsageError for a temperature [n] of the scored slots that defines no distribution."""
    if not _has_values(own):
        return
    wrong = (~(own.isfinite() & (own > 0))).nonzero()[:1, 0]
    if len(wrong):
        place = int(wrong)
        raise UsageError(
            f"log_probs: temperature is {own[place].item()} at slot {int(slots[place])}, expected "
            "a number above 0; clear the mask at slots that were sampled greedily"
        )
