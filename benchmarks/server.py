"""Tokens per second of a vLLM server beside vLLM in this process, interleaved in one run; needs
`make vllm`.

    onepolicy engine serve --port 8000 tiny kv_cache_gib=0.25 max_num_seqs=96
    python benchmarks/server.py                  # batch 64 and 256, 26 + 75 tokens

Wall time: the server works in processes of its own. Ratios are medians of the ratios within a
round, with the lowest and highest.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time

from onepolicy.rollout.spec import EngineSpec

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from onepolicy.build.engines import build_engine
from onepolicy.config import ModelConfig, VLLMEngineConfig, VLLMServerConfig
from onepolicy.config.input_files import resolve_model
from onepolicy.interfaces import RolloutEngine
from onepolicy.models.load import read_config
from onepolicy.replay.checks import RouteSpec
from onepolicy.types import Sampling

PROMPT, NEW = 26, 75


def speed(engine: RolloutEngine, batch: int) -> float:
    """Return the tokens per second."""

    async def together() -> float:
        await engine.reset_cache()
        start = time.perf_counter()
        rows = ([3 + i % 10] * PROMPT for i in range(batch))
        await asyncio.gather(
            *(engine.generate(row, Sampling(1.0, NEW), seed=i) for i, row in enumerate(rows))
        )
        return batch * NEW / (time.perf_counter() - start)

    return asyncio.run(together())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="tiny", help="the one that is served")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    model = resolve_model(ModelConfig(path=arguments.model))
    text = read_config(model).get_text_config()
    rules = RouteSpec(
        tuple(range(text.num_hidden_layers)), text.num_experts, text.num_experts_per_tok, "error"
    )
    server, local = (
        build_engine(EngineSpec(model, config, torch.device("cpu"), PROMPT + NEW, route_spec=rules))
        for config in (
            VLLMServerConfig(url=arguments.url, max_num_seqs=256),
            VLLMEngineConfig(max_num_seqs=96, kv_cache_gib=0.25),
        )
    )
    for batch in (64, 256):
        speed(server, batch), speed(local, batch)
        rounds = [(speed(server, batch), speed(local, batch)) for _ in range(arguments.rounds)]
        ratios = [a / b for a, b in rounds]
        over_http, in_process = (statistics.median(each) for each in zip(*rounds, strict=True))
        print(
            f"batch {batch}: server {over_http:,.0f} tokens/s, in this process {in_process:,.0f}; "
            f"ratio {statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]",
            flush=True,
        )


if __name__ == "__main__":
    main()
