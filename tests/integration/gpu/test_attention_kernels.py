"""Packed attention on a device takes kernels that keep no table of scores."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from onepolicy.models.buckets import BucketedPacking
from onepolicy.models.packed_attention import causal_mask, packed_attention

LONG, SHORT = (4096, 2800, 900), (90, 61, 20)
SHAPES = {
    "grouped": {"heads": 16, "groups": 8, "width": 128},
    "latent": {"heads": 8, "groups": 8, "width": 192, "value": 128},
    "window": {"heads": 16, "groups": 4, "width": 64, "window": 128},
    "sinks": {"heads": 16, "groups": 2, "width": 64, "sinks": True},
    "window and sinks": {"heads": 16, "groups": 2, "width": 64, "window": 128, "sinks": True},
}


class Case:
    """Queries, keys, values and sinks of packed samples, in bfloat16 on a GPU."""

    def __init__(self, device, *, heads, groups, width, value=None, window=None, sinks=False):
        self.device, self.window, self.lengths = device, window, LONG
        dtype = torch.bfloat16
        if device.type == "cpu":
            self.lengths, dtype = SHORT, torch.float32
        torch.manual_seed(0)
        slots, value = sum(self.lengths), value or width
        shapes = [(1, heads, slots, width), (1, groups, slots, width), (1, groups, slots, value)]
        self.inputs = [torch.randn(s, device=device, dtype=dtype) for s in shapes]
        self.sinks = None
        if sinks:
            self.sinks = torch.randn(heads, device=device, dtype=dtype)
            self.inputs.append(self.sinks)
        for each in self.inputs:
            each.requires_grad_()
        self.scores = max(self.lengths) ** 2 * heads * 4  # bytes of a float32 table of one sample
        bounds = torch.tensor([0, *self.lengths]).cumsum(0).int()
        self.packing = BucketedPacking.of(bounds, device)

    def ours(self):
        """Return [T, heads, D]."""
        options = {"packing": self.packing, "sliding_window": self.window, "s_aux": self.sinks}
        out, _ = packed_attention(nn.Identity(), *self.inputs[:3], None, **options)
        return out[0]

    def plain(self):
        """Return [T, heads, D], computed sample by sample in float32."""
        parts = []
        for sample in zip(*(x[0].split(self.lengths, 1) for x in self.inputs[:3]), strict=True):
            query, key, value = (x.float() for x in sample)
            shared = len(query) // len(key)
            key, value = (x.repeat_interleave(shared, 0) for x in (key, value))
            scores = query @ key.mT * query.shape[-1] ** -0.5
            seen = causal_mask(scores.shape[-1], self.window, self.device)
            scores = scores.masked_fill(~seen, -torch.inf)
            if self.sinks is not None:
                sink = self.sinks.float()[:, None, None].expand(*scores.shape[:2], 1)
                scores = torch.cat([scores, sink], -1)
            weights = scores.softmax(-1)[..., : key.shape[1]]
            parts.append((weights @ value).transpose(0, 1))
        return torch.cat(parts)


def fast_kernels(device):
    if device.type == "cpu":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])


def output_and_gradients(compute, case):
    for each in case.inputs:
        each.grad = None
    out = compute()
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(out.shape, generator=generator).to(case.device)
    (out.float() * weights).sum().backward()
    return [out.detach().float(), *(each.grad.float() for each in case.inputs)]


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_without_the_math_kernel(shape, device):
    """And no table of scores is kept: memory grows with a sample's length, not with its square."""
    case = Case(device, **SHAPES[shape])
    with fast_kernels(device):
        found = output_and_gradients(case.ours, case)
    expected = output_and_gradients(case.plain, case)
    for ours, theirs in zip(found, expected, strict=True):
        off = (ours - theirs).norm() / theirs.norm()
        assert off < {"cpu": 1e-5, "cuda": 2e-2}[device.type]
    if device.type == "cpu":
        return
    del found, expected
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with fast_kernels(device):
        output_and_gradients(case.ours, case)
    assert torch.cuda.max_memory_allocated() - before < 0.8 * case.scores
