"""`onepolicy engine check`: does an engine keep the contract of `RolloutEngine`? Asked with its trainer beside it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from onepolicy.build.components import (
    EngineAndScorer,
    build_engine_and_scorer,
    load_tokenizer_and_max_len,
    uses_reprefill,
)
from onepolicy.build.learner import resolve_model
from onepolicy.build.measure_settings import measure_config
from onepolicy.config import ModelConfig, TrainingError, UsageError
from onepolicy.config.objective import MIN_AGREEMENT
from onepolicy.divergence.routing import routing_disagreement
from onepolicy.engine_check.checks import (
    HOT,
    CheckResult,
    GeneratedBatch,
    check_logprobs,
    find_malformed_logprobs,
    generate_all,
    random_prompts,
    score_generated,
    topk_share,
)
from onepolicy.engine_check.weight_sync import RoundedModel, check_weight_sync
from onepolicy.replay.alignment import check_alignment
from onepolicy.replay.checks import MisalignedRoutesError, check_completion
from onepolicy.train.scorer import PolicyScorer
from onepolicy.types import Sampling, TokenBatch

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
TOKENS, LONGEST = 48, 160
"""Of a completion; of a prompt: enough to fill a block of a prefix cache."""
NARROW = 3
"""top_k of the requests that ask for a narrowed support."""


def run_engine_check(tree: dict[str, Any], overrides: list[str]) -> list[CheckResult]:
    """`tree`: a recipe's settings, or none. Its task is not played: prompts are random tokens."""
    tree = {
        name: section for name, section in tree.items() if name not in ("objective", "correction")
    }
    config = measure_config(tree, overrides, None)
    model = resolve_model(config.model)
    tokenizer, max_len = load_tokenizer_and_max_len(config, model)
    return asyncio.run(
        check_pair(build_engine_and_scorer(config, model, max_len), tokenizer, model)
    )


