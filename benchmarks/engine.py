"""Tokens per second of the embedded engine and of `model.generate`, interleaved in one run.

    python benchmarks/engine.py              # batch 16, 64, 256 in float32 and bfloat16, one thread
    python benchmarks/engine.py --batches 64 --dtypes float32 --rounds 7
    python benchmarks/engine.py --batches 64 --dtypes float32 --profile   # where its time is

Absolute numbers depend on the machine and on what else runs on it (one thread is timed in CPU
seconds, so that waiting for a core does not count); the ratios are what to look at. `on / off` is
the speed with routes recorded against the speed without. Stock `generate` returns neither
log-probabilities nor routes.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import itertools
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from onepolicy.config import HFEngineConfig
from onepolicy.models.load import DTYPES
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.types import Sampling


def build_model(max_len: int = 512) -> PreTrainedModel:
    """Build a model of 3.6M parameters: 8 layers of 32 experts, 4 active."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=128,
        num_hidden_layers=8,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=32,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        max_position_embeddings=max_len,
    )
    return Qwen3MoeForCausalLM(config).eval()


def engine_runner(engine: HFEngine, prompts: torch.Tensor, new: int) -> Callable[[], None]:
    rows = prompts.tolist()

    async def together() -> None:
        await engine.load_weights(
            engine.model.state_dict().items(), 1
        )  # forget prefixes of the last round
        await asyncio.gather(
            *(engine.generate(row, Sampling(1.0, new), seed=i) for i, row in enumerate(rows))
        )

    return lambda: asyncio.run(together())


def stock_runner(model: PreTrainedModel, prompts: torch.Tensor, new: int) -> Callable[[], None]:
    def run() -> None:
        with torch.inference_mode():
            model.generate(
                prompts, max_new_tokens=new, min_new_tokens=new, do_sample=True, pad_token_id=0
            )

    return run


def interleaved(
    runners: dict[str, Callable[[], None]], rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Return median seconds of each. Every round runs all of them, after one warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for n in range(rounds + 1):
        for name, run in runners.items():
            start = clock()
            run()
            if n:
                seconds[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure(batch: int, dtype: str, args: argparse.Namespace) -> dict[str, float]:
    model = build_model().to(args.device, DTYPES[dtype])
    model.set_experts_implementation("grouped_mm")
    prompts = torch.randint(3, 32, (batch, args.prompt), device=args.device)
    config = HFEngineConfig(dtype=dtype, max_num_seqs=batch)
    clock = time.process_time if args.device == "cpu" and args.threads == 1 else time.perf_counter
    runners = {"generate": stock_runner(model, prompts, args.new)}
    for record in (True, False):
        engine = HFEngine(
            copy.deepcopy(model), config, return_routes=record, max_len=args.prompt + args.new
        )
        runners["on" if record else "off"] = engine_runner(engine, prompts, args.new)
    seconds = interleaved(runners, args.rounds, clock)
    return {name: batch * args.new / value for name, value in seconds.items()}


def profile_engine(batch: int, dtype: str, args: argparse.Namespace) -> None:
    """Print the operators of a recording engine by their own CPU time."""
    model = build_model().to(args.device, DTYPES[dtype])
    prompts = torch.randint(3, 32, (batch, args.prompt), device=args.device)
    config = HFEngineConfig(dtype=dtype, max_num_seqs=batch)
    engine = HFEngine(model, config, return_routes=True, max_len=args.prompt + args.new)
    run = engine_runner(engine, prompts, args.new)
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        run()
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[16, 64, 256], help="sequences decoded together"
    )
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--prompt", type=int, default=26, help="prompt tokens")
    parser.add_argument("--new", type=int, default=75, help="sampled tokens per sequence")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds; the median counts")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--profile", action="store_true", help="operators of the engine, no times")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.profile:
        for dtype, batch in itertools.product(args.dtypes, args.batches):
            profile_engine(batch, dtype, args)
        return
    table = Table(
        title=f"tokens per second, {args.prompt} + {args.new} tokens, {args.threads} thread(s), "
        f"{args.device}"
    )
    for name in (
        "dtype",
        "batch",
        "generate",
        "engine, recording",
        "ratio",
        "engine, not recording",
        "on / off",
    ):
        table.add_column(name, justify="right")
    for dtype in args.dtypes:
        for batch in args.batches:
            speed = measure(batch, dtype, args)
            ratios = f"{speed['on'] / speed['generate']:.2f}", f"{speed['on'] / speed['off']:.2f}"
            stock, on, off = (f"{speed[name]:.0f}" for name in ("generate", "on", "off"))
            print(
                f"{dtype} batch {batch}: generate {stock}, engine {on}, ratio {ratios[0]}",
                flush=True,
            )
            table.add_row(dtype, str(batch), stock, on, ratios[0], off, ratios[1])
    Console().print(table)


if __name__ == "__main__":
    main()
