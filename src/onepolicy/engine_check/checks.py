"""Requests to an engine, scored by the trainer, and checks of the returned log-probabilities."""

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
from onepolicy.config.rules import Check
from onepolicy.divergence.logprob import mismatch
from onepolicy.envs.multiturn.trajectory import Trajectory
from onepolicy.interfaces import RolloutEngine, engine_name
from onepolicy.invariant.require_equal import require_equal
from onepolicy.notation import counted, number, with_error
from onepolicy.train.pack import pack
from onepolicy.train.rescore import Scorer, score_at
from onepolicy.types import Completion, Group, Sampling, TokenBatch
from onepolicy.verdict.bug_signatures import diagnose_batch
from onepolicy.verdict.scored_tokens import EXPLAINED

PROMPTS = 8
PROCESSED = "as vLLM with logprobs_mode=processed_logprobs"
HOT_TEMPERATURE = 1.5
"""The second temperature, beside 1. It is above 1 to sample the tail of the distribution."""
TOP_K, TOP_P = (1, 2, 3, 5, 10, 20, 40, 50, 64, 100), (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Narrower supports that the support check looks for."""
START_TOKENS = 16
"""Most tokens of a prompt, and of a completion, in the checks at the start of a run."""
MIN_EXPECTED_OUTSIDE = 14
"""Tokens expected outside a support, before finding none there is a fault: e^-14 < 1e-6 (Poisson).
"""


@dataclass(frozen=True, slots=True)
class GeneratedBatch:
    """Requests with the same sampling settings, and the completion of each."""

    prompts: list[list[int]]
    sampling: Sampling
    completions: list[Completion]


def random_prompts(tokenizer: PreTrainedTokenizerBase, longest: int) -> list[list[int]]:
    """Return PROMPTS prompts of ordinary token ids (none special), from short to long."""
    special = set(tokenizer.get_added_vocab().values()) | set(tokenizer.all_special_ids)
    ids = torch.tensor(sorted(set(tokenizer.get_vocab().values()) - special))
    generator = torch.Generator().manual_seed(0)
    lengths = [max(2, longest * (i + 1) // PROMPTS) for i in range(PROMPTS)]
    return [ids[torch.randint(len(ids), (n,), generator=generator)].tolist() for n in lengths]


async def generate_all(
    engine: RolloutEngine, prompts: list[list[int]], sampling: Sampling, seeds: Sequence[int]
) -> GeneratedBatch:
    """Request one completion per prompt, all at once."""
    requests = [
        engine.generate(prompt, sampling, seed=seed)
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    return GeneratedBatch(prompts, sampling, list(await asyncio.gather(*requests)))


def score_generated(
    scorer: Scorer, generated: GeneratedBatch, *, routes: bool = False
) -> TokenBatch:
    """Pack the completions and score them at their temperature, with the trainer's own routing.

    routes: keep the engine's routes in the batch.
    """
    return scorer.score(pack_generated(generated, routes=routes), replay=False)


def pack_generated(generated: GeneratedBatch, *, routes: bool) -> TokenBatch:
    """Pack the completions. routes: keep the engine's routes in the batch."""
    groups = []
    pairs = zip(generated.prompts, generated.completions, strict=True)
    for i, (prompt, completion) in enumerate(pairs):
        if not routes:
            completion = dataclasses.replace(completion, routing=None)
        path = Trajectory(prompt)
        path.append_completion(completion)
        sample = path.to_sample(reward=0.0, temperature=generated.sampling.temperature or 1.0)
        groups.append(Group(i, (dataclasses.replace(sample, outcome=0.0),)))
    return pack(groups)


def upper_quartile_gap(batch: TokenBatch) -> Tensor:  # [S]
    """Return the upper quartile of |log rho| over the tokens of each sample [nats].

    A few tokens that are routed to other experts can be nats apart and make up all of k3. Wrong
    weights, prefixes or temperatures move most tokens.
    """
    assert batch.logp_old is not None
    gap = (batch.logp_old - batch.logp_rollout).abs()
    by_sample = [
        gap[batch.trainable & (batch.segment == sample)] for sample in range(batch.num_samples)
    ]
    return torch.stack([values.quantile(0.75) for values in by_sample])


def _k3(batch: TokenBatch) -> float:
    assert batch.logp_old is not None
    return mismatch(batch.logp_old, batch.logp_rollout, batch.trainable).k3


async def require_correct_logprobs(
    engine: RolloutEngine, scorer: Scorer, tokenizer: PreTrainedTokenizerBase, config: RunConfig
) -> None:
    """Check the engine's log-probabilities at the start of a run, on about 250 tokens.

    Engine and trainer must hold the same weights. Nothing stays in the engine's cache. Raises
    TrainingError if log-probabilities are misaligned, missing, untempered, or of a narrowed
    sampling.
    """
    length = min(START_TOKENS, engine.caps.max_len // 2)
    prompts = random_prompts(tokenizer, length)
    await engine.reset_cache()
    plain = await generate_all(engine, prompts, Sampling(1.0, length), range(PROMPTS))
    hot = await generate_all(engine, prompts, Sampling(HOT_TEMPERATURE, length), range(PROMPTS))
    await engine.reset_cache()
    malformed = find_malformed_logprobs((plain, hot))
    if malformed is not None:
        raise TrainingError(f"{engine_name(engine)}: {malformed}")
    cold, warm = score_generated(scorer, plain), score_generated(scorer, hot)
    if config.numerics == ON_POLICY:
        for batch in (cold, warm):
            require_equal(batch, None, scorer.fingerprint, when="before the first step")
    for result in check_logprobs(scorer, cold, warm, limits=None).values():
        if result.passed is False:
            raise TrainingError(
                f"{engine_name(engine)}, {result.name}: {result.found}. "
                f"Every importance ratio would be wrong; {result.fix}. "
                "`onepolicy engine check` says more"
            )


def find_malformed_logprobs(batches: Sequence[GeneratedBatch]) -> str | None:
    """Return why log-probabilities cannot be compared at all; None if they can."""
    for batch in batches:
        for i, completion in enumerate(batch.completions):
            logp, tokens = completion.logp, len(completion.token_ids)
            if len(logp) != tokens:
                return f"request {i}: {len(logp)} log-probabilities for {tokens} tokens"
            if not logp.isfinite().all():
                count = int((~logp.isfinite()).sum())
                return f"request {i}: {count} log-probabilities are NaN or infinite"
    return None


def check_logprobs(
    scorer: Scorer, cold: TokenBatch, warm: TokenBatch, *, limits: tuple[float, float] | None
) -> dict[str, Check]:
    """Check that log-probabilities belong to the tokens and the distribution they were drawn from.

    cold, warm: batches that were sampled at temperature 1 and at HOT_TEMPERATURE, scored. limits:
    the largest `upper_quartile_gap` expected of each; None: find only faults with a known
    signature. A fault fails its own check alone.
    """
    name = "log-probabilities"
    fault = _known_fault(cold)
    if fault is not None:
        return {fault.name: fault}
    results = {"support": check_support(scorer, (cold, warm))}
    if results["support"].passed is False:
        return results
    cold_limit = warm_limit = None
    expected = ""
    if limits is not None:
        cold_limit, warm_limit = limits
        expected = f" (expected: at most {number(cold_limit)})"
    gap, k3 = float(upper_quartile_gap(cold).max()), _k3(cold)
    measured = (
        f"k3 {number(k3)} nats a token over {counted(int(cold.trainable.sum()), 'token')}; "
        f"worst request {number(gap)} nats off{expected}"
    )
    limit = math.inf if cold_limit is None else cold_limit
    if not gap <= limit:  # also if it is NaN
        fix = (
            "the engine holds other weights than the trainer, another model, or changes the prompt"
        )
        return results | {name: Check(name, False, measured, fix)}
    results[name] = Check(name, True, f"one per token, aligned, {measured}")
    results["temperature"] = check_temperature(scorer, warm, warm_limit)
    return results


def _known_fault(cold: TokenBatch) -> Check | None:
    """Return the failed check of a fault that has a known signature, if one is found."""
    diagnosis = diagnose_batch(cold)
    if diagnosis.nonfinite.count:
        fix = "look at the trainer's weights and logits"
        return Check("log-probabilities", False, str(diagnosis.nonfinite), fix)
    evidence = {finding.cause: finding.evidence for finding in diagnosis.findings}
    for cause in ("fill", "not_log", "shift"):
        if cause in evidence:
            fix = "value i must be the log-probability of token i of the completion"
            return Check("log-probabilities", False, evidence[cause], fix)
    if "retokenised" in evidence:
        fix = "return the ids that were sampled; never decode and encode them again"
        return Check("tokens", False, evidence["retokenised"], fix)
    return None


def check_temperature(scorer: Scorer, warm: TokenBatch, limit: float | None) -> Check:
    """Check that tokens and log-probabilities are of temperature HOT_TEMPERATURE.

    limit: the largest `upper_quartile_gap` expected; None: check the log-probabilities only.
    """
    name = "temperature"
    gaps, untempered_gaps = (
        upper_quartile_gap(warm),
        upper_quartile_gap(score_at(scorer, warm, 1 / HOT_TEMPERATURE)),
    )
    gap, untempered = float(gaps.mean()), float(untempered_gaps.mean())
    measured = (
        f"asked for at {HOT_TEMPERATURE}: log-probabilities {number(gap)} nats off at "
        f"{HOT_TEMPERATURE}, {number(untempered)} at 1"
    )
    if not math.isfinite(gap + untempered):
        fix = (
            "neither side may return NaN or infinite log-probabilities; "
            "look at the trainer's logits"
        )
        return Check(name, False, f"{measured}: some are not finite", fix)
    if untempered < EXPLAINED * gap and gap > 0.02:
        fix = f"return log-probabilities after temperature, {PROCESSED}"
        return Check(name, False, f"{measured}: they are not tempered", fix)
    if limit is None:
        return Check(name, True, measured)
    worst = gaps.max()
    if not worst <= limit:
        text = f"{measured}; worst request {number(float(worst))}, expected at most {number(limit)}"
        return Check(name, False, text, "pass the temperature to the engine")
    mean, error = _mean_surplus(warm)
    if not math.isfinite(mean):
        text = f"{measured}; the trainer's entropy is not finite"
        return Check(name, False, text, "look at the trainer's logits")
    if not abs(mean) <= 6 * error + 0.02:  # also if the error of a single token is NaN
        excess = with_error(mean, error)
        text = f"the tokens are {excess} nats likelier than draws at {HOT_TEMPERATURE}"
        return Check(name, False, text, "sample at the temperature that is asked for")
    return Check(name, True, measured)


def _mean_surplus(batch: TokenBatch) -> tuple[float, float]:
    """Return the mean of log p + entropy, and its standard error [nats].

    The mean is 0 for tokens that are drawn from this distribution.
    """
    assert batch.logp_old is not None
    assert batch.entropy is not None
    surplus = (batch.logp_old + batch.entropy)[batch.trainable]
    return float(surplus.mean()), float(surplus.std() / len(surplus) ** 0.5)


def check_support(scorer: Scorer, batches: Sequence[TokenBatch]) -> Check:
    """Check that the engine samples from the whole vocabulary if no top_k or top_p is set.

    It counts the tokens outside narrower supports.
    """
    counts = [_outside_counts(scorer, batch) for batch in batches]
    expected, seen = (sum(part) for part in zip(*counts, strict=True))
    if not expected.isfinite().all():
        text = (
            "the trainer's probabilities of these tokens are not finite, so nothing is comparable"
        )
        return Check("support", False, text, "look at the trainer's weights and logits")
    names = [f"top_k={k}" for k in TOP_K] + [f"top_p={p}" for p in TOP_P]
    decidable = [i for i in range(len(names)) if expected[i] >= MIN_EXPECTED_OUTSIDE]
    narrowed = [i for i in decidable if seen[i] <= 0.05 * expected[i]]
    total = sum(int(batch.trainable.sum()) for batch in batches)
    if narrowed:
        i = max(narrowed, key=lambda i: float(expected[i]))
        text = (
            f"{int(seen[i])} of {total} tokens are outside {names[i]}, "
            f"{float(expected[i]):.0f} expected"
        )
        fix = "turn off the engine's own sampling defaults (top-p, top-k, min-p, generation_config)"
        return Check("support", False, text, fix)
    if not decidable:
        text = f"the {total} tokens are too certain to show a narrowed support"
        return Check("support", None, text)
    i = min(decidable, key=lambda i: float(expected[i]))
    counts_text = f"{int(seen[i])} tokens outside {names[i]}, {float(expected[i]):.0f} expected"
    return Check("support", True, f"whole vocabulary: {counts_text}")


def topk_share(scorer: Scorer, batch: TokenBatch, top_k: int) -> tuple[float, Tensor]:
    """Return the share of sampled tokens among the trainer's `top_k` likeliest.

    Also return the log of the mass of these tokens, [n] float32, in the order of the batch.
    """
    mass = torch.zeros(len(batch.trainable), dtype=torch.float64)
    hits = 0
    for slots, ordered, sampled in _ordered_probabilities(scorer, batch):
        mass[slots] = ordered[:, :top_k].sum(-1).cpu()
        hits += int(sampled[:, :top_k].sum())
    mass = mass[batch.trainable.cpu()]
    return hits / max(1, len(mass)), mass.log().float()


def _outside_counts(scorer: Scorer, batch: TokenBatch) -> tuple[Tensor, Tensor]:  # [C] float64
    """Return expected and sampled tokens outside each narrower support.

    The expected number is the sum of the probability mass outside it.
    """
    expected = torch.zeros(len(TOP_K) + len(TOP_P), dtype=torch.float64)
    seen = torch.zeros_like(expected)
    for _, ordered, sampled in _ordered_probabilities(scorer, batch):
        before = ordered.cumsum(-1) - ordered  # [n, V] mass of likelier tokens
        rank = torch.arange(ordered.shape[1], device=ordered.device).expand_as(ordered)
        outside = [rank >= k for k in TOP_K] + [before >= p for p in TOP_P]
        expected += torch.stack([(ordered * out).sum() for out in outside]).cpu()
        seen += torch.stack([(sampled & out).sum() for out in outside]).cpu()
    return expected, seen


@torch.no_grad()
def _ordered_probabilities(
    scorer: Scorer, batch: TokenBatch
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield slots of the batch, the trainer's probabilities, largest first, and which was sampled.

    Each triple is of one micro-batch: [n] int64 on the CPU, [n, V] float64, [n, V] bool.
    """
    for chosen in scorer.micro_batches(batch):
        micro = batch.select(chosen).to(scorer.device)
        slots = micro.trainable.nonzero()[:, 0]
        ordered, order = scorer.logits(micro, slots).double().softmax(-1).sort(-1, descending=True)
        own = batch.slots_of(chosen)[slots.cpu()]
        yield own, ordered, order == micro.target_ids[slots, None]
