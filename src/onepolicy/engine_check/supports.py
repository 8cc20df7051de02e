"""Check that an engine returns the tokens that top_p, top_k and min_p kept, and the right ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onepolicy.config import RunConfig, TrainingError, UsageError
from onepolicy.config.rules import Check
from onepolicy.engine_check.checks import GeneratedBatch, generate_all, score_generated
from onepolicy.interfaces import RolloutEngine
from onepolicy.notation import number
from onepolicy.rollout.hf.sampler import BatchSampling, narrow
from onepolicy.support.checks import SupportError, check_supports
from onepolicy.support.trace import TOTAL_TOLERANCE, SupportTrace
from onepolicy.train.scorer import PolicyScorer
from onepolicy.types import Completion, Sampling, TokenBatch

TOP_P, TOP_K = 0.9, 20
"""Of the requests, if the run's own sampling cuts nothing."""
MOST_APART = 0.05
"""Most mean probability of tokens that are in the engine's set or in the trainer's, not in both.

Rounding moves a token over the border, which has little; another top_p, or sets of other tokens,
move much more.
"""
REFUSED = "let the engine answer such requests, or train without top_p, top_k and min_p"
FIX = "return, for every sampled token, the ids that top_p, top_k and min_p left (docs/supports.md)"


def _each_of_all(tempered: Tensor, rows: BatchSampling) -> Tensor:
    """Return [B, V]: -inf where min_p, top_k or top_p cuts, each of the whole distribution."""
    settings, left = ("min_p", "top_k", "top_p"), tempered
    for name in settings:
        without_others: dict[str, Any] = dict.fromkeys(set(settings) - {name})
        alone = narrow(tempered, replace(rows, **without_others))
        left = left.masked_fill(alone.isneginf(), -torch.inf)
    return left


Order = Callable[[Tensor, BatchSampling], Tensor]
ORDERS: dict[Order, str] = {
    narrow: "",
    _each_of_all: " if top_p is of the whole distribution, not of what top_k left (SGLang)",
}
"""How an engine may take top_k and top_p together -> the words for it."""


async def ask_for_supports(
    engine: RolloutEngine,
    prompts: list[list[int]],
    config: RunConfig,
    vocabulary: int,
    *,
    tokens: int,
) -> GeneratedBatch | str:
    """Request completions with the sets that their tokens were drawn from.

    Returns why there are none if the engine refuses such requests. tokens: of a completion.
    """
    chosen = config.rollout.sampling
    top_p, top_k, min_p = TOP_P, min(TOP_K, vocabulary - 1), 0.0
    if chosen.narrows:
        top_p, top_k, min_p = chosen.top_p, chosen.top_k, chosen.min_p
    values = config.rollout.engine.can.support_logp
    sampling = Sampling(1.0, tokens, top_p, top_k, min_p, support=True, support_logp=values)
    try:
        return await generate_all(engine, prompts, sampling, range(len(prompts)))
    except (UsageError, TrainingError) as error:
        return str(error)


def check_returned_supports(
    scorer: PolicyScorer, asked: GeneratedBatch | str, support: Check, *, needed: bool
) -> Check:
    """Check that every token is in its set, and that the sets are the trainer's own.

    support: the passed check of the sampling, to which this one adds. needed: the run samples with
    top_p, top_k or min_p, so an engine without supports is at fault.
    """
    if isinstance(asked, str):
        return _without(support, f"supports were not tried: {asked}", needed, fix=REFUSED)
    if all(done.support is None for done in asked.completions):
        text = "no supports are returned"
        if not needed:
            text += ", so train without top_p, top_k, min_p"
        return _without(support, text, needed)
    fault = _malformed(asked.completions, scorer.vocab_size)
    if fault is not None:
        return Check("support", False, fault, FIX)
    batch = score_generated(scorer, asked)
    found = {order: _compare(scorer, batch, asked.sampling, order) for order in ORDERS}
    order, (same, apart) = min(found.items(), key=lambda each: float(each[1][1].mean()))
    text = (
        f"{int(same.sum())} of {len(same)} returned sets are the trainer's own{ORDERS[order]}; the "
        f"rest are {number(float(apart.mean()), share=True)} of the probability apart"
    )
    if not apart.mean() <= MOST_APART:  # also if it is NaN
        return Check("support", False, text, FIX)
    return replace(support, found=f"{support.found}; {text}")


def _without(support: Check, text: str, needed: bool, fix: str = FIX) -> Check:
    if needed:
        return Check("support", False, text, fix)
    return replace(support, found=f"{support.found}; {text}")


def _malformed(completions: Sequence[Completion], vocabulary: int) -> str | None:
    """Return the first fault of the sets by themselves, None if there is none."""
    for i, done in enumerate(completions):
        support = done.support
        if support is None:
            support = SupportTrace.missing(len(done.token_ids))
        if len(support) != len(done.token_ids):
            return f"request {i}: {len(support)} supports for {len(done.token_ids)} tokens"
        try:
            support.check_values(vocabulary)
            check_supports(support, done.token_ids, name=f"request {i}")
        except (UsageError, SupportError) as error:
            return str(error)
        fault = _wrong_values(support, done)
        if fault is not None:
            return f"request {i}: {fault}"
    return None


def _wrong_values(support: SupportTrace, done: Completion) -> str | None:
    """Return what is wrong with the values of the sets, if there are any."""
    if support.logp is None:
        return None
    total = torch.segment_reduce(
        support.logp.double().exp(), "sum", lengths=support.sizes, unsafe=True
    )
    short = (~((total - 1).abs() <= TOTAL_TOLERANCE)).nonzero()[:, 0].tolist()
    if short:
        found = float(total[short[0]])
        why = "as if tokens were missing"
        if found > 1:
            why = "as if they were of another set"
        return (
            f"the probabilities of the set of token {short[0]} add up to {number(found)}, "
            f"{number(abs(found - 1))} from 1, {why}"
        )
    own = support.ids == done.token_ids[support.slot_of]
    if int(own.sum()) != len(done.token_ids):
        return "a sampled token stands twice in its set"
    if not torch.allclose(support.logp[own].float(), done.logp.float(), atol=1e-4, rtol=0):
        return "log-probabilities of the sampled tokens are others in their sets"
    return None


@torch.no_grad()
def _compare(
    scorer: PolicyScorer, batch: TokenBatch, sampling: Sampling, order: Order
) -> tuple[Tensor, Tensor]:  # [n] bool, [n] float32
    """Return which sets are the trainer's own, and the probability of tokens in one set alone."""
    same, apart = [], []
    for chosen in scorer.micro_batches(batch):
        micro = batch.select(chosen).to(scorer.device)
        slots = micro.trainable.nonzero()[:, 0]
        tempered = scorer.logits(micro, slots)
        rows = BatchSampling.from_requests([sampling] * len(slots), tempered.device)
        own = order(tempered, rows).isfinite()
        assert micro.support is not None
        kept = micro.support.at(slots)
        engine = torch.zeros_like(own)
        engine[kept.slot_of, kept.ids.long()] = True
        alone = own ^ engine
        same.append(~alone.any(-1).cpu())
        apart.append((tempered.softmax(-1) * alone).sum(-1).cpu())
    return torch.cat(same), torch.cat(apart)
