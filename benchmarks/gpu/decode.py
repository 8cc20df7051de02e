"""What the embedded engine does slowly on paper: rows P6, P8, P9 and P12 of docs/measured.md.

A decode step of 4 layers of Qwen3-30B-A3B with quantised weights beside bfloat16; one of 4 layers
in DeepSeek-V2-Lite's shapes, with few and many cached tokens; the first token after a prompt of
32k, or of 8k where the flash kernel takes no cache (torch 2.11); an update of Qwen3-0.6B beside an
engine that samples.
"""

from __future__ import annotations

import asyncio
import copy
import statistics
import threading
import time
from typing import Any

import torch
from gpu import engine as sampling
from gpu.harness import Bench
from gpu.models import dense, make, moe
from gpu.step import Ours
from transformers import DeepseekV3Config, PreTrainedModel

from onepolicy.config import Fp8, HFEngineConfig, Int8
from onepolicy.models import flash
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.rollout.hf.prepare import EngineStream
from onepolicy.types import Sampling
from support.models import CONFIGS

STEPS = 16
NEVER = 10**6  # a stop token that no row samples
DEEPSEEK = {
    **{"vocab_size": 102_400, "hidden_size": 2048, "intermediate_size": 10_944},
    **{"moe_intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 16},
    **{"num_key_value_heads": 16, "n_routed_experts": 64, "n_shared_experts": 2},
    **{"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    **{"kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128},
    **{"v_head_dim": 128, "max_position_embeddings": 4096},
}


def main(bench: Bench) -> None:
    quantised(bench)
    with bench.case("latent cache"):
        latent(bench)
    with bench.case("beside an update"):
        overlap(bench)
    with bench.case("prefill"):
        prefill(bench)


def engine_of(model: PreTrainedModel, rows: int, max_len: int, quant: Any = None) -> HFEngine:
    dtype = str(model.dtype).removeprefix("torch.")
    config = HFEngineConfig(dtype=dtype, max_num_seqs=rows)
    return HFEngine(model, config, return_routes=False, max_len=max_len, quant=quant)


def seconds_of(engine: HFEngine, rows: int, prompt: int, new: int, bench: Bench) -> float:
    """Return the seconds of `rows` requests of `prompt` + `new` tokens, the median of 3."""

    async def together() -> None:
        await engine.reset_cache()
        wanted = Sampling(1.0, new, stop=(NEVER,))
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(2, 60, (rows, prompt), generator=generator).tolist()
        await asyncio.gather(*(engine.generate(p, wanted, seed=i) for i, p in enumerate(ids)))

    found = []
    for _ in range(bench.size(4, 1)):
        begun = time.perf_counter()
        asyncio.run(together())
        bench.synchronize()
        found.append(time.perf_counter() - begun)
    return statistics.median(found[-3:])


def step_ms(engine: HFEngine, rows: int, prompt: int, bench: Bench) -> float:
    """Return the milliseconds of one decode step."""
    short, longer = (seconds_of(engine, rows, prompt, n, bench) for n in (2, 2 + STEPS))
    return 1e3 * (longer - short) / STEPS


def prefill(bench: Bench) -> None:
    length = bench.size(32_768 if "seqused_k" in flash.ARGUMENTS else 8192, 100)
    dtype = bench.size(torch.bfloat16, torch.float32)
    engine = engine_of(make(dense(bench), bench, dtype), 1, length + 2)
    seconds = seconds_of(engine, 1, length, 1, bench)
    bench.record(f"a prompt of {length} tokens", seconds=seconds, tokens_per_s=length / seconds)


def quantised(bench: Bench) -> None:
    rows, dtype = bench.size(64, 3), bench.size(torch.bfloat16, torch.float32)
    exact = None
    for name, quant in {"none": None, "int8": Int8(), "fp8": Fp8()}.items():
        case = f"decode step of 4 layers of 30B-A3B, quant {name}"
        if not bench.has_time(case, 8):
            continue
        with bench.case(case):
            model = make(moe(bench, num_hidden_layers=bench.size(4, 2)), bench, dtype)
            ms = step_ms(engine_of(model, rows, 256, quant), rows, 32, bench)
            exact = exact or ms
            bench.record(case, ms=ms, over_bfloat16=ms / exact)


def latent(bench: Bench) -> None:
    rows = bench.size(64, 3)
    config = DeepseekV3Config(**DEEPSEEK)
    if bench.tiny:
        config = copy.deepcopy(CONFIGS["deepseek_v3"])
    for cached in bench.size([128, 2048], [16]):
        model = make(config, bench, bench.size(torch.bfloat16, torch.float32))
        ms = step_ms(engine_of(model, rows, cached + 32), rows, cached, bench)
        bench.record(f"decode step of 4 layers of DeepSeek, {cached} tokens cached", ms=ms)


def overlap(bench: Bench) -> None:
    """Record an update and a sampling, each alone and both at once, in two threads."""
    prompt, shortest = bench.size((256, 384), (5, 8))
    lengths = [prompt + shortest] * bench.size(64, 4)
    learner = Ours(bench, lengths, prompt, bench.size("bfloat16", "float32"), "off")
    model, rows = sampling.model_of(bench), bench.size(64, 3)
    engine = engine_of(model, rows, 512 if not bench.tiny else 64)
    if bench.device.type == "cuda":
        engine.use_stream(EngineStream(bench.device))
    new = bench.size(64, 4)

    def update() -> None:
        learner.update()
        torch.cuda.current_stream().synchronize() if bench.device.type == "cuda" else None

    def sample() -> None:
        seconds_of(engine, rows, 32, new, _once(bench))

    def both() -> None:
        thread = threading.Thread(target=sample)
        thread.start()
        update()
        thread.join()

    runs = {"update": update, "sampling": sample, "both at once": both}
    found = bench.compare(runs, share=20.0)
    alone = found["update"].median + found["sampling"].median
    for name, measured in found.items():
        bench.record(name, seconds=measured.seconds)
    bench.record("overlap", both_over_one_after_the_other=found["both at once"].median / alone)


def _once(bench: Bench) -> Bench:
    once = copy.copy(bench)
    once.tiny = True
    return once
