"""Seconds of a weight sync, per GB of the learner's float32 tensors, for every engine; needs `make
vllm`.

    python benchmarks/sync.py                      # the tiny policy's shape and 196M parameters
    python benchmarks/sync.py --models big --kinds vllm --rounds 3

Each engine in turn loads the tensors of the same random MoE; the median of the rounds after the
first. Everything that the engine does until it could sample again counts: conversion, files,
reload, packing, an empty cache. A server gets them by broadcast and by files in turn. First the
checksum of all tensors alone, beside a copy of them.
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

from onepolicy.rollout.spec import EngineSpec

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from engine import build_model
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from onepolicy.build.engines import build_engine
from onepolicy.config import (
    EngineConfig,
    HFEngineConfig,
    ModelConfig,
    VLLMEngineConfig,
    VLLMServerConfig,
)
from onepolicy.interfaces import RolloutEngine
from onepolicy.models.checksum import ChecksumAccumulator
from onepolicy.rollout.remote.engine import RemoteEngine

CPU = torch.device("cpu")
MAX_LEN = 128
KINDS = ("hf", "vllm", "vllm-server")


def big_model() -> PreTrainedModel:
    """Build a model of 196M parameters: 14 layers of 32 experts, 4 active."""
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
def opened(kind: str, folder: str, log: Path) -> Iterator[dict[str, RolloutEngine]]:
    """Yield the engines by name: the engine, or the same server's two transports."""

    def build(config: EngineConfig) -> RolloutEngine:
        return build_engine(EngineSpec(ModelConfig(path=folder), config, CPU, MAX_LEN))

    if kind == "hf":
        yield {kind: build(HFEngineConfig(dtype="bfloat16"))}
    elif kind == "vllm":
        yield {kind: build(VLLMEngineConfig(kv_cache_gib=0.125))}
    else:
        with serving(folder, log) as url:
            yield {
                f"{kind} {sync}": build(VLLMServerConfig(url=url, sync=sync))
                for sync in ("gloo", "disk")
            }


@contextmanager
def serving(folder: str, log: Path) -> Iterator[str]:
    """Start a server of the model in a process of its own and yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = [
        "--no-routes",
        "--port",
        str(port),
        folder,
        "kv_cache_gib=0.125",
        f"max_len={MAX_LEN}",
    ]
    with log.open("wb") as file:
        command = [sys.executable, "-m", "onepolicy", "engine", "serve", *settings]
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


def seconds(
    engines: dict[str, RolloutEngine], model: PreTrainedModel, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of every engine, in turn."""

    async def load() -> dict[
        str, list[float]
    ]:  # one event loop: a server's client keeps its connections
        found: dict[str, list[float]] = {name: [] for name in engines}
        for version in range(rounds + 1):
            for name, engine in engines.items():
                if isinstance(engine, RemoteEngine):  # the other way has given it weights since
                    engine.dialect.weights_id = await engine.dialect.read_weights_id()
                start = time.perf_counter()
                await engine.load_weights(model.state_dict().items(), version)
                found[name].append(time.perf_counter() - start)
        return {name: sorted(times[1:]) for name, times in found.items()}

    return asyncio.run(load())


def checksum(model: PreTrainedModel, rounds: int) -> dict[str, list[float]]:
    """Time the checksum of all tensors, and a copy of them, in turn."""
    found: dict[str, list[float]] = {"checksum": [], "copy": []}
    for _ in range(rounds + 1):
        checksums, start = ChecksumAccumulator(), time.perf_counter()
        for name, tensor in model.state_dict().items():
            checksums.add(name, tensor)
        checksums.pop_all()
        found["checksum"].append(time.perf_counter() - start)
        start = time.perf_counter()
        for tensor in model.state_dict().values():
            tensor.clone()
        found["copy"].append(time.perf_counter() - start)
    return {name: sorted(times[1:]) for name, times in found.items()}


def show(name: str, found: dict[str, list[float]], size: float) -> None:
    for what, times in found.items():
        middle = statistics.median(times)
        print(
            f"{name}: {what:16s} {middle:.3f} s [{times[0]:.3f}, {times[-1]:.3f}], "
            f"{middle / size:.2f} s/GB",
            flush=True,
        )


def saved(names: list[str]) -> Iterator[tuple[str, PreTrainedModel, float, str]]:
    """Return name, model, gigabytes in float32, and the folder with its checkpoint."""
    for name in names:
        model = build_model() if name == "tiny" else big_model()
        size = sum(tensor.nbytes for tensor in model.state_dict().values()) / 1e9
        print(
            f"{name}: {model.num_parameters() / 1e6:.1f}M parameters, {size:.3f} GB in float32",
            flush=True,
        )
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            yield name, model, size, folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=("tiny", "big"), default=["tiny", "big"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name, model, size, folder in saved(args.models):
        show(name, checksum(model, args.rounds), size)
        for kind in args.kinds:
            with opened(kind, folder, Path(folder) / "log") as engines:
                show(name, seconds(engines, model, args.rounds), size)


if __name__ == "__main__":
    main()
