"""Layers to quantise, and their results in float64."""

from types import SimpleNamespace

import torch

MODULE = SimpleNamespace(has_bias=False, has_gate=False, act_fn=torch.tanh)


def linear(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Linear(40, 24).requires_grad_(False), torch.randn(2, 3, 40)


def dequantised(rows, x):
    codes, scale = rows(x)
    return codes.double() * scale


def reference(up, down, x, index, weights, *, rows, activations):
    """Compute experts by their definition, in float64 over dequantised weights."""

    def seen(values):
        return dequantised(rows, values.float()) if activations else values.double()

    out = torch.zeros(len(x), down.shape[1], dtype=torch.float64)
    for n in range(len(x)):
        for k in range(index.shape[1]):
            e = int(index[n, k])
            inner = torch.tanh(seen(x[n : n + 1]) @ dequantised(rows, up[e]).T)
            out[n] += weights[n, k] * (seen(inner) @ dequantised(rows, down[e]).T)[0]
    return out.float()


def case(tokens):
    torch.manual_seed(1)
    up, down = torch.randn(5, 12, 16), torch.randn(5, 16, 12)
    index = torch.stack([torch.randperm(5)[:2] for _ in range(tokens)])
    return up, down, torch.randn(tokens, 16), index, torch.rand(tokens, 2)
