"""Packed attention in training and attention to the KV cache in decoding, beside torch's own.

Training: heads of Qwen3-0.6B in bfloat16, 8 samples of 8k and 64 ragged ones of about 1k, forward
and backward: ours, `varlen_attn`, SDPA on padded rows, flex_attention. Decoding: 256 rows with 1k
and 4k keys: ours, SDPA, `varlen_attn` over pages. No target: the fastest is what ours should take.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gpu.harness import Bench
from gpu.models import ragged
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from onepolicy.models import flash
from onepolicy.models.buckets import BucketedPacking
from onepolicy.models.decode_attention import KVCacheStep, kv_cache_attention
from onepolicy.models.packed_attention import packed_attention
from onepolicy.rollout.hf.kv_cache import KVCache

HEADS, GROUPS, WIDTH = 16, 8, 128
PAGE = 256


def main(bench: Bench) -> None:
    for name, lengths in shapes(bench).items():
        training(name, lengths, TRAINING, bench)
    for keys in bench.size([1024, 4096], [32]):
        decoding(keys, bench)


def compiled(bench: Bench) -> None:
    """A case of its own, at the end of the queue: flex_attention is compiled for each shape."""
    for name, lengths in shapes(bench).items():
        training(name, lengths, {"flex_attention": flex}, bench)


def shapes(bench: Bench) -> dict[str, list[int]]:
    return {
        "8 samples of 8k": bench.size([8192] * 8, [40] * 2),
        "64 ragged samples of 683 to 1366": bench.size(ragged(64, 683), ragged(4, 9)),
    }


def training(shape: str, lengths: list[int], ways: dict[str, Callable], bench: Bench) -> None:
    """Record forward and backward of every implementation."""
    dtype = bench.size(torch.bfloat16, torch.float32)
    slots = sum(lengths)
    torch.manual_seed(0)
    made = [
        torch.randn(slots, heads, WIDTH, device=bench.device, dtype=dtype, requires_grad=True)
        for heads in (HEADS, GROUPS, GROUPS)
    ]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    gradient = torch.randn(slots, HEADS, WIDTH, device=bench.device, dtype=dtype)
    work = sum(2 * 2 * HEADS * WIDTH * n * n / 2 for n in lengths) * 3.5  # backward is 2.5
    for name, build in ways.items():
        case = f"{name}, {shape}"
        if not bench.has_time(case, 5):
            continue
        with bench.case(case):
            attend = build(bounds, lengths, bench)
            if attend is None:
                bench.record(case, skipped=f"not on {bench.device.type}")
                continue

            def run(attend: Callable = attend) -> None:
                attend(*made).backward(gradient)

            measured = bench.measure(run, share=3.0)
            bench.record(
                case,
                seconds=measured.seconds,
                tflops=work / measured.median / 1e12,
                peak_gb=measured.peak / 1e9,
            )


def ours(bounds: Tensor, lengths: list[int], bench: Bench) -> Callable:
    packing = BucketedPacking.of(bounds, bench.device)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        packed = [x.transpose(0, 1)[None] for x in (query, key, value)]
        out, _ = packed_attention(nn.Identity(), *packed, None, packing=packing)
        return out[0]

    return attend


def varlen(bounds: Tensor, lengths: list[int], bench: Bench) -> Callable | None:
    if bench.device.type != "cuda":
        return None
    from torch.nn.attention.varlen import varlen_attn

    starts, longest = bounds.to(bench.device), max(lengths)
    grouped = {"enable_gqa": True} if "enable_gqa" in flash.ARGUMENTS else {}

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return varlen_attn(
            query,
            key,
            value,
            starts,
            starts,
            longest,
            longest,
            window_size=(-1, 0),
            **grouped,
        )

    return attend


def padded(bounds: Tensor, lengths: list[int], bench: Bench) -> Callable:
    inside = pad_sequence([torch.ones(n, dtype=torch.bool) for n in lengths], batch_first=True)
    places = inside.flatten().nonzero()[:, 0].to(bench.device)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = [
            pad_sequence(list(x.split(lengths)), batch_first=True).transpose(1, 2)
            for x in (query, key, value)
        ]
        out = scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1).index_select(0, places)

    return attend


def flex(bounds: Tensor, lengths: list[int], bench: Bench) -> Callable | None:
    if bench.device.type != "cuda":
        return None
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    slots = sum(lengths)
    sample = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(bench.device)

    def seen(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (row >= column) & (sample[row] == sample[column])

    mask = create_block_mask(seen, None, None, slots, slots, device=bench.device)
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = [x.transpose(0, 1)[None] for x in (query, key, value)]
        return compiled(*rows, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    return attend


TRAINING: dict[str, Callable] = {
    "onepolicy": ours,
    "varlen_attn": varlen,
    "SDPA padded": padded,
}


@torch.inference_mode()
def decoding(keys: int, bench: Bench) -> None:
    """Record one layer's attention of a decode step."""
    rows = bench.size(256, 4)
    dtype = bench.size(torch.bfloat16, torch.float32)
    cache = KVCache(rows, keys, device=bench.device, dtype=dtype)
    every = torch.arange(rows, device=bench.device)
    positions = torch.full((rows,), keys - 1, device=bench.device)
    step = KVCacheStep(every, positions, keys, slice(0, rows))
    query = torch.randn(1, HEADS, rows, WIDTH, device=bench.device, dtype=dtype)
    new = torch.randn(1, GROUPS, rows, WIDTH, device=bench.device, dtype=dtype)
    cache.set_step(step)
    cache.update(new, new, 0)
    for tensor in (cache.keys[0], cache.values[0]):
        tensor.normal_()

    def own() -> None:
        key, value = cache.update(new, new, 0)
        kv_cache_attention(nn.Identity(), query, key, value, None, kv_cache_step=step)

    shape = (rows, GROUPS, keys, WIDTH)
    whole = [torch.randn(shape, device=bench.device, dtype=dtype) for _ in range(2)]
    one = query[0].transpose(0, 1)[:, :, None]

    def plain() -> None:
        scaled_dot_product_attention(one, *whole, enable_gqa=True)

    cases: dict[str, Callable | None] = {"onepolicy": own, "SDPA": plain, "pages": None}
    if bench.device.type == "cuda" and "block_table" in flash.ARGUMENTS:
        cases["pages"] = paged(rows, keys, bench)
    read = 2 * rows * GROUPS * keys * WIDTH * dtype.itemsize
    for name, run in cases.items():
        case = f"{name}, decode {rows} rows with {keys} keys"
        if run is None:
            bench.record(case, skipped=f"not on {bench.device.type} with torch {torch.__version__}")
            continue
        with bench.case(case):
            measured = bench.measure(run, share=2.0)
            speed = read / measured.median / 1e9
            bench.record(case, seconds=measured.seconds, gb_per_second=speed)


def paged(rows: int, keys: int, bench: Bench) -> Callable[[], None]:
    """Return `varlen_attn` of one token a row over a pool of pages."""

    def run() -> None:
        from torch.nn.attention.varlen import varlen_attn

        varlen_attn(
            query,
            pool,
            pool,
            starts,
            None,
            1,
            keys,
            enable_gqa=True,
            seqused_k=used,
            block_table=table,
        )

    pages = -(-keys // PAGE)
    like = {"device": bench.device, "dtype": torch.bfloat16}
    query = torch.randn(rows, HEADS, WIDTH, **like)
    pool = torch.randn(rows * pages, PAGE, GROUPS, WIDTH, **like)
    starts = torch.arange(rows + 1, device=bench.device, dtype=torch.int32)
    used = torch.full((rows,), keys, device=bench.device, dtype=torch.int32)
    table = torch.arange(rows * pages, device=bench.device, dtype=torch.int32).view(rows, pages)
    return run
