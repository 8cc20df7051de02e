"""The cost of replay in the forward and backward of a Mixture-of-Experts model.

4 of the 48 layers of Qwen3-30B-A3B in bfloat16, 16k slots in samples of 2k. `stock` is
transformers' own forward with grouped_mm and rows of one length; the others are ours: replay off,
the trainer's routes recorded, the rollout's replayed, and both. Targets: replay less than 3% over
off, and no wait of the host inside forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpu.harness import Bench
from gpu.models import make, moe, prepared, samples

from onepolicy.models.buckets import BucketedPacking
from onepolicy.replay.routers import bind_routers
from onepolicy.train.forward import SlotLayout, forward
from onepolicy.train.pack import pack

FEW = 64  # trainable slots of a sample, so that the head costs little


def main(bench: Bench) -> None:
    count, length, layers = bench.size((8, 2048, 4), (2, 80, 2))
    dtype = bench.size(torch.bfloat16, torch.float32)
    config = moe(bench, num_hidden_layers=layers)
    stock = make(config, bench, dtype)
    stock.set_experts_implementation("grouped_mm")
    model = prepared(make(config, bench, dtype), 0)
    routers = bind_routers(model)
    shape = (layers, config.num_experts, config.num_experts_per_tok)
    lengths = [length + 1] * count
    batch = pack(samples(config.vocab_size, lengths, length - FEW + 1, shape))
    slots = batch.trainable.nonzero()[:, 0].to(bench.device)
    layout = SlotLayout(slots, BucketedPacking.of(batch.cu_seqlens, bench.device))
    batch = batch.to(bench.device)
    trace = batch.routing
    rows = batch.input_ids.view(count, length)

    def ours() -> None:
        forward(model, batch, layout).logp.sum().backward()

    def recorded() -> None:
        with routers.record():
            ours()

    def replayed(**options: Any) -> Callable[[], None]:
        def run() -> None:
            with routers.replay(trace, check=False, **options):
                ours()

        return run

    def transformers_own() -> None:
        out = stock(input_ids=rows, use_cache=False, logits_to_keep=FEW).logits
        out.float().logsumexp(-1).sum().backward()

    runs = {
        "stock": transformers_own,
        "off": ours,
        "record": recorded,
        "replay": replayed(),
        "replay and native": replayed(native=True),
        "soft": replayed(soft=0.5),
    }
    with bench.case("forward and backward"):
        found = bench.compare(runs, share=40.0)
        for name, measured in found.items():
            bench.record(
                name,
                seconds=measured.seconds,
                slots_per_second=count * length / measured.median,
                peak_gb=measured.peak / 1e9,
                over_off=measured.median / found["off"].median - 1,
            )
        bench.record("target", replay_over_off=0.03)
    with bench.case("waits"), routers.replay(trace, check=False):
        model.zero_grad()
        bench.record("waits inside forward and backward, replayed", waits=waits(bench, ours))


def waits(bench: Bench, run: Callable[[], None]) -> int:
    """Return the waits of one call inside a replay, whose kernels are loaded already."""
    if bench.device.type != "cuda":
        run()
        return 0
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return 0
