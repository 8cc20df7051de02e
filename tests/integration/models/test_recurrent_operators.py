"""Packed recurrent operators against their recurrences in float64, token by token."""

import pytest
import torch
from torch.nn import functional as F
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from onepolicy.models.recurrent import layers
from onepolicy.models.recurrent.conv import causal_conv
from onepolicy.models.recurrent.delta_rule import delta_rule
from onepolicy.models.recurrent.mamba import mamba2_scan, mamba_scan
from onepolicy.models.recurrent.segments import Row, Segments, States

CPU = torch.device("cpu")
RAGGED = (37, 90, 1, 5, 67)
ALIGNED = (64, 128, 64)


def row(lengths, states=None):
    return Row(Segments(tuple(lengths), CPU), states)


def delta(row, q, k, v, g, b):
    return delta_rule(row, q, k, v, g, b)[0]


def mamba2(row, x, dt, b, c, a, d, bias):
    return mamba2_scan(row, x, dt, -a[0].exp(), b, c, D=d[0], dt_bias=bias[0])


def mamba(row, x, dt, b, c, z, a, d, bias):
    rest = {"D": d[0], "z": z.mT, "delta_bias": bias[0]}
    return mamba_scan(row, x.mT, dt.mT, -a[0].exp(), b.mT, c.mT, **rest).mT


def conv(row, x, weight, bias):
    return causal_conv(row, x.mT, weight[0], bias[0], "silu").mT


def recurrent_delta(q, k, v, g, b):
    """S = a S + k (b (v - a S k))', o = S q / sqrt(d)."""
    state, outs = q.new_zeros(*k.shape[2:], v.shape[-1]), []
    for t in range(q.shape[1]):
        decay = g[0, t].exp()
        state = state * decay.view(len(state), -1, 1)
        change = b[0, t, :, None] * (v[0, t] - (state * k[0, t, ..., None]).sum(1))
        state = state + k[0, t, ..., None] * change[:, None]
        outs.append((state * q[0, t, ..., None]).sum(1) * q.shape[-1] ** -0.5)
    return torch.stack(outs)[None]


def recurrent_mamba2(x, dt, b, c, a, d, bias):
    heads = x.shape[2] // b.shape[2]
    b, c = (t.repeat_interleave(heads, 2) for t in (b, c))
    return _recurrent_scan(x, F.softplus(dt + bias[0])[..., None], b, c, -a[0].exp(), d[0, :, None])


def recurrent_mamba(x, dt, b, c, z, a, d, bias):
    x, steps, b, c = x[..., None], F.softplus(dt + bias[0])[..., None], b[:, :, None], c[:, :, None]
    return _recurrent_scan(x, steps, b, c, -a[0].exp(), d[0, :, None])[..., 0] * F.silu(z)


def _recurrent_scan(x, steps, b, c, a, skip):
    """h = exp(dt A) h + dt x B', y = h C + D x of x [1, T, H, P] and b, c [1, T, H or 1, N]."""
    state, outs = 0.0, []
    for t in range(x.shape[1]):
        step = steps[0, t][..., None]
        state = (step * a.view(len(a), 1, -1)).exp() * state
        state = state + (step * x[0, t][..., None]) * b[0, t][:, None]
        outs.append((state * c[0, t][:, None]).sum(-1) + skip * x[0, t])
    return torch.stack(outs)[None]


def recurrent_conv(x, weight, bias):
    reach = weight.shape[2] - 1
    padded = F.pad(x, (0, 0, reach, 0))
    taps = [padded[:, j : j + x.shape[1]] * weight[0, :, j] for j in range(reach + 1)]
    return F.silu(sum(taps) + bias[0])


OPERATORS = {  # name: ours, the recurrence, shapes of inputs per token, shapes of parameters
    "delta": (delta, recurrent_delta, [(3, 8), (3, 8), (3, 6), (3,), (3,)], []),
    "kimi": (delta, recurrent_delta, [(3, 8), (3, 8), (3, 6), (3, 8), (3,)], []),
    "mamba2": (mamba2, recurrent_mamba2, [(4, 6), (4,), (2, 8), (2, 8)], [(4,)] * 3),
    "mamba": (mamba, recurrent_mamba, [(6,), (6,), (4,), (4,), (6,)], [(6, 4), (6,), (6,)]),
    "conv": (conv, recurrent_conv, [(6,)], [(6, 4), (6,)]),
}


def inputs(name, tokens):
    """Return the inputs [1, T, ..] of an operator, and its parameters."""
    generator = torch.Generator().manual_seed(0)
    _, _, shapes, parameters = OPERATORS[name]
    tensors = [torch.randn(1, tokens, *shape, generator=generator) for shape in shapes]
    if name in ("delta", "kimi"):  # a decay under 1, a rate within 0 and 1, keys of length 1
        q, k, v, g, b = tensors
        tensors = [q, F.normalize(k, dim=-1), v, -F.softplus(g), b.sigmoid()]
    return tensors, [torch.randn(1, *shape, generator=generator) for shape in parameters]