async def check_pair(
    pair: EngineAndScorer, tokenizer: PreTrainedTokenizerBase, model: ModelConfig
) -> list[CheckResult]:
    """One Check per name of NAMES, in that order."""
    scorer, engine = pair.scorer, pair.engine
    length = min(TOKENS, engine.caps.max_len // 2)
    prompts = random_prompts(tokenizer, min(LONGEST, engine.caps.max_len - length))
    numbers = range(len(prompts))
    try:
        await engine.reset_cache()
        plain = await generate_all(engine, prompts, Sampling(1.0, length), numbers)
        greedy = await generate_all(engine, prompts, Sampling(0.0, length), numbers)
        few = await generate_all(engine, prompts, Sampling(1.0, length, top_k=NARROW), numbers)
        stopped = await generate_all(
            engine, prompts, Sampling(1.0, length, stop=_stops(plain)), numbers
        )
        await engine.reset_cache()
        hot = await generate_all(engine, prompts, Sampling(HOT, length), numbers)
    except (UsageError, TrainingError) as error:
        return _complete(
            {
                "tokens": CheckResult(
                    "tokens", False, f"a request failed: {error}", "mend the engine's answer"
                )
            }
        )
    found = {"tokens": check_tokens((plain, hot, greedy, few, stopped), scorer.vocabulary)}
    found |= check_route_shapes(pair, (plain, hot))
    found["seeds"] = await check_seeds(pair, prompts, hot)
    if (broken := find_malformed_logprobs((plain, hot, few))) is not None:
        fix = "return one finite log-probability per sampled token"
        found["log-probabilities"] = CheckResult("log-probabilities", False, broken, fix)
    elif found["tokens"].passed:
        copy = RoundedModel(scorer, model)
        cold, warm = (
            score_generated(scorer, plain, routes="routes" not in found),
            score_generated(scorer, hot),
        )
        found |= check_logprobs(scorer, cold, warm, limits=(copy.limit(cold), copy.limit(warm)))
        if found["tokens"].passed and "routes" not in found:
            found |= check_route_agreement(pair, cold)
        if "temperature" in found and found["temperature"].passed:
            found["temperature"] = check_greedy(
                scorer, score_generated(scorer, greedy), found["temperature"]
            )
            found["support"] = check_topk_request(
                scorer, score_generated(scorer, few), found["support"]
            )
        if (reported := found.get("log-probabilities")) is not None and reported.passed:
            found["weight sync"] = await check_weight_sync(pair, copy, plain)
    return _complete(found)


def _complete(found: dict[str, CheckResult]) -> list[CheckResult]:
    return [
        found.get(name) or CheckResult(name, None, "not judged: another check fails first")
        for name in NAMES
    ]


def _stops(played: GeneratedBatch) -> tuple[int, ...]:
    """Tokens that are sampled early enough to end most of the same requests."""
    return tuple({int(done.token_ids[len(done.token_ids) // 3]) for done in played.done[:3]})


def check_tokens(played: Sequence[GeneratedBatch], vocabulary: int) -> CheckResult:
    """Ids of the vocabulary; a completion ends with its stop token or at max_tokens, and its finish says which."""
    stops = total = 0
    for each in played:
        stop, most = each.sampling.stop, each.sampling.max_tokens
        for i, done in enumerate(each.done):
            ids = done.token_ids.tolist()
            total, stops = total + len(ids), stops + (done.finish == "stop")
            wrong = None
            if not ids or min(ids) < 0 or max(ids) >= vocabulary:
                wrong = f"ids {ids[:5]}..., expected at least one of 0..{vocabulary - 1}"
            elif len(done.version) != len(ids):
                wrong = f"{len(done.version)} weight versions for {len(ids)} tokens"
            elif any(token in stop for token in ids[:-1]):
                wrong = "tokens follow the stop token"
            elif done.finish != ("stop" if ids[-1] in stop else "length"):
                last = "is" if ids[-1] in stop else "is not"
                wrong = f"finish is {done.finish}, but the last token {last} a stop token"
            elif done.finish == "length" and len(ids) != most:
                wrong = f"finish is length after {len(ids)} of {most} tokens"
            elif len(ids) > most:
                wrong = f"{len(ids)} tokens where {most} were asked for"
            if wrong is not None:
                fix = "return exactly the ids that were sampled, the stop token included and nothing after it"
                return CheckResult(
                    "tokens",
                    False,
                    f"temperature {each.sampling.temperature}, request {i}: {wrong}",
                    fix,
                )
    answered = sum(len(each.done) for each in played)
    return CheckResult(
        "tokens",
        True,
        f"{answered} requests, {total} ids; {stops} ended at their stop token, which is kept",
    )


async def check_seeds(
    pair: EngineAndScorer, prompts: list[list[int]], hot: GeneratedBatch
) -> CheckResult:
    """The same seed draws the same tokens again; another seed draws others."""
    if not pair.engine.caps.seeded:
        return CheckResult(
            "seeds", None, "the engine says it does not draw random numbers from seeds"
        )
    await pair.engine.reset_cache()
    again = await generate_all(pair.engine, prompts, hot.sampling, range(len(prompts)))
    others = await generate_all(
        pair.engine, prompts, hot.sampling, range(1000, 1000 + len(prompts))
    )
    same, copied = _equal(hot, again), _equal(hot, others)
    certain = [
        float(done.logp.sum()) > math.log(1e-3) for done in hot.done
    ]  # could come twice by itself
    judged = [i for i in range(len(prompts)) if not certain[i]]
    if not judged:
        return CheckResult("seeds", None, "every completion is too certain to tell seeds apart")
    counts = f"{sum(same[i] for i in judged)} of {len(judged)} the same with the same seed, "
    counts += f"{sum(copied[i] for i in judged)} with another"
    passed = 2 * sum(same[i] for i in judged) >= len(judged) and not any(copied[i] for i in judged)
    return CheckResult(
        "seeds",
        passed,
        counts,
        "" if passed else "seed each request's random numbers with its own seed",
    )


def check_greedy(scorer: PolicyScorer, batch: TokenBatch, sampled: CheckResult) -> CheckResult:
    """`sampled`, the passed check of the temperature, if temperature 0 takes the likeliest token as well."""
    share, _ = topk_share(scorer, batch, 1)
    text = f"temperature 0 takes the trainer's likeliest token in {share:.0%}"
    if not share >= 0.9:  # rounding decides between two that are equally likely
        return CheckResult("temperature", False, text, "take the argmax at temperature 0")
    return replace(sampled, measured=f"{sampled.measured}; {text}")


def check_topk_request(scorer: PolicyScorer, batch: TokenBatch, whole: CheckResult) -> CheckResult:
    """`whole`, the check of the whole vocabulary, if requests with top_k stay inside it and say so in their values."""
    share, mass = topk_share(scorer, batch, NARROW)
    text = f"{share:.0%} of the tokens asked for with top_k={NARROW} are among the trainer's {NARROW} likeliest"
    if not share >= 0.9:
        return CheckResult(
            "support", False, text, "hand top_k and top_p to the engine, or refuse them"
        )
    assert batch.logp_old is not None
    off = (batch.logp_rollout - batch.logp_old)[batch.trainable]
    tells = not mass.abs().mean() <= 0.01
    if tells and not (off + mass).abs().mean() <= off.abs().mean():  # also if a value is NaN
        text = f"log-probabilities of tokens drawn with top_k={NARROW} are those of the whole vocabulary"
        return CheckResult(
            "support", False, text, "return them after top-k and top-p (vLLM: processed_logprobs)"
        )
    return replace(whole, measured=f"{whole.measured}; {text}")


def _equal(a: GeneratedBatch, b: GeneratedBatch) -> list[bool]:
    return [
        x.token_ids.tolist() == y.token_ids.tolist() for x, y in zip(a.done, b.done, strict=True)
    ]


def check_route_shapes(
    pair: EngineAndScorer, played: Sequence[GeneratedBatch]
) -> dict[str, CheckResult]:
    """Rows, ranges and repetitions of the engine's routes: empty if nothing is wrong with them."""
    if pair.route_spec is None or uses_reprefill(pair.config):
        why = (
            "a dense model has no routes"
            if pair.route_spec is None
            else "replay.source=reprefill needs none of its own"
        )
        return {name: CheckResult(name, None, why) for name in ("routes", "layers")}
    if not pair.engine.caps.returns_routes:
        fix = "start the engine so that it returns them, or set replay.source=reprefill"
        return {"routes": CheckResult("routes", False, "the engine returns none", fix)}
    fix = "return one row per token that was fed, of every MoE layer, as the router chose them"
    for each in played:
        for i, (prompt, done) in enumerate(zip(each.prompts, each.done, strict=True)):
            if done.routing is None:
                return {"routes": CheckResult("routes", False, f"request {i} has none", fix)}
            try:
                check_completion(done, prompt, pair.route_spec, f"request {i}")
            except UsageError as error:
                return {"routes": CheckResult("routes", False, str(error), fix)}
    return {}


def check_route_agreement(pair: EngineAndScorer, batch: TokenBatch) -> dict[str, CheckResult]:
    """Are the routes those of these tokens and layers? batch: scored, with the engine's routes."""
    assert batch.routing is not None
    assert batch.routing_native is not None
    rows = f"{len(batch.routing)} rows, well formed"
    try:
        check_alignment(batch.routing, batch.routing_native, batch.cu_seqlens, least=_least(pair))
    except MisalignedRoutesError as error:
        if not error.layers_wrong:
            return {
                "routes": CheckResult(
                    "routes", False, str(error), "row i is of the token that was fed i-th"
                )
            }
        wrong = CheckResult(
            "layers", False, str(error), "hand over the model's MoE layers in their order"
        )
        return {"routes": CheckResult("routes", True, rows), "layers": wrong}
    differ = routing_disagreement(batch.routing_native, batch.routing)
    worst = f"{len(batch.routing.layers)} layers, in the worst {float(differ.per_layer.max()):.2%} differ"
    return {
        "routes": CheckResult(
            "routes", True, f"{rows}; {differ.routers:.2%} of routers differ from the trainer's"
        ),
        "layers": CheckResult("layers", True, worst),
    }


def _least(pair: EngineAndScorer) -> float:
    return getattr(pair.config.replay, "min_agreement", 0.0) or MIN_AGREEMENT
