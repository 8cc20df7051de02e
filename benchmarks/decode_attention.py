"""Attention of a decode step on a CPU: our sums of rows beside torch's other ways, by length.

    python benchmarks/decode_attention.py --rounds 11

Eight layers of the tiny policy (4 query heads, 2 key heads of 32), float32, one token of each
sequence. "read" is one pass over as many bytes as these keys and values have, which no way can be
faster than. CPU milliseconds of a step of one thread, ways in turn, medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from onepolicy.models.decode_attention import KVCacheStep, table_attention

LAYERS, HEADS, GROUPS, WIDTH, SCALE = 8, 4, 2, 32, 32**-0.5
Way = Callable[[Tensor, Tensor, Tensor, KVCacheStep], Tensor]


def sums_of_rows(q: Tensor, keys: Tensor, values: Tensor, step: KVCacheStep) -> Tensor:
    """Compute what the embedded engine does. keys [V, G, D, length], values [V, G, length, D]."""
    seen = keys[..., : step.keys].transpose(2, 3), values[:, :, : step.keys]
    return table_attention(q, *seen, step, bias=step.bias(None, None), scale=SCALE, sinks=None)


def batched_products(q: Tensor, keys: Tensor, values: Tensor, step: KVCacheStep) -> Tensor:
    of_group = (q * SCALE).view(len(q) * GROUPS, -1, WIDTH)
    scores = torch.bmm(of_group, keys.flatten(0, 1)[..., : step.keys])
    bias = step.bias(None, None)
    if bias is not None:
        scores.view(len(q), HEADS, -1).add_(bias.view(len(q), 1, -1))
    return torch.bmm(scores.softmax(-1), values.flatten(0, 1)[:, : step.keys]).view_as(q)


def fused(q: Tensor, keys: Tensor, values: Tensor, step: KVCacheStep) -> Tensor:
    bias = step.bias(None, None)
    if bias is not None:
        bias = bias.view(len(q), 1, 1, -1)
    seen = keys[..., : step.keys].transpose(2, 3), values[:, :, : step.keys]
    out = F.scaled_dot_product_attention(
        q[:, :, None], *seen, attn_mask=bias, scale=SCALE, enable_gqa=True
    )
    return out[:, :, 0]


def read(q: Tensor, keys: Tensor, values: Tensor, step: KVCacheStep) -> Tensor:
    return sum(x.view(-1)[: x.numel() * step.keys // values.shape[2]].sum() for x in (keys, values))


WAYS: dict[str, Way] = {
    "sums of rows (ours)": sums_of_rows,
    "batched products": batched_products,
    "scaled_dot_product_attention": fused,
    "read": read,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 320, 640, 1088])
    parser.add_argument("--longest", type=int, default=1152, help="positions of a cache row")
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    torch.set_num_threads(1)
    count = args.sequences
    queries = [torch.randn(count, HEADS, WIDTH) for _ in range(LAYERS)]
    keys = [torch.randn(count, GROUPS, WIDTH, args.longest) for _ in range(LAYERS)]
    values = [torch.randn(count, GROUPS, args.longest, WIDTH) for _ in range(LAYERS)]
    with torch.inference_mode():
        for length in args.lengths:
            positions = torch.full((count,), length - 1) - torch.arange(count) % 8
            found: dict[str, list[float]] = {name: [] for name in WAYS}
            for _ in range(args.rounds):
                outs = {}
                for name, way in WAYS.items():
                    step = KVCacheStep(torch.arange(count), positions, length, slice(0, count))
                    start = time.process_time()
                    for layer in zip(queries, keys, values, strict=True):
                        outs[name] = way(*layer, step)
                    found[name].append(1e3 * (time.process_time() - start))
                for name in ("batched products", "scaled_dot_product_attention"):
                    torch.testing.assert_close(outs[name], outs["sums of rows (ours)"])
            medians = (f"{name} {statistics.median(taken):.2f}" for name, taken in found.items())
            print(f"{count} sequences of {length} [ms]: {', '.join(medians)}")


if __name__ == "__main__":
    main()
