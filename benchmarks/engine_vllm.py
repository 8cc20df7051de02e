"""Tokens per second of vLLM and of the embedded engine on one core, interleaved in one run; needs
`make vllm`.

    python benchmarks/engine_vllm.py                    # batch 64 and 256, 26 + 75 tokens
    python benchmarks/engine_vllm.py --kinds vllm --rounds 15  # only adapter and routes

"bare" is the same vLLM engine with the same requests, without our adapter. The adapter's cost is
also given as the share of its round outside vLLM's `SamplingParams`, `add_request` and `step`,
which is less noisy. Seconds are CPU seconds of the process; ratios are medians of the ratios within
a round, with the lowest and highest.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from onepolicy.models.load import DTYPES

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from engine import build_model

from onepolicy.config import HFEngineConfig, ModelConfig, VLLMEngineConfig
from onepolicy.interfaces import RolloutEngine
from onepolicy.models.load import load_model, read_config
from onepolicy.replay.checks import RouteSpec
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.rollout.vllm import engine as engine_module
from onepolicy.rollout.vllm.engine import VLLMEngine
from onepolicy.types import Sampling

CPU = torch.device("cpu")
RATIOS = (
    ("vllm bf16", "vllm bf16, bare"),
    ("vllm bf16", "vllm bf16, no routes"),
    ("vllm bf16", "hf bf16"),
    ("vllm bf16", "hf fp32"),
)


def adapter(engine: RolloutEngine, prompts: list[list[int]], new: int) -> Callable[[], None]:
    async def together() -> None:
        await engine.reset_cache()
        await asyncio.gather(
            *(engine.generate(row, Sampling(1.0, new), seed=i) for i, row in enumerate(prompts))
        )

    return lambda: asyncio.run(together())


def bare(engine: VLLMEngine, prompts: list[list[int]], new: int) -> Callable[[], None]:
    numbers = itertools.count()

    def run() -> None:
        engine.llm.reset_prefix_cache()
        for seed, row in enumerate(prompts):
            prompt = {"type": "token", "prompt_token_ids": row}
            engine.llm.add_request(
                f"bare {next(numbers)}",
                prompt,
                engine_module._sampling_params(Sampling(1.0, new), seed, engine._vocab),
            )
        while engine.llm.has_unfinished_requests():
            engine.llm.step()

    return run


class Inside:
    """CPU seconds spent in some functions of an object or module."""

    def __init__(self, *names: tuple[Any, str]) -> None:
        self.seconds = 0.0
        for target, name in names:
            setattr(target, name, self._timed(getattr(target, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - start

        return run


def build(folder: str, slots: int, max_len: int, kinds: list[str]) -> dict[str, RolloutEngine]:
    model = ModelConfig(path=folder)
    hf = read_config(model)
    rules = RouteSpec(
        tuple(range(hf.num_hidden_layers)), hf.num_experts, hf.num_experts_per_tok, "error"
    )
    engines: dict[str, RolloutEngine] = {}
    for name, routes in (("vllm bf16", rules), ("vllm bf16, no routes", None)):
        config = VLLMEngineConfig(max_num_seqs=slots, kv_cache_gib=0.5)
        engines[name] = VLLMEngine(model, hf, config, route_spec=routes, max_len=max_len, cpu=True)
    for name, dtype in (("hf bf16", "bfloat16"), ("hf fp32", "float32")) if "hf" in kinds else ():
        own = load_model(model, DTYPES[dtype], CPU)
        engines[name] = HFEngine(
            own,
            HFEngineConfig(dtype=dtype, max_num_seqs=slots),
            return_routes=True,
            max_len=max_len,
        )
    return engines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--prompt", type=int, default=26)
    parser.add_argument("--new", type=int, default=75)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=("vllm", "hf"), default=["vllm", "hf"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        build_model().save_pretrained(folder)
        engines = build(folder, max(args.batches), args.prompt + args.new, args.kinds)
        ours = engines["vllm bf16"]
        assert isinstance(ours, VLLMEngine)
        inside = Inside(
            (ours.llm, "add_request"), (ours.llm, "step"), (engine_module, "_sampling_params")
        )
        for batch in args.batches:
            prompts = torch.randint(3, 32, (batch, args.prompt)).tolist()
            runs = {name: adapter(engine, prompts, args.new) for name, engine in engines.items()}
            runs["vllm bf16, bare"] = bare(ours, prompts, args.new)
            report(runs, inside, batch * args.new, batch, args.rounds)


def report(
    runs: dict[str, Callable[[], None]], inside: Inside, tokens: int, batch: int, rounds: int
) -> None:
    speeds: list[dict[str, float]] = []
    shares = []
    for _ in range(rounds + 1):
        speed = {}
        for name, run in runs.items():
            start, inside.seconds = time.process_time(), 0.0
            run()
            seconds = time.process_time() - start
            speed[name] = tokens / seconds
            if name == "vllm bf16":
                shares.append(1 - inside.seconds / seconds)
        speeds.append(speed)
    speeds, shares = speeds[1:], shares[1:]  # warm-up
    for name in runs:
        print(
            f"batch {batch}: {name:22s} {statistics.median(s[name] for s in speeds):8.0f} tokens/s"
        )
    print(
        f"batch {batch}: adapter's share {statistics.median(shares):.4f} [{min(shares):.4f}, "
        f"{max(shares):.4f}]"
    )
    for one, other in [pair for pair in RATIOS if pair[1] in runs]:
        found = sorted(s[one] / s[other] for s in speeds)
        print(
            f"batch {batch}: {one} / {other}: {statistics.median(found):.3f} [{found[0]:.3f}, "
            f"{found[-1]:.3f}]"
        )


if __name__ == "__main__":
    main()
