"""Rotary embeddings on a CPU: `models/few_passes.py` beside transformers' own function.

    python benchmarks/rope.py --rounds 21

Milliseconds of a forward and backward of one layer of the tiny policy, in turn, medians.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import apply_rotary_pos_emb

from onepolicy.models.few_passes import RotaryFunction


def few_passes(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return RotaryFunction.apply(q, cos, sin), RotaryFunction.apply(k, cos, sin)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--slots", type=int, default=6400)
    parser.add_argument("--heads", type=int, nargs=2, default=(4, 2), help="of queries, of keys")
    parser.add_argument("--head-dim", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(1)
    angles = torch.randn(1, args.slots, args.head_dim // 2).repeat(1, 1, 2)
    shapes = [(1, args.slots, heads, args.head_dim) for heads in args.heads]
    q, k = (torch.randn(shape).transpose(1, 2).requires_grad_() for shape in shapes)
    weight = torch.randn_like(q)
    found: dict[str, list[float]] = {"transformers": [], "fewer passes": []}
    for _ in range(args.rounds):
        for turn, taken in zip((apply_rotary_pos_emb, few_passes), found.values(), strict=True):
            start = time.process_time()
            query, key = turn(q, k, angles.cos(), angles.sin())
            ((query * weight).sum() + key.sum()).backward()
            taken.append(1e3 * (time.process_time() - start))
    for name, taken in found.items():
        print(f"{name}: {statistics.median(taken):.2f} ms")


if __name__ == "__main__":
    main()
