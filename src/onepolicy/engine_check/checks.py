"""Requests to an engine, the same tokens scored by the trainer, and what that says of the probabilities it returns."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from onepolicy.config import RunConfig, TrainingError
from onepolicy.config.numerics import ON_POLICY
from onepolicy.divergence.logprob import mismatch
from onepolicy.envs.multiturn.trajectory import Trajectory
from onepolicy.interfaces import RolloutEngine
from onepolicy.invariant.require_equal import require_equal
from onepolicy.train.pack import pack
from onepolicy.train.rescore import Scorer, score_at
from onepolicy.types import Completion, Group, Sampling, TokenBatch
from onepolicy.verdict.bug_signatures import diagnose_batch
from onepolicy.verdict.scored_tokens import EXPLAINED

PROMPTS = 8
HOT = 1.5
"""The temperature beside 1: above it, so that the tail of the distribution is sampled."""
TOP_K, TOP_P = (1, 2, 3, 5, 10, 20, 40, 50, 64, 100), (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
START = 16
"""Tokens of a prompt and of a completion, at most, when a run starts."""
ENOUGH = 14
"""Tokens expected outside a narrower support before their absence means anything: Poisson, e^-14 < 1e-6."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """passed is None: does not apply, or cannot be judged before another check passes."""

    name: str
    passed: bool | None
    measured: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class GeneratedBatch:
    """Requests of one kind, and what came back for each."""

    prompts: list[list[int]]
    sampling: Sampling
    done: list[Completion]


def random_prompts(tokenizer: PreTrainedTokenizerBase, longest: int) -> list[list[int]]:
    """PROMPTS prompts of ordinary token ids (none special), each longer than the one before."""
    special = set(tokenizer.get_added_vocab().values()) | set(tokenizer.all_special_ids)
    ids = torch.tensor(sorted(set(tokenizer.get_vocab().values()) - special))
    generator = torch.Generator().manual_seed(0)
    lengths = [max(2, longest * (i + 1) // PROMPTS) for i in range(PROMPTS)]
    return [ids[torch.randint(len(ids), (n,), generator=generator)].tolist() for n in lengths]


async def generate_all(
    engine: RolloutEngine, prompts: list[list[int]], sampling: Sampling, seeds: Sequence[int]
) -> GeneratedBatch:
    """All at once, one request per prompt."""
    requests = (
        engine.generate(p, sampling, seed=seed) for p, seed in zip(prompts, seeds, strict=True)
    )
    return GeneratedBatch(prompts, sampling, list(await asyncio.gather(*requests)))


def score_generated(scorer: Scorer, played: GeneratedBatch, *, routes: bool = False) -> TokenBatch:
    """The tokens in one packed batch, scored by the trainer with its own routing, at the temperature asked for."""
    samples = []
    for prompt, done in zip(played.prompts, played.done, strict=True):
        path = Trajectory(prompt)
        path.append_completion(done if routes else dataclasses.replace(done, routing=None))
        sample = path.to_sample(reward=0.0, temperature=played.sampling.temperature or 1.0)
        samples.append(dataclasses.replace(sample, outcome=0.0))
    batch = pack([Group(i, (sample,)) for i, sample in enumerate(samples)])
    return scorer.score(batch, replay=False)


def upper_quartile_gap(batch: TokenBatch) -> Tensor:
    """[S]: the upper quartile of |log rho| over the tokens of each sample [nats]. A few tokens behind other experts can
    be nats apart and make up all of k3; weights, prefixes or temperatures that are wrong move most tokens."""
    assert batch.logp_old is not None
    gap = (batch.logp_old - batch.logp_rollout).abs()
    own = [gap[batch.trainable & (batch.segment == sample)] for sample in range(batch.num_samples)]
    return torch.stack([values.quantile(0.75) for values in own])


def _k3(batch: TokenBatch) -> float:
    assert batch.logp_old is not None
    return mismatch(batch.logp_old, batch.logp_rollout, batch.trainable).k3


async def require_correct_logprobs(
    engine: RolloutEngine, scorer: Scorer, tokenizer: PreTrainedTokenizerBase, config: RunConfig
) -> None:
    """At a run's start, engine and trainer holding the same weights: TrainingError if the log-probabilities that come
    back are misaligned, missing, untempered, or of a narrowed sampling. About 250 tokens; nothing stays cached."""
    room = engine.caps.max_len // 2
    prompts, length = random_prompts(tokenizer, min(START, room)), min(START, room)
    await engine.reset_cache()
    plain = await generate_all(engine, prompts, Sampling(1.0, length), range(PROMPTS))
    hot = await generate_all(engine, prompts, Sampling(HOT, length), range(PROMPTS))
    await engine.reset_cache()
    if (broken := find_malformed_logprobs((plain, hot))) is not None:
        raise TrainingError(f"{type(engine).__name__}: {broken}")
    cold, warm = score_generated(scorer, plain), score_generated(scorer, hot)
    if config.numerics == ON_POLICY:
        for batch in (cold, warm):
            require_equal(batch, None, scorer.fingerprint, when="before the first step")
    checks = check_logprobs(scorer, cold, warm, limits=None)
    for check in checks.values():
        if check.passed is False:
            raise TrainingError(
                f"{type(engine).__name__}, {check.name}: {check.measured}. Every importance ratio would be wrong; "
                f"{check.fix}. `onepolicy engine check` says more"
            )


def find_malformed_logprobs(played: Sequence[GeneratedBatch]) -> str | None:
    """What keeps log-probabilities from being compared at all."""
    for each in played:
        for i, done in enumerate(each.done):
            if len(done.logp) != len(done.token_ids):
                return f"request {i}: {len(done.logp)} log-probabilities for {len(done.token_ids)} tokens"
            if not done.logp.isfinite().all():
                return f"request {i}: {int((~done.logp.isfinite()).sum())} log-probabilities are NaN or infinite"
    return None


def check_logprobs(
    scorer: Scorer, cold: TokenBatch, warm: TokenBatch, *, limits: tuple[float, float] | None
) -> dict[str, CheckResult]:
    """Are the returned log-probabilities those of the tokens, under the distribution they were drawn from?

    cold: sampled at temperature 1 and scored, warm: at HOT. limits: largest `distance` expected of each; None: only
    faults with a known mark are named. Of a fault only the check fails that it belongs to.
    """
    name = "log-probabilities"
    found = {finding.cause: finding.evidence for finding in diagnose_batch(cold).findings}
    for cause in ("fill", "not_log", "shift"):
        if cause in found:
            fix = "value i must be the log-probability of token i of the completion"
            return {name: CheckResult(name, False, found[cause], fix)}
    if "retokenised" in found:
        fix = "hand over the ids that were sampled; never decode and encode them again"
        return {"tokens": CheckResult("tokens", False, found["retokenised"], fix)}
    checks = {"support": check_support(scorer, (cold, warm))}
    if checks["support"].passed is False:
        return checks
    gap, k3 = float(upper_quartile_gap(cold).max()), _k3(cold)
    measured = f"k3 {k3:.2g} nats a token over {int(cold.trainable.sum())} tokens; worst request {gap:.2g} nats off"
    expected = "" if limits is None else f" (expected: at most {limits[0]:.2g})"
    if not gap <= (math.inf if limits is None else limits[0]):  # also if it is NaN
        fix = (
            "the engine holds other weights than the trainer, another model, or changes the prompt"
        )
        return checks | {name: CheckResult(name, False, measured + expected, fix)}
    checks[name] = CheckResult(name, True, f"one per token, aligned, {measured}{expected}")
    return checks | {
        "temperature": check_temperature(scorer, warm, None if limits is None else limits[1])
    }


def check_temperature(scorer: Scorer, warm: TokenBatch, limit: float | None) -> CheckResult:
    """Are tokens asked for at HOT drawn at HOT, and their log-probabilities those of that distribution?"""
    found, other = upper_quartile_gap(warm), upper_quartile_gap(score_at(scorer, warm, 1 / HOT))
    gap, untempered = float(found.mean()), float(other.mean())
    words = (
        f"asked for at {HOT}: log-probabilities {gap:.2g} nats off at {HOT}, {untempered:.2g} at 1"
    )
    if not math.isfinite(gap + untempered):
        fix = "neither side may return NaN or infinite log-probabilities; look at the trainer's logits"
        return CheckResult("temperature", False, f"{words}: some are not finite", fix)
    if untempered < EXPLAINED * gap and gap > 0.02:
        fix = "return log-probabilities after temperature (vLLM: logprobs_mode=processed_logprobs)"
        return CheckResult("temperature", False, f"{words}: they are not tempered", fix)
    if limit is not None and not found.max() <= limit:
        text = f"{words}; worst request {float(found.max()):.2g}, expected at most {limit:.2g}"
        return CheckResult("temperature", False, text, "hand the temperature to the engine")
    if limit is None:
        return CheckResult("temperature", True, words)
    assert warm.logp_old is not None
    assert warm.entropy is not None
    surplus = (warm.logp_old + warm.entropy)[
        warm.trainable
    ]  # 0 on average for draws from this distribution
    mean, error = float(surplus.mean()), float(surplus.std() / len(surplus) ** 0.5)
    if not abs(mean) <= 6 * error + 0.02:  # also if the entropy is NaN
        text = f"the tokens are {mean:.2g} +- {error:.1g} nats likelier than draws at {HOT}"
        return CheckResult(
            "temperature", False, text, "sample at the temperature that is asked for"
        )
    return CheckResult("temperature", True, words)


def check_support(scorer: Scorer, batches: Sequence[TokenBatch]) -> CheckResult:
    """Is the whole vocabulary sampled where nothing narrower was asked for? Counts tokens outside smaller supports."""
    expected, seen = (
        sum(part) for part in zip(*(_outside(scorer, batch) for batch in batches), strict=True)
    )
    if not expected.isfinite().all():
        text = "the trainer's probabilities of these tokens are not finite, so nothing can be compared with them"
        return CheckResult("support", False, text, "look at the trainer's weights and logits")
    names = [f"top_k={k}" for k in TOP_K] + [f"top_p={p}" for p in TOP_P]
    narrowed = [
        i for i in range(len(names)) if expected[i] >= ENOUGH and seen[i] <= 0.05 * expected[i]
    ]
    total = sum(int(batch.trainable.sum()) for batch in batches)
    if narrowed:
        i = max(narrowed, key=lambda i: float(expected[i]))
        text = f"{int(seen[i])} of {total} tokens are outside {names[i]}, {float(expected[i]):.0f} expected"
        fix = "turn off the engine's own sampling defaults (top-p, top-k, min-p, generation_config)"
        return CheckResult("support", False, text, fix)
    judged = [i for i in range(len(names)) if expected[i] >= ENOUGH]
    if not judged:
        return CheckResult(
            "support",
            None,
            f"the {total} tokens are too certain to tell a narrowed support from the whole",
        )
    i = min(judged, key=lambda i: float(expected[i]))
    return CheckResult(
        "support",
        True,
        f"whole vocabulary: {int(seen[i])} tokens outside {names[i]}, {float(expected[i]):.0f} expected",
    )


def topk_share(scorer: Scorer, batch: TokenBatch, top_k: int) -> tuple[float, Tensor]:
    """Share of the sampled tokens among the trainer's `top_k` likeliest, and the log of their mass, [n] float32."""
    inside = [
        (ordered[:, :top_k].sum(-1), sampled[:, :top_k].any(-1))
        for ordered, sampled in _ordered(scorer, batch)
    ]
    mass, found = (torch.cat(part).cpu() for part in zip(*inside, strict=True))
    return float(found.float().mean()), mass.log().float()


