"""Constants of this machine's cores for `onepolicy plan --cluster NxCPU`, measured with one thread.

    python benchmarks/hardware.py

Prints JSON for src/onepolicy/plan/hardware.json. Multiplication and memory speed are torch's own;
the efficiencies and overheads are those of our trainer and embedded engine, from two sizes each of
the tiny policy's shape.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import time
from collections.abc import Callable

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive")

import torch
from engine import build_model, engine_runner

from onepolicy.config import HFEngineConfig
from onepolicy.models.prepare import prepare_for_training
from onepolicy.plan.dims import Dims, read_dims
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.train.forward import forward
from onepolicy.train.pack import pack
from onepolicy.types import Group, Sample

COMMAND = "python benchmarks/hardware.py"
ROUNDS = 5
LENGTH, PROMPT, NEW = 100, 26, 75
SAMPLES = (4, 64)  # of the two micro-batches
BATCHES = (8, 96)  # sequences decoded together


def seconds(run: Callable[[], object]) -> float:
    """Return the median, after a warm-up, in CPU seconds of one thread, so that waiting for a core
    does not count."""
    found = []
    for _ in range(ROUNDS + 1):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return statistics.median(found[1:])


def multiplication() -> float:
    x, y = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 2 * 1024**3 / seconds(lambda: x @ y)


def bandwidth() -> float:
    x = torch.randn(2**26)
    out = torch.empty_like(x)
    return 2 * x.nbytes / seconds(lambda: out.copy_(x))


def training(flops: float, dims: Dims) -> tuple[float, float]:
    """Return the efficiency, and seconds per layer and forward, of a forward and backward (three
    forwards)."""
    model = build_model()
    prepare_for_training(model, torch.device("cpu"))
    found = []
    for samples in SAMPLES:
        trainable = torch.ones(LENGTH, dtype=torch.bool)
        whole = Sample(
            tokens=torch.full((LENGTH + 1,), 5, dtype=torch.int32),
            trainable=trainable,
            logp_rollout=torch.zeros(LENGTH),
            version=torch.zeros(LENGTH, dtype=torch.int32),
            turn=torch.zeros(LENGTH, dtype=torch.int32),
            temperature=1.0,
            reward=0.0,
            finish="stop",
            outcome=0.0,
        )
        batch = pack([Group(0, (whole,) * samples)])
        batch = batch.replace(input_ids=torch.randint(3, 32, (samples * LENGTH,)))
        found.append(seconds(lambda batch=batch: forward(model, batch).logp.sum().backward()))
    work = [3 * n * (2 * dims.multiplied * LENGTH + dims.attention_flops(LENGTH)) for n in SAMPLES]
    return line(work, found, flops, 3 * dims.layers)


def decoding(flops: float, dims: Dims) -> tuple[float, float]:
    """Return the efficiency, and seconds per layer and step, of the embedded engine in bfloat16
    with routes recorded."""
    found = []
    for batch in BATCHES:
        prompts = torch.randint(3, 32, (batch, PROMPT))
        config = HFEngineConfig(max_num_seqs=batch)
        engine = HFEngine(
            copy.deepcopy(build_model()), config, return_routes=True, max_len=PROMPT + NEW
        )
        run = engine_runner(engine, prompts, NEW)
        found.append(seconds(run) / NEW)
    work = [
        batch * (2 * dims.multiplied + dims.decode_flops(PROMPT + NEW / 2)) for batch in BATCHES
    ]
    return line(work, found, flops, dims.layers)


def line(work: list[float], found: list[float], flops: float, parts: float) -> tuple[float, float]:
    """Fit a line: the share of `flops` at which more work is done, and the seconds of each of
    `parts` without any."""
    slope = (found[1] - found[0]) / (work[1] - work[0])
    return 1 / (slope * flops), max(0.0, found[0] - slope * work[0]) / parts


def main() -> None:
    torch.set_num_threads(1)
    dims = read_dims(build_model(), "tiny")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (os.cpu_count() or 1)
    flops = multiplication()
    train, launch = training(flops, dims)
    decode, step = decoding(flops, dims)
    values = {
        "memory": (memory, "B", "the machine's memory over its cores"),
        "flops": (flops, "FLOP/s", "float32, 1024 x 1024 times 1024 x 1024"),
        "bandwidth": (bandwidth(), "B/s", "a copy, bytes read and written"),
        "train_efficiency": (
            train,
            "of flops",
            "forward and backward, tiny policy's shape, float32",
        ),
        "train_overhead": (launch, "s per layer and forward", "the same"),
        "prefill_efficiency": (
            decode,
            "of flops",
            "the embedded engine's decode, tiny policy's shape, bfloat16",
        ),
        "decode_overhead": (step, "s per layer and token", "the same"),
    }
    entries = {
        name: {
            "value": float(f"{value:.3g}"),
            "unit": unit,
            "origin": "measured",
            "source": f"`{COMMAND}`: {what}",
        }
        for name, (value, unit, what) in values.items()
    }
    print(json.dumps(entries, indent=2))


if __name__ == "__main__":
    main()
