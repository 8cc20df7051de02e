"""One linear layer in torchao's int8 and in ours: microseconds a call, and the distances between
them and float32.

pip install --no-deps --target AO torchao==0.18.0
PYTHONPATH=AO python benchmarks/quant_torchao.py
"""

from __future__ import annotations

import copy
import time

import torch
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

from onepolicy.models.quant.formats import int8_rows
from onepolicy.models.quant.layers import Int8Linear

ROWS, SIZES, CALLS = 64, (128, 512), 300


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(
        "| size | float32, us | torchao, us | ours, "
        "us | torchao - float32 | ours - float32 | ours - torchao |"
    )
    print("|" + " --- |" * 7)
    for size in SIZES:
        plain, x = torch.nn.Linear(size, size, bias=False), torch.randn(ROWS, size)
        theirs = torch.nn.Sequential(copy.deepcopy(plain))
        quantize_(theirs, Int8DynamicActivationInt8WeightConfig())
        layers = (plain, theirs, Int8Linear(plain, int8_rows))
        exact, ao, own = (layer(x) for layer in layers)
        times = (f"{best(layer, x):.0f}" for layer in layers)
        gaps = (
            f"{float((a - b).abs().max()):.2g}" for a, b in ((ao, exact), (own, exact), (own, ao))
        )
        print(f"| {size} | " + " | ".join((*times, *gaps)) + " |")


def best(layer: torch.nn.Module, x: torch.Tensor) -> float:
    """Return microseconds, the best of 5 rounds."""
    found = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(CALLS):
            layer(x)
        found.append((time.perf_counter() - start) / CALLS * 1e6)
    return min(found)


if __name__ == "__main__":
    main()