def _outside(scorer: Scorer, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Per candidate support, over the batch: probability mass outside it, sampled tokens outside it. [C] float64."""
    expected = torch.zeros(len(TOP_K) + len(TOP_P), dtype=torch.float64)
    seen = torch.zeros_like(expected)
    for ordered, sampled in _ordered(scorer, batch):
        before = ordered.cumsum(-1) - ordered  # [n, V] mass of likelier tokens
        rank = torch.arange(ordered.shape[1], device=ordered.device).expand_as(ordered)
        outside = [rank >= k for k in TOP_K] + [before >= p for p in TOP_P]
        expected += torch.stack([(ordered * out).sum() for out in outside]).cpu()
        seen += torch.stack([(sampled & out).sum() for out in outside]).cpu()
    return expected, seen


@torch.no_grad()
def _ordered(scorer: Scorer, batch: TokenBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """Per micro-batch: the trainer's probabilities, the largest first, and which was sampled: [n, V] float64, bool."""
    for chosen in scorer.micro_batches(batch):
        micro = batch.select(chosen).to(scorer.device)
        slots = micro.trainable.nonzero()[:, 0]
        ordered, order = scorer.logits(micro, slots).double().softmax(-1).sort(-1, descending=True)
        yield ordered, order == micro.target_ids[slots, None]
