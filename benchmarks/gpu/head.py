"""Memory and seconds of log-probabilities over a large vocabulary.

8k, 16k and 32k slots of Qwen3's 151,936 tokens, behind one decoder layer of Qwen3-0.6B in
bfloat16: logits whole, logits in chunks (`train.logits_chunk`), and torch's own
`linear_cross_entropy` on the same hidden states. Target: less than 3 GB in chunks, beside the
gradient of the head's weight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gpu.harness import Bench
from gpu.models import dense, make, prepared, samples

from onepolicy.models import chunk_size
from onepolicy.models.buckets import BucketedPacking
from onepolicy.train.forward import SlotLayout, forward
from onepolicy.train.pack import pack

SAMPLE = 1024  # slots of one sample
TARGET_GB = 3.0


def main(bench: Bench) -> None:
    dtype = bench.size(torch.bfloat16, torch.float32)
    config = dense(bench, num_hidden_layers=1)
    chunk = bench.size(chunk_size.slots_per_chunk(None, config.vocab_size), 16)
    model = prepared(make(config, bench, dtype), chunk)
    for slots in bench.size([8192, 16_384, 32_768], [64]):
        few = run_of(model, slots, 1, bench)
        base = bench.measure(few, share=2.0).peak
        cases = {
            "chunks": (run_of(model, slots, slots, bench), chunk),
            "whole": (run_of(model, slots, slots, bench), 0),
        }
        fused = linear_cross_entropy(config, slots, dtype, bench)
        if fused is not None:
            cases["linear_cross_entropy"] = (fused, chunk)
        for name, (run, own) in cases.items():
            case = f"{name}, {slots} slots"
            if not bench.has_time(case, 4):
                continue
            with bench.case(case):
                setattr(model, chunk_size.MARK, own)
                measured = bench.measure(run, share=3.0)
                beside = 0
                if name != "linear_cross_entropy":  # which runs no layer
                    beside = base
                bench.record(
                    case,
                    seconds=measured.seconds,
                    peak_gb=measured.peak / 1e9,
                    beyond_the_layer_gb=(measured.peak - beside) / 1e9,
                    target_gb=TARGET_GB,
                )
                model.zero_grad(set_to_none=True)
        setattr(model, chunk_size.MARK, chunk)


def run_of(model, slots: int, trainable: int, bench: Bench) -> Callable[[], None]:
    """Return a forward and backward, with `trainable` slots' log-probabilities."""
    length = min(SAMPLE, slots)
    batch = pack(samples(model.config.vocab_size, [length + 1] * (slots // length), 1))
    layout = SlotLayout(
        torch.arange(trainable, device=bench.device),
        BucketedPacking.of(batch.cu_seqlens, bench.device),
    )
    batch = batch.to(bench.device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def run() -> None:
        forward(model, batch, layout).logp.sum().backward()

    return run


def linear_cross_entropy(config, slots: int, dtype: torch.dtype, bench: Bench) -> Callable | None:
    """Return torch's own fused call on hidden states of this size, None where torch has none."""
    call = getattr(torch.nn.functional, "linear_cross_entropy", None)
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if call is None or options is None:
        bench.record("linear_cross_entropy", skipped=f"torch {torch.__version__} has none")
        return None
    size, vocabulary = config.hidden_size, config.vocab_size
    hidden = torch.randn(slots, size, device=bench.device, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, size, device=bench.device, dtype=dtype, requires_grad=True)
    target = torch.randint(vocabulary, (slots,), device=bench.device)

    def run() -> None:
        hidden.grad = weight.grad = None
        call(hidden, weight, target, reduction="sum", options=options()).backward()

    return run
