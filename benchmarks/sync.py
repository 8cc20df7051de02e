"""Seconds of a weight sync, per GB of the learner's float32 tensors, for every engine; needs `make vllm`.

    python benchmarks/sync.py                            # the tiny policy's shape and 196M parameters
    python benchmarks/sync.py --models big --kinds vllm --rounds 3

Each engine in turn loads the tensors of the same random MoE; the median of the rounds after the first. Everything the
engine does until it could sample again counts: conversion, files, reload, packing, an empty cache.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from engine import build_model
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from onepolicy.config import HFEngineConfig, ModelConfig, VLLMEngineConfig, VLLMServerConfig
from onepolicy.interfaces import RolloutEngine
from onepolicy.loop.setup import build_engine

CPU = torch.device("cpu")
MAX_LEN = 128
KINDS = ("hf", "vllm", "vllm-server")


def big_model() -> PreTrainedModel:
    """196M parameters: 14 layers of 32 experts, 4 active."""
    config = Qwen3MoeConfig(
        vocab_size=8192,
        hidden_size=512,
        num_hidden_layers=14,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=256,
        intermediate_size=1024,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config).eval()


@contextmanager
def opened(kind: str, folder: str, log: Path) -> Iterator[RolloutEngine]:
    model = ModelConfig(path=folder)
    if kind == "hf":
        yield build_engine(model, HFEngineConfig(dtype="bfloat16"), CPU, routes=None, max_len=MAX_LEN)
    elif kind == "vllm":
        yield build_engine(model, VLLMEngineConfig(cache_gib=0.125), CPU, routes=None, max_len=MAX_LEN)
    else:
        with serving(folder, log) as url:
            yield build_engine(model, VLLMServerConfig(url=url), CPU, routes=None, max_len=MAX_LEN)


@contextmanager
def serving(folder: str, log: Path) -> Iterator[str]:
    """A server of the model in a process of its own; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = ["--no-routes", "--port", str(port), folder, "cache_gib=0.125", f"max_len={MAX_LEN}"]
    with log.open("wb") as file:
        command = [sys.executable, "-m", "onepolicy.cli", "engine", "serve", *settings]
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        while "ready after" not in log.read_text():
            if process.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def seconds(engine: RolloutEngine, model: PreTrainedModel, rounds: int) -> list[float]:
    async def load() -> list[float]:  # one event loop: a server's client keeps its connections
        found = []
        for version in range(rounds + 1):
            start = time.perf_counter()
            await engine.load_weights(model.state_dict().items(), version)
            found.append(time.perf_counter() - start)
        return found[1:]

    return asyncio.run(load())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("tiny", "big"), default=["tiny", "big"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.models:
        model = build_model() if name == "tiny" else big_model()
        size = sum(tensor.nbytes for tensor in model.state_dict().values()) / 1e9
        print(f"{name}: {model.num_parameters() / 1e6:.1f}M parameters, {size:.3f} GB in float32", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            for kind in args.kinds:
                with opened(kind, folder, Path(folder) / "log") as engine:
                    found = sorted(seconds(engine, model, args.rounds))
                middle = statistics.median(found)
                print(
                    f"{name}: {kind:12s} {middle:.3f} s [{found[0]:.3f}, {found[-1]:.3f}], {middle / size:.2f} s/GB",
                    flush=True,
                )


if __name__ == "__main__":
    main()
