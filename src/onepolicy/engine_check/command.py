"""`onepolicy engine check`: checks an engine against the contract of `RolloutEngine`.

The trainer scores the engine's completions for comparison.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from onepolicy.build.components import load_tokenizer_and_max_len
from onepolicy.build.measure import EngineAndScorer, build_engine_and_scorer, measure_config
from onepolicy.config import ModelConfig, TrainingError, UsageError
from onepolicy.config.input_files import resolve_model
from onepolicy.config.replay import MIN_AGREEMENT
from onepolicy.config.rules import Check
from onepolicy.console import Console
from onepolicy.divergence.routing import routing_disagreement
from onepolicy.engine_check.checks import (
    HOT_TEMPERATURE,
    PROCESSED,
    GeneratedBatch,
    check_logprobs,
    find_malformed_logprobs,
    generate_all,
    random_prompts,
    score_generated,
    topk_share,
)
from onepolicy.engine_check.supports import ask_for_supports, check_returned_supports
from onepolicy.engine_check.weight_sync import RoundedModel, check_weight_sync
from onepolicy.notation import number
from onepolicy.replay.alignment import check_alignment
from onepolicy.replay.checks import MisalignedRoutesError, check_completion
from onepolicy.report.terminal import checks_table
from onepolicy.train.scorer import PolicyScorer
from onepolicy.types import Completion, Sampling, TokenBatch

NAMES = (
    "tokens",
    "log-probabilities",
    "temperature",
    "support",
    "seeds",
    "routes",
    "layers",
    "weight sync",
)
MAX_TOKENS, LONGEST_PROMPT = 48, 160
"""Tokens of a completion; of a prompt: enough to fill a block of a prefix cache."""
NARROW = 3
"""top_k of the requests that ask for a narrowed support."""


def check_and_show(tree: dict[str, Any], overrides: list[str]) -> int:
    """Print a table of the checks. Return 0 if every check that applies passes, else 1."""
    checks = run_engine_check(tree, overrides)
    Console().print(checks_table([(c.name, c.passed, c.found, c.fix) for c in checks]))
    return int(any(check.passed is False for check in checks))


def run_engine_check(tree: dict[str, Any], overrides: list[str]) -> list[Check]:
    """Build an engine and its trainer, and run all checks on random prompts.

    tree: settings of a recipe, which may be empty. Its task is not used.
    """
    tree = {
        name: section for name, section in tree.items() if name not in ("objective", "correction")
    }
    config = measure_config(tree, overrides, None)
    if config.rollout.pressure is not None:
        raise UsageError(
            "rollout.pressure: engine check asks if an engine is right, and pressure makes it "
            "wrong on purpose; leave it out"
        )
    model = resolve_model(config.model)
    tokenizer, max_len = load_tokenizer_and_max_len(config, model)
    return asyncio.run(
        check_pair(build_engine_and_scorer(config, model, max_len), tokenizer, model)
    )


async def check_pair(
    pair: EngineAndScorer, tokenizer: PreTrainedTokenizerBase, model: ModelConfig
) -> list[Check]:
    """Return one result for each of NAMES, in that order."""
    scorer, engine = pair.scorer, pair.engine
    length = min(MAX_TOKENS, engine.caps.max_len // 2)
    prompts = random_prompts(tokenizer, min(LONGEST_PROMPT, engine.caps.max_len - length))
    seeds = range(len(prompts))
    try:
        await engine.reset_cache()
        plain = await generate_all(engine, prompts, Sampling(1.0, length), seeds)
        greedy = await generate_all(engine, prompts, Sampling(0.0, length), seeds)
        narrow = await generate_all(engine, prompts, Sampling(1.0, length, top_k=NARROW), seeds)
        kept = await ask_for_supports(
            engine, prompts, pair.config, scorer.vocab_size, tokens=length
        )
        stop = Sampling(1.0, length, stop=_stop_tokens(plain))
        stopped = await generate_all(engine, prompts, stop, seeds)
        await engine.reset_cache()
        hot = await generate_all(engine, prompts, Sampling(HOT_TEMPERATURE, length), seeds)
    except (UsageError, TrainingError) as error:
        text = f"a request failed: {error}"
        failed = Check("tokens", False, text, "fix the engine's reply")
        return _complete({"tokens": failed})
    results = {"tokens": check_tokens((plain, hot, greedy, narrow, stopped), scorer.vocab_size)}
    results |= check_route_shapes(pair, (plain, hot))
    results["seeds"] = await check_seeds(pair, prompts, hot)
    malformed = find_malformed_logprobs((plain, hot, narrow))
    if malformed is not None:
        results["log-probabilities"] = Check(
            "log-probabilities",
            False,
            malformed,
            "return one finite log-probability per sampled token",
        )
    elif results["tokens"].passed:
        rounded = RoundedModel(scorer, model)
        results |= _check_scored(pair, rounded, results, plain, hot)
        if _passed(results, "temperature"):
            batch = score_generated(scorer, greedy)
            results["temperature"] = check_greedy(scorer, batch, results["temperature"])
            batch = score_generated(scorer, narrow)
            results["support"] = check_topk_request(scorer, batch, results["support"])
        if _passed(results, "temperature") and _passed(results, "support"):
            needed = pair.config.rollout.sampling.narrows
            results["support"] = check_returned_supports(
                scorer, kept, results["support"], needed=needed
            )
        if _passed(results, "log-probabilities"):
            results["weight sync"] = await check_weight_sync(pair, rounded, plain)
    return _complete(results)


def _check_scored(
    pair: EngineAndScorer,
    rounded: RoundedModel,
    results: dict[str, Check],
    plain: GeneratedBatch,
    hot: GeneratedBatch,
) -> dict[str, Check]:
    """Check log-probabilities and routes against the trainer's. results: of the checks so far."""
    routes_undecided = "routes" not in results
    cold = score_generated(pair.scorer, plain, routes=routes_undecided)
    warm = score_generated(pair.scorer, hot)
    limits = rounded.limit(cold), rounded.limit(warm)
    found = check_logprobs(pair.scorer, cold, warm, limits=limits)
    tokens = found.get("tokens", results["tokens"])
    if tokens.passed and routes_undecided:
        found |= check_route_agreement(pair, cold)
    return found


