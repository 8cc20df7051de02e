"""Tokens per second of the embedded engine beside transformers' `generate` and `generate_batch`.

Qwen3-0.6B with random weights in bfloat16, 64 and 256 requests of 256 + 128 tokens without stop
tokens, and of 256 + 64 beside `generate_batch` (paged, continuous batching), which TRL's
use_transformers_paged calls. Target: at least its tokens per second. The profile counts kernel
launches per decode step and the share of time in which the GPU computes.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import torch
from gpu.harness import Bench
from gpu.models import dense, make
from transformers import GenerationConfig, PreTrainedModel

from onepolicy.config import HFEngineConfig
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.types import Sampling

PROFILED_STEPS = 8


def main(bench: Bench) -> None:
    """Record the embedded engine, where its time goes, and transformers' `generate`."""
    model, new = model_of(bench), bench.size(128, 5)
    for count in bench.size([64, 256], [3]):
        prompts = prompts_of(model, count, bench)
        speed_of("onepolicy", model, prompts, new, bench)
        profile_steps(model, prompts, bench)
        speed_of("generate, dynamic cache", model, prompts, new, bench)


def beside_pages(bench: Bench) -> None:
    """A case of its own, so that one of the two that hangs does not take the other's numbers."""
    model, new = model_of(bench), bench.size(64, 5)
    for count in bench.size([64, 256], [3]):
        prompts = prompts_of(model, count, bench)
        found = {}
        for name in ("onepolicy", "generate_batch"):
            found[name] = speed_of(name, model, prompts, new, bench)
        ours, paged = found["onepolicy"], found["generate_batch"]
        if ours is not None and paged is not None:
            case = f"onepolicy / generate_batch, {count} requests"
            bench.record(case, ratio=ours / paged, target=1.0)


def compiled(bench: Bench) -> None:
    """A case of its own, at the end of the queue: most of its time is that of the compiler."""
    model = model_of(bench)
    prompts = prompts_of(model, bench.size(256, 3), bench)
    speed_of(COMPILED, model, prompts, bench.size(256, 5), bench)


def model_of(bench: Bench) -> PreTrainedModel:
    return make(dense(bench), bench, bench.size(torch.bfloat16, torch.float32))


def prompts_of(model: PreTrainedModel, count: int, bench: Bench) -> torch.Tensor:
    """Return the same random prompts every time, [count, tokens]."""
    generator = torch.Generator().manual_seed(count)
    shape = (count, bench.size(256, 9))
    return torch.randint(2, model.config.vocab_size, shape, generator=generator)


def speed_of(
    name: str, model: PreTrainedModel, prompts: torch.Tensor, new: int, bench: Bench
) -> float | None:
    """Record the tokens per second of a way to sample. Return them, None if there are none."""
    build, share = (CASES | LATE)[name]
    case, tokens, speed = f"{name}, {len(prompts)} requests", len(prompts) * new, None
    if not bench.has_time(case, share):
        return None
    with bench.case(case):
        measured = bench.measure(build(model, prompts, new, bench), share=share, warm_ups=1)
        speed = tokens / measured.median
        bench.record(
            case,
            tokens_per_second=speed,
            seconds=measured.seconds,
            peak_gb=measured.peak / 1e9,
        )
    return speed


def sampling(model: PreTrainedModel, prompts: torch.Tensor, new: int, bench: Bench) -> Callable:
    """Return a call that samples all requests with the embedded engine."""
    engine = engine_of(model, len(prompts), prompts.shape[1] + new)
    rows = prompts.tolist()

    async def together() -> None:
        await engine.reset_cache()
        sampling = Sampling(1.0, new)
        await asyncio.gather(
            *(engine.generate(row, sampling, seed=i) for i, row in enumerate(rows))
        )

    return lambda: asyncio.run(together())


def engine_of(model: PreTrainedModel, count: int, max_len: int) -> HFEngine:
    dtype = str(model.dtype).removeprefix("torch.")
    config = HFEngineConfig(dtype=dtype, max_num_seqs=count)
    return HFEngine(copy.deepcopy(model), config, return_routes=False, max_len=max_len)


def generating(cache: str | None) -> Callable:
    """Return a builder of calls of `generate`. cache: static, which it compiles, or None."""

    def build(model: PreTrainedModel, prompts: torch.Tensor, new: int, bench: Bench) -> Callable:
        inputs = prompts.to(bench.device)
        settings: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new}
        if cache is not None:
            settings["cache_implementation"] = cache

        @torch.inference_mode()
        def run() -> None:
            model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=True,
                pad_token_id=0,
                **settings,
            )

        return run

    return build


def paged(model: PreTrainedModel, prompts: torch.Tensor, new: int, bench: Bench) -> Callable:
    """Return a call of `generate_batch` on a copy of the model."""
    copied, rows = copy.deepcopy(model), prompts.tolist()
    settings = GenerationConfig(
        max_new_tokens=new, do_sample=True, eos_token_id=-1, pad_token_id=0, temperature=1.0
    )

    limits: dict[str, Any] = {}
    if bench.device.type == "cpu":  # where it would take most of the machine's memory
        from transformers import ContinuousBatchingConfig

        sizes = {"page_size": 16, "num_blocks": 16, "max_batch_tokens": 64}
        limits["continuous_batching_config"] = ContinuousBatchingConfig(**sizes)

    def run() -> None:
        done = copied.generate_batch(
            inputs=rows, generation_config=settings, progress_bar=False, **limits
        )
        assert len(done) == len(rows), f"{len(done)} of {len(rows)} requests came back"

    return run


COMPILED = "generate, static cache and compile"
CASES: dict[str, tuple[Callable, float]] = {
    "onepolicy": (sampling, 14.0),
    "generate_batch": (paged, 14.0),
    "generate, dynamic cache": (generating(None), 10.0),
}
"""Name -> builder of the call, seconds that it may take."""
LATE = {COMPILED: (generating("static"), 70.0)}


def profile_steps(model: PreTrainedModel, prompts: torch.Tensor, bench: Bench) -> None:
    """Record kernel launches per decode step, the GPU's share of the time, and the waits."""
    case = f"profile, {len(prompts)} requests"
    if not bench.has_time(case, 8):
        return
    with bench.case(case):
        short = sampling(model, prompts, 2, bench)
        longer = sampling(model, prompts, 2 + PROFILED_STEPS, bench)
        waits = bench.waits(longer) - bench.waits(short)
        more, less = bench.profile(longer), bench.profile(short)
        steps = PROFILED_STEPS
        bench.record(
            case,
            launches_per_step=(more.launches - less.launches) / steps,
            gpu_busy=(more.busy - less.busy) / max(more.wall - less.wall, 1e-9),
            waits_per_step=waits / steps,
            step_ms=1e3 * (more.wall - less.wall) / steps,
            longest=more.longest,
        )
