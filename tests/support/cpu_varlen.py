"""torch's variable-length attention on a CPU: its own operators, with kernels of plain arithmetic.

Import it once in a process. torch has kernels of these operators for CUDA only; everything around
them, the public function and its autograd formula included, is torch's. Like the flash kernel the
backward is given the output and lse, and makes the softmax's weights again as exp(score - lse).
"""

import inspect

import torch
from torch.nn.attention import varlen

SAYS_GROUPED = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters
"""torch 2.11 takes grouped heads unasked."""
CALLS = []
"""(query, keys, bounds of queries, bounds of keys, longest query, longest keys, window, seqused) of
every forward."""


def spans(bounds_q, bounds_k, used):
    """Yield the slices of queries and of keys of each sequence."""
    for i in range(len(bounds_q) - 1):
        first = int(bounds_k[i])
        keys = int(bounds_k[i + 1]) - first if used is None else int(used[i])
        yield slice(int(bounds_q[i]), int(bounds_q[i + 1])), slice(first, first + keys)


def masked_scores(query, key, scale, window):
    """Return [heads, Q, K] float32. The last query sees the last key."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * scale
    queries, keys = scores.shape[1:]
    last = torch.arange(queries)[:, None] + keys - queries
    left, right = window
    seen = torch.arange(keys) <= last + right
    if left >= 0:
        seen &= torch.arange(keys) >= last - left
    return scores.masked_fill(~seen, -torch.inf)


def check(query, key, value, bounds_q, bounds_k, longest_q, longest_k):
    """Raise AssertionError for what the kernel on CUDA would refuse or read beyond."""
    width = query.shape[-1]
    assert width == key.shape[-1] == value.shape[-1]
    assert width in range(8, 257, 8)
    assert query.dtype == key.dtype == value.dtype
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    assert bounds_q.dtype == bounds_k.dtype == torch.int32
    assert all(bounds.is_contiguous() for bounds in (bounds_q, bounds_k))
    assert (int(bounds_q[0]), int(bounds_q[-1])) == (0, len(query))
    assert (bounds_q.diff() <= longest_q).all()
    assert longest_k >= 1


@varlen._varlen_attn.register_kernel("cpu")
def forward(
    query,
    key,
    value,
    bounds_q,
    bounds_k,
    longest_q,
    longest_k,
    is_causal=False,
    scale=None,
    window_size=None,
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    check(query, key, value, bounds_q, bounds_k, longest_q, longest_k)
    assert enable_gqa or query.shape[1] == key.shape[1] or not SAYS_GROUPED
    assert is_causal == (tuple(window_size) == (-1, 0))
    assert block_table is None
    CALLS.append(
        (query, key, bounds_q, bounds_k, longest_q, longest_k, tuple(window_size), seqused_k)
    )
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[1], len(query))
    for queries, keys in spans(bounds_q, bounds_k, seqused_k):
        assert keys.stop <= len(key)
        assert keys.stop - keys.start <= longest_k
        scores = masked_scores(query[queries], key[keys], scale, window_size)
        lse[:, queries] = scores.logsumexp(-1)
        groups = query.shape[1] // key.shape[1]
        values = value[keys].repeat_interleave(groups, 1).float()
        out[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(out.dtype)
    return out, lse, torch.zeros(2, dtype=torch.uint64)


@varlen._varlen_attn_backward.register_kernel("cpu")
def backward(
    grad_out,
    query,
    key,
    value,
    out,
    lse,
    bounds_q,
    bounds_k,
    longest_q,
    longest_k,
    is_causal,
    rng_state,
    scale=None,
    window_size=None,
):
    check(query, key, value, bounds_q, bounds_k, longest_q, longest_k)
    assert is_causal == (tuple(window_size) == (-1, 0))
    groups = query.shape[1] // key.shape[1]
    grads = [torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)]
    for queries, keys in spans(bounds_q, bounds_k, None):
        scores = masked_scores(query[queries], key[keys], scale, window_size)
        weights = torch.exp(scores - lse[:, queries, None])
        grad, values = grad_out[queries].float(), value[keys].repeat_interleave(groups, 1).float()
        moved = torch.einsum("qhd,qhd->hq", grad, out[queries].float())
        of_scores = weights * (torch.einsum("qhd,khd->hqk", grad, values) - moved[..., None])
        wide = key[keys].repeat_interleave(groups, 1).float()
        grads[0][queries] = torch.einsum("hqk,khd->qhd", of_scores, wide) * scale
        by_head = torch.einsum("hqk,qhd->khd", of_scores, query[queries].float()) * scale
        grads[1][keys] = by_head.unflatten(1, (-1, groups)).sum(2)
        by_head = torch.einsum("hqk,qhd->khd", weights, grad)
        grads[2][keys] = by_head.unflatten(1, (-1, groups)).sum(2)
    return tuple(grad.to(x.dtype) for grad, x in zip(grads, (query, key, value), strict=True))