def _passed(results: dict[str, Check], name: str) -> bool:
    return name in results and bool(results[name].passed)


def _complete(results: dict[str, Check]) -> list[Check]:
    undecided = "not judged: another check fails first"
    return [results.get(name) or Check(name, None, undecided) for name in NAMES]


def _stop_tokens(batch: GeneratedBatch) -> tuple[int, ...]:
    """Return tokens that are sampled early enough to end most of the same requests."""
    ids = [completion.token_ids for completion in batch.completions[:3]]
    return tuple({int(each[len(each) // 3]) for each in ids})


def check_tokens(batches: Sequence[GeneratedBatch], vocabulary: int) -> Check:
    """Check the ids, the end and the `finish` of every completion."""
    stopped = tokens = requests = 0
    for batch in batches:
        for i, completion in enumerate(batch.completions):
            requests += 1
            tokens += len(completion.token_ids)
            stopped += completion.finish == "stop"
            fault = _token_fault(completion, batch.sampling, vocabulary)
            if fault is not None:
                fix = (
                    "return exactly the ids that were sampled, the stop token included and "
                    "nothing after it"
                )
                text = f"temperature {batch.sampling.temperature}, request {i}: {fault}"
                return Check("tokens", False, text, fix)
    text = f"{requests} requests, {tokens} ids; {stopped} ended at their stop token, which is kept"
    return Check("tokens", True, text)


def _token_fault(completion: Completion, sampling: Sampling, vocabulary: int) -> str | None:
    """Return the first fault of a completion; None if there is none."""
    ids, stop, most = completion.token_ids.tolist(), sampling.stop, sampling.max_tokens
    if not ids or min(ids) < 0 or max(ids) >= vocabulary:
        return f"ids {ids[:5]}..., expected at least one of 0..{vocabulary - 1}"
    if len(completion.version) != len(ids):
        return f"{len(completion.version)} weight versions for {len(ids)} tokens"
    if any(token in stop for token in ids[:-1]):
        return "tokens follow the stop token"
    ends_with_stop = ids[-1] in stop
    if completion.finish != ("stop" if ends_with_stop else "length"):
        last = "is" if ends_with_stop else "is not"
        return f"finish is {completion.finish}, but the last token {last} a stop token"
    if completion.finish == "length" and len(ids) != most:
        return f"finish is length after {len(ids)} of {most} tokens"
    if len(ids) > most:
        return f"{len(ids)} tokens where {most} were asked for"
    return None


async def check_seeds(
    pair: EngineAndScorer, prompts: list[list[int]], hot: GeneratedBatch
) -> Check:
    """Check that the same seed draws the same tokens again, and another seed draws others."""
    if not pair.engine.caps.seeded:
        text = "the engine says it does not draw random numbers from seeds"
        return Check("seeds", None, text)
    count = len(prompts)
    await pair.engine.reset_cache()
    repeated = await generate_all(pair.engine, prompts, hot.sampling, range(count))
    reseeded = await generate_all(pair.engine, prompts, hot.sampling, range(1000, 1000 + count))
    # A completion with probability above 0.001 could occur twice by chance.
    uncertain = [
        i for i in range(count) if not float(hot.completions[i].logp.sum()) > math.log(1e-3)
    ]
    if not uncertain:
        text = "every completion is too certain to distinguish seeds"
        return Check("seeds", None, text)
    same, copied = _equal_tokens(hot, repeated), _equal_tokens(hot, reseeded)
    same_count = sum(same[i] for i in uncertain)
    copied_count = sum(copied[i] for i in uncertain)
    text = (
        f"{same_count} of {len(uncertain)} the same with the same seed, {copied_count} with another"
    )
    if 2 * same_count < len(uncertain) or copied_count:
        fix = "seed each request's random numbers with its own seed"
        return Check("seeds", False, text, fix)
    return Check("seeds", True, text)


def _equal_tokens(a: GeneratedBatch, b: GeneratedBatch) -> list[bool]:
    pairs = zip(a.completions, b.completions, strict=True)
    return [x.token_ids.tolist() == y.token_ids.tolist() for x, y in pairs]


def check_greedy(scorer: PolicyScorer, batch: TokenBatch, temperature: Check) -> Check:
    """Check that temperature 0 takes the likeliest token.

    temperature: the passed check, to which this one adds.
    """
    share, _ = topk_share(scorer, batch, 1)
    text = f"temperature 0 takes the trainer's likeliest token in {share:.0%}"
    if not share >= 0.9:  # rounding decides between two that are equally likely
        return Check("temperature", False, text, "take the argmax at temperature 0")
    return replace(temperature, found=f"{temperature.found}; {text}")


def check_topk_request(scorer: PolicyScorer, batch: TokenBatch, support: Check) -> Check:
    """Check that requests with top_k sample inside it, and return log-probabilities after top_k.

    support: the passed check of the whole vocabulary, to which this one adds.
    """
    share, mass = topk_share(scorer, batch, NARROW)
    text = (
        f"{share:.0%} of the tokens asked for with top_k={NARROW} are among the trainer's "
        f"{NARROW} likeliest"
    )
    if not share >= 0.9:
        fix = "pass top_k and top_p to the engine, or refuse them"
        return Check("support", False, text, fix)
    assert batch.logp_old is not None
    gap = (batch.logp_rollout - batch.logp_old)[batch.trainable]
    is_visible = not mass.abs().mean() <= 0.01
    # The difference of the two distributions is -mass. "not <=" is also true if a value is NaN.
    if is_visible and not (gap + mass).abs().mean() <= gap.abs().mean():
        text = (
            f"log-probabilities of tokens drawn with top_k={NARROW} are those of the whole "
            "vocabulary"
        )
        fix = f"return them after top-k and top-p, {PROCESSED}"
        return Check("support", False, text, fix)
    return replace(support, found=f"{support.found}; {text}")


def check_route_shapes(
    pair: EngineAndScorer, batches: Sequence[GeneratedBatch]
) -> dict[str, Check]:
    """Check rows, ranges and repetitions of the engine's routes.

    Return results only if routes are not needed or wrong.
    """
    if pair.route_spec is None:
        return _routes_not_needed("a dense model has no routes")
    if pair.config.uses_reprefill:
        return _routes_not_needed("replay.source=reprefill needs none of its own")
    if not pair.engine.caps.returns_routes:
        fix = "start the engine so that it returns them, or set replay.source=reprefill"
        return {"routes": Check("routes", False, "the engine returns none", fix)}
    fix = "return one row per token that was fed, of every MoE layer, as the router chose them"
    for batch in batches:
        for i, (prompt, done) in enumerate(zip(batch.prompts, batch.completions, strict=True)):
            if done.routing is None:
                return {"routes": Check("routes", False, f"request {i} has none", fix)}
            try:
                check_completion(done, prompt, pair.route_spec, f"request {i}")
            except UsageError as error:
                return {"routes": Check("routes", False, str(error), fix)}
    return {}


def _routes_not_needed(reason: str) -> dict[str, Check]:
    return {name: Check(name, None, reason) for name in ("routes", "layers")}


def check_route_agreement(pair: EngineAndScorer, batch: TokenBatch) -> dict[str, Check]:
    """Check that the engine's routes belong to these tokens and layers. batch: scored."""
    assert batch.routing is not None
    assert batch.routing_native is not None
    rows = f"{len(batch.routing)} rows, well formed"
    least = getattr(pair.config.replay, "min_agreement", 0.0) or MIN_AGREEMENT
    try:
        check_alignment(batch.routing, batch.routing_native, batch.cu_seqlens, least=least)
    except MisalignedRoutesError as error:
        if not error.layers_wrong:
            fix = "row i is of the token that was fed i-th"
            return {"routes": Check("routes", False, str(error), fix)}
        fix = "return the model's MoE layers in their order"
        return {
            "routes": Check("routes", True, rows),
            "layers": Check("layers", False, str(error), fix),
        }
    differ = routing_disagreement(batch.routing_native, batch.routing)
    worst = float(differ.per_layer.max())
    routes = f"{rows}; {number(differ.routers, share=True)} of routes differ from the trainer's"
    layers = f"{len(batch.routing.layers)} layers, in the worst {number(worst, share=True)} differ"
    return {
        "routes": Check("routes", True, routes),
        "layers": Check("layers", True, layers),
    }
