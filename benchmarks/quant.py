"""Rollout tokens per second and weight sizes, per format of the engine's weights.

    python benchmarks/quant.py                # tiny and 196M parameters, three lengths
    python benchmarks/quant.py --models tiny --lengths 16 64 --rounds 5 --formats int8 fp8
    python benchmarks/quant.py --device cuda  # and 1.3B parameters

Formats are interleaved: every round samples the same prompts with each; the median of the ratios to
bfloat16 of the same round counts. On the CPU one thread is timed in CPU seconds, so that waiting
for a core does not count; on a GPU its own events are, which wait for the host as sampling does.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import statistics
import time
from collections.abc import Callable

import torch
from engine import build_model
from sync import big_model
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from onepolicy.config import Fp8, Fp8Weight, HFEngineConfig, Int8, QuantFormat
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.types import Sampling


def large_model() -> PreTrainedModel:
    """Build a model of 1.3B parameters: 24 layers of 32 experts, 4 active."""
    config = Qwen3MoeConfig(
        vocab_size=32_768,
        hidden_size=1024,
        num_hidden_layers=24,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=512,
        intermediate_size=2048,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config).eval()


MODELS = {"tiny": build_model, "big": big_model, "large": large_model}
FORMATS: dict[str, QuantFormat | None] = {
    "bfloat16": None,
    "int8": Int8(),
    "int8-static": Int8(activations="static"),
    "fp8": Fp8(),
    "fp8-weight": Fp8Weight(),
}
PROMPT = 26
WARM_UP = 2  # tokens of a response


def main() -> None:
    options = arguments()
    if options.device == "cpu":
        torch.set_num_threads(1)
    print(
        "| model | format | weights, MB | response | tokens/s | speed / bfloat16 [min, max] |\n|"
        + " --- |" * 6
    )
    for name in options.models or (["tiny", "big"] if options.device == "cpu" else list(MODELS)):
        model = MODELS[name]()
        engines = {
            each: build(model, FORMATS[each], options) for each in ["bfloat16", *options.formats]
        }
        for length in options.lengths:
            found = speeds(engines, options.batch, length, options.rounds, options.device)
            for each, values in found.items():
                ratios = [own / base for own, base in zip(values, found["bfloat16"], strict=True)]
                speed = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
                size, fast = f"{megabytes(engines[each]):.1f}", f"{statistics.median(values):,.0f}"
                print(f"| {name} | {each} | {size} | {length} | {fast} | {speed} |", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--models",
        nargs="+",
        choices=list(MODELS),
        help="default: what the device is large enough for",
    )
    parser.add_argument(
        "--formats", nargs="+", default=list(FORMATS)[1:], choices=list(FORMATS)[1:]
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[16, 64, 256], help="tokens of a response"
    )
    parser.add_argument("--batch", type=int, default=64, help="sequences decoded together")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def build(
    model: PreTrainedModel, quant: QuantFormat | None, options: argparse.Namespace
) -> HFEngine:
    config = HFEngineConfig(dtype="bfloat16", max_num_seqs=options.batch)
    own = copy.deepcopy(model).to(options.device)
    return HFEngine(
        own,
        config,
        return_routes=True,
        max_len=PROMPT + max(WARM_UP, *options.lengths),
        quant=quant,
    )


def megabytes(engine: HFEngine) -> float:
    if engine.quantised is not None:
        return sum(size.bytes_after for size in engine.quantised.sizes().parts) / 1e6
    return sum(parameter.nbytes for parameter in engine.model.parameters()) / 1e6


def speeds(
    engines: dict[str, HFEngine], batch: int, length: int, rounds: int, device: str
) -> dict[str, list[float]]:
    """Return the tokens per second of every round. A short round before them warms up and
    calibrates."""
    vocabulary = next(iter(engines.values())).model.config.vocab_size
    prompts = torch.randint(
        vocabulary, (batch, PROMPT), generator=torch.Generator().manual_seed(0)
    ).tolist()
    found: dict[str, list[float]] = {name: [] for name in engines}
    clock = cuda_seconds if device == "cuda" else cpu_seconds
    for engine in engines.values():
        asyncio.run(sample(engine, prompts, WARM_UP))
        if engine.quantised is not None and any(
            each.scale is None for each in engine.quantised.static.values()
        ):
            engine.quantised.calibrate()
    for _ in range(rounds):
        for name, engine in engines.items():
            seconds = clock(lambda engine=engine: asyncio.run(sample(engine, prompts, length)))
            found[name].append(batch * length / seconds)
    return found


async def sample(engine: HFEngine, prompts: list[list[int]], length: int) -> None:
    await engine.reset_cache()
    requests = (engine.generate(p, Sampling(1.0, length), seed=i) for i, p in enumerate(prompts))
    await asyncio.gather(*requests)


def cpu_seconds(run: Callable[[], None]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def cuda_seconds(run: Callable[[], None]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


if __name__ == "__main__":
    main()