def by_sample(operator, tensors, parameters, lengths):
    parts = zip(*(t.split(lengths, 1) for t in tensors), strict=True)
    return torch.cat([operator(*part, *parameters) for part in parts], 1)


@pytest.mark.parametrize("name", OPERATORS)
def test_values_and_gradients_are_those_of_the_recurrence(name):
    ours, recurrence, *_ = OPERATORS[name]
    tensors, parameters = inputs(name, sum(RAGGED))
    weight = torch.randn(sum(RAGGED), generator=torch.Generator().manual_seed(1))
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (*tensors, *parameters)]
        cut = leaves[: len(tensors)], leaves[len(tensors) :]
        if dtype == torch.float32:
            out = ours(row(RAGGED), *leaves)
        else:
            out = by_sample(recurrence, *cut, RAGGED)
        (out.flatten(2).sum(-1) * weight).sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    for found, expected in zip(*results, strict=True):
        assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("name", OPERATORS)
def test_samples_alone_have_the_same_bits(name):
    ours, *_ = OPERATORS[name]
    tensors, parameters = inputs(name, sum(ALIGNED))
    alone = by_sample(lambda *x: ours(row([x[0].shape[1]]), *x), tensors, parameters, ALIGNED)
    assert torch.equal(ours(row(ALIGNED), *tensors, *parameters), alone)


@pytest.mark.parametrize("lengths", [ALIGNED, RAGGED])
def test_the_delta_rule_has_the_bits_of_transformers(lengths):
    tensors, _ = inputs("delta", sum(lengths))

    def theirs(q, k, v, g, b):
        rule = qwen3_next.torch_chunk_gated_delta_rule
        return rule(q, k, v, g=g, beta=b, use_qk_l2norm_in_kernel=True)[0]

    found, _ = delta_rule(row(lengths), *tensors, use_qk_l2norm_in_kernel=True)
    assert torch.equal(found, by_sample(theirs, tensors, [], lengths))


@pytest.mark.parametrize("rooms", [2, 5])
@pytest.mark.parametrize("name", OPERATORS)
def test_states_go_on_from_call_to_call(name, rooms):
    """Two rows of an engine are fed in pieces, the last of them token by token, as it decodes."""
    ours, *_ = OPERATORS[name]
    tensors, parameters = inputs(name, 80)
    whole = ours(row((40, 40)), *tensors, *parameters).unflatten(1, (2, 40))
    kept, fed, outs = States({}, 0, rooms, torch.tensor([rooms - 1, 0])), 0, []
    for width in (33, 2, 1, 1, 1, 1, 1):
        tokens = [t.unflatten(1, (2, 40))[:, :, fed : fed + width].flatten(1, 2) for t in tensors]
        out = ours(row((width, width), kept), *tokens, *parameters)
        outs.append(out.unflatten(1, (2, width)))
        fed += width
    assert (torch.cat(outs, 2) - whole).abs().max() <= 1e-5 * whole.abs().max()


def test_16_bits_are_rounded_once():
    (x,), (weight, bias) = inputs("conv", 9)
    x, weight, bias = x.bfloat16(), weight.bfloat16(), bias.bfloat16()
    found = conv(row((9,)), x, weight, bias)
    expected = recurrent_conv(x.double(), weight.double(), bias.double())
    assert (found - expected).abs().max() <= 2**-7 * expected.abs().max()


def test_a_kernel_is_used_only_if_it_can_be_imported_and_takes_the_bounds(
    tmp_path, monkeypatch, caplog
):
    """transformers falls back to an operator without bounds for any other."""
    (tmp_path / "of_another_torch.py").write_text("raise ImportError('undefined symbol')")
    (tmp_path / "older.py").write_text("def scan(x): ...\ndef newer(x, seq_idx=None): ...")
    monkeypatch.syspath_prepend(tmp_path)
    layers._takes.cache_clear()
    assert layers._takes("older.newer", "seq_idx")
    assert not layers._takes("not_installed.scan", "seq_idx")
    assert not caplog.messages
    for name, reason in (
        ("of_another_torch.scan", "cannot be imported (ImportError: undefined symbol)"),
        ("older.lacks", "cannot be imported (AttributeError"),
        ("older.scan", "takes no seq_idx"),
    ):
        assert [layers._takes(name, "seq_idx") for _ in range(2)] == [False, False]
        (said,) = caplog.messages
        assert f"{name} is not used, because it {reason}" in said
        caplog.clear()
