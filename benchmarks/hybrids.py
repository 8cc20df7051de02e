"""Speed of a recurrent hybrid, each pair interleaved in one run: docs/hybrids.md.

    python benchmarks/hybrids.py                       # everything, float32, one thread
    python benchmarks/hybrids.py --parts engine --dtypes bfloat16
    python benchmarks/hybrids.py --parts step --samples 8 --prompt 512 --new 128

engine: tokens per second of the embedded engine, with routes recorded, over those of transformers'
`generate`. numerics: the engine's seconds with numerics = on-policy over those with fast. step:
seconds of forward, backward and AdamW over one packed row, over those of transformers' own packed
forward (whose layers leak between samples), and over those of our step of a model of the same sizes
whose layers are all attention.

The models are `make-policy`'s, random: 8 layers, 6 of them of the gated delta rule. CPU seconds of
this process are counted. A ratio is the median over rounds of the ratio in a round.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable

import torch
from engine import engine_runner, stock_runner
from transformers import PreTrainedModel

from onepolicy.config import HFEngineConfig
from onepolicy.config.policy import PolicyConfig
from onepolicy.models.buckets import BucketedPacking
from onepolicy.models.load import DTYPES
from onepolicy.models.prepare import prepare_for_training
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.tiny.model import make_model

VOCAB, RECURRENT = 32, 3
Runner = Callable[[], None]


def model_of(dtype: str, max_len: int, *, recurrent: bool = True) -> PreTrainedModel:
    model = make_model(PolicyConfig(recurrent=RECURRENT, max_len=max_len), VOCAB)
    if not recurrent:
        kinds = ["full_attention"] * model.config.num_hidden_layers
        model = type(model)(type(model.config)(**model.config.to_dict() | {"layer_types": kinds}))
    model.set_experts_implementation("grouped_mm")
    return model.to(DTYPES[dtype]).eval()


def rounds_of(runners: dict[str, Runner], rounds: int) -> dict[str, list[float]]:
    """Return CPU seconds of each in every round, after one warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(rounds + 1):
        for name, run in runners.items():
            begun = time.process_time()
            run()
            if number:
                seconds[name].append(time.process_time() - begun)
    return seconds


def say(title: str, seconds: dict[str, list[float]], over: str, under: str) -> None:
    """Print the ratio of two, and the smallest and largest in a round."""
    ratios = [a / b for a, b in zip(seconds[over], seconds[under], strict=True)]
    medians = (f"{name} {statistics.median(seconds[name]):.3f} s" for name in (over, under))
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"{title}: {statistics.median(ratios):.2f} ({spread}); {', '.join(medians)}", flush=True)


def engines(dtype: str, args: argparse.Namespace) -> dict[str, Runner]:
    """Return runners of `generate` and of both engines, with the same weights and prompts."""
    length = args.prompt + args.new
    model = model_of(dtype, length)
    prompts = torch.randint(3, VOCAB, (args.samples, args.prompt), device="cpu")
    config = HFEngineConfig(dtype=dtype, max_num_seqs=args.samples)
    runners = {}
    if "engine" in args.parts:
        runners["generate"] = stock_runner(model, prompts, args.new)
    for numerics in ("fast", "on-policy")[: 1 + ("numerics" in args.parts)]:
        engine = HFEngine(
            copy.deepcopy(model), config, return_routes=True, max_len=length, numerics=numerics
        )
        runners[numerics] = engine_runner(engine, prompts, args.new)
    return runners


def step_runner(model: PreTrainedModel, args: argparse.Namespace, *, ours: bool) -> Runner:
    """Return a runner of one training step over a packed row of all samples."""
    length = args.prompt + args.new
    ids = torch.randint(3, VOCAB, (1, args.samples * length), device="cpu")
    positions = torch.arange(length, device="cpu").repeat(args.samples)[None]
    bounds = torch.arange(0, ids.shape[1] + 1, length, device="cpu").int()
    arguments = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    if ours:
        prepare_for_training(model, ids.device)
        arguments["packing"] = BucketedPacking.of(bounds, ids.device)
    else:
        arguments |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        arguments |= {"max_length_q": length, "max_length_k": length}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    model.train()

    def run() -> None:
        logp = model(**arguments).logits[0, :-1].float().log_softmax(-1)
        (-logp.gather(1, ids[0, 1:, None]).mean()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def measure(dtype: str, args: argparse.Namespace) -> None:
    size = f"{dtype}, {args.samples} x ({args.prompt} + {args.new})"
    if {"engine", "numerics"} & set(args.parts):
        seconds = rounds_of(engines(dtype, args), args.rounds)
        if "engine" in args.parts:
            say(f"engine / generate, {size}", seconds, "generate", "fast")
        if "numerics" in args.parts:
            say(f"rollout on-policy / fast, {size}", seconds, "on-policy", "fast")
    if "step" in args.parts:
        length = args.prompt + args.new
        runners = {
            "ours": step_runner(model_of(dtype, length), args, ours=True),
            "stock": step_runner(model_of(dtype, length), args, ours=False),
            "attention": step_runner(model_of(dtype, length, recurrent=False), args, ours=True),
        }
        seconds = rounds_of(runners, args.rounds)
        say(f"step / stock's packed step, {size}", seconds, "ours", "stock")
        say(f"step / step of attention, {size}", seconds, "ours", "attention")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ["engine", "numerics", "step"]
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=list(DTYPES))
    parser.add_argument("--samples", type=int, default=64, help="sequences decoded together")
    parser.add_argument("--prompt", type=int, default=26, help="prompt tokens")
    parser.add_argument("--new", type=int, default=75, help="sampled tokens per sequence")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of all, interleaved")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for dtype in args.dtypes:
        measure(dtype, args)
    print("load of the machine, 1, 5 and 15 minutes:", *(f"{x:.1f}" for x in os.getloadavg()))


if __name__ == "__main__":
    main()
