"""The canary: log-probabilities of fixed prompts, which only other weights may move.

Two forwards of the same weights on a GPU may add in another order (atomics), rarely enough that two
canaries agree to the bit. So a change is a fault if it is larger than that order can make it, and
comes back when the canary is asked again.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onepolicy.interfaces import RolloutEngine, engine_name
from onepolicy.notation import number
from onepolicy.types import Sampling

CANARY_PROMPTS, CANARY_TOKENS = 16, 24
NOISE_MARGIN = 4
"""Allowed change of the canary, as a multiple of its largest change without a push."""
PLACES = {"bfloat16": 2, "float32": 64}
"""Last places of a logit that another order of additions may move, in the layers below too."""
SMALLEST_LOGIT = 0.5  # a smaller one is taken for one of this size
REPEATS = 3  # canaries after a push, on an engine whose last places may differ


async def canary_logp(engine: RolloutEngine, vocab: int) -> Tensor:
    """Return log-probabilities of the most likely next token of random prompts.

    Nothing is cached: the cache is reset first. Returns [CANARY_PROMPTS] float32.
    """
    prompts = canary_prompts(vocab, engine.caps.max_len, CANARY_PROMPTS)
    await engine.reset_cache()
    greedy = Sampling(temperature=0.0, max_tokens=1)
    # One at a time. A server batches concurrent requests by chance, which changes the last bits.
    completions = [await engine.generate(p, greedy, seed=i) for i, p in enumerate(prompts)]
    return torch.cat([completion.logp for completion in completions])


def canary_prompts(vocab: int, max_len: int, count: int) -> list[list[int]]:
    """Return random prompts, the same every time."""
    generator = torch.Generator().manual_seed(0)
    shape = count, min(CANARY_TOKENS, max_len - 1)
    return torch.randint(vocab, shape, generator=generator).tolist()


def allowed_change(engine: RolloutEngine, canary: Tensor, noise: float, vocab: int) -> Tensor:
    """Return the largest change of each log-probability that is no sign of other weights.

    canary: [n] float32, before the change. noise: the largest change without a push. It is 0 where
    kernels are deterministic, as on the CPU. On a GPU it is 0 by chance too, so PLACES last places
    of the logit are allowed beside it. An engine returns no logits: with logits around 0, one is at
    least as large as its log-probability is above that of an even choice. NaN stays NaN. Returns
    [n] float32 [nats].
    """
    margin = torch.full_like(canary, NOISE_MARGIN * noise)
    dtype = engine.caps.inexact_dtype
    if dtype is None:
        return margin
    logit = (canary + math.log(vocab)).clamp_min(SMALLEST_LOGIT)
    return margin + PLACES[dtype] * last_place(logit, dtype)


def last_place(x: Tensor, dtype: str) -> Tensor:
    """Return the distance of x > 0 to the next larger number of `dtype`."""
    exponent = torch.frexp(x).exponent - 1
    return torch.ldexp(torch.full_like(x, torch.finfo(getattr(torch, dtype)).eps), exponent)


@dataclass(frozen=True, slots=True)
class Canary:
    """The canary of an engine at one time, to compare a later one with.

    logp: [n] float32. noise: its largest change without a push [nats].
    """

    engine: RolloutEngine
    vocab: int
    logp: Tensor
    noise: float

    @classmethod
    async def ask(cls, engine: RolloutEngine, vocab: int) -> Canary:
        """Ask an engine twice."""
        first, second = await canary_logp(engine, vocab), await canary_logp(engine, vocab)
        return cls(engine, vocab, first, float((second - first).abs().max()))

    async def change(self, after: Tensor | None = None) -> tuple[float, bool]:
        """Return the engine's largest change since [nats], and whether it shows the same weights.

        after: its canary now, [n] float32; None: it is asked. Where last places may differ, and it
        moved further than allowed, it is asked again: wrong weights move every canary, a rare order
        of additions one. The least counts. NaN stays NaN.
        """
        if after is None:
            after = await canary_logp(self.engine, self.vocab)
        allowed = allowed_change(self.engine, self.logp, self.noise, self.vocab)
        moved = (after - self.logp).abs()
        repeats = 0
        if self.engine.caps.inexact_dtype is not None:
            repeats = REPEATS - 1

        def is_same() -> bool:  # not with NaN or an infinite margin
            return bool((moved <= allowed).all() and allowed.isfinite().all())

        while repeats and not is_same():
            again = await canary_logp(self.engine, self.vocab)
            moved, repeats = moved.minimum((again - self.logp).abs()), repeats - 1
        return float(moved.max()), is_same()

    async def require_same(
        self, done: str, act: str, error: type[Exception], after: Tensor | None = None
    ) -> None:
        """Raise `error` unless the engine still samples with the same weights, as in `change`.

        done: what was done to it since. act: the same in a word.
        """
        moved, is_same = await self.change(after)
        if not is_same:
            raise error(
                f"{done} moved the log-probabilities of a fixed batch by up to {number(moved)} "
                f"(without a {act}: {number(self.noise)}); its weights are wrong after a {act} and "
                "every rollout would be another policy's"
            )


async def ask_each(
    engine: RolloutEngine, vocab: int
) -> Callable[[str, str, type[Exception]], Awaitable[None]]:
    """Ask the canary of an engine, or of each of a fleet, which may be lost without the others.

    Return a function that asks again, as `Canary.require_same` does. `done` names the engine by {}.
    """
    before: dict[int, Canary] = {}
    on_each: Any = getattr(engine, "on_each", lambda work: work(engine))  # the first: of a fleet

    async def ask(each: RolloutEngine) -> None:
        before[id(each)] = await Canary.ask(each, vocab)

    async def require_same(done: str, act: str, error: type[Exception]) -> None:
        async def compare(each: RolloutEngine) -> None:
            if id(each) in before:  # else it has come back meanwhile, and was checked then
                await before[id(each)].require_same(done.format(engine_name(each)), act, error)

        await on_each(compare)

    await on_each(ask)
    return require_same


def inexact_dtype(dtype: str, *, cpu: bool) -> str | None:
    """Return `EngineCaps.inexact_dtype` of an engine that computes in `dtype`."""
    if cpu:
        return None
    return dtype
