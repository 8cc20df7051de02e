"""The gated delta rule of the on-policy mode has one result per token, on every path."""

import random

import pytest
import torch
from torch.nn import functional as F

from onepolicy.invariant.delta_rule import delta_rule
from onepolicy.models.decode_attention import KVCacheStep
from onepolicy.models.recurrent import delta_rule as fast
from onepolicy.models.recurrent.segments import Row, Segments
from onepolicy.rollout.hf.forward import RowSpan, _prefill_step
from onepolicy.rollout.hf.kv_cache import KVCache

CPU = torch.device("cpu")
LENGTHS = (37, 90, 1, 16, 67, 48, 5)
SHAPES = {"tiny": (3, 8, 6), "wide": (2, 160, 24)}  # heads, channels of keys and of values


def tokens_of(lengths, shape, dtype=torch.float32, scale=1.0):
    """Return q, k, v, decay and rate of packed samples, each [1, T, H, ..]."""
    (heads, keys, values), total = SHAPES[shape], sum(lengths)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, total, heads, width, generator=generator) for width in (keys, keys, values)
    )
    g, b = (torch.randn(1, total, heads, generator=generator) for _ in range(2))
    return [q.to(dtype), k.to(dtype), v.to(dtype), -F.softplus(scale * g), b.sigmoid().to(dtype)]


def packed(tokens, lengths, row=None):
    row = row or Row(Segments(tuple(lengths), CPU))
    return delta_rule(row, *tokens, use_qk_l2norm_in_kernel=True)[0]


def by_sample(tokens, lengths):
    return list(zip(*(t.split(lengths, 1) for t in tokens), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_samples_have_the_bits_of_samples_alone(shape, dtype):
    tokens = tokens_of(LENGTHS, shape, dtype)
    whole = packed(tokens, LENGTHS)
    alone = [packed(part, [part[0].shape[1]]) for part in by_sample(tokens, LENGTHS)]
    assert torch.equal(whole, torch.cat(alone, 1))
    turned = by_sample(tokens, LENGTHS)[::-1]
    again = packed([torch.cat(parts, 1) for parts in zip(*turned, strict=True)], LENGTHS[::-1])
    assert torch.equal(torch.cat(again.split(LENGTHS[::-1], 1)[::-1], 1), whole)


def fed_by_an_engine(tokens, lengths, *, seed):
    """Return the outputs of a cache's rows, fed in random pieces, many of one token for all."""
    rng, parts = random.Random(seed), by_sample(tokens, lengths)
    cache = KVCache(len(lengths) + 1, 256, device=CPU, dtype=torch.float32)
    fed, outs = [0] * len(lengths), [[] for _ in lengths]
    while any(a < b for a, b in zip(fed, lengths, strict=True)):
        going = [i for i, length in enumerate(lengths) if fed[i] < length]
        started = [i for i in going if fed[i]]
        if started and rng.random() < 0.8:  # decode a token of every row that is running
            widths = dict.fromkeys(started, 1)
            rows, positions = (torch.tensor(x) for x in (started, [fed[i] for i in started]))
            step = KVCacheStep(rows, positions, 1, slice(0, 1))
        else:
            chosen = sorted(rng.sample(going, rng.randint(1, len(going))))
            widths = {i: rng.randint(1, lengths[i] - fed[i]) for i in chosen}
            spans = [RowSpan(i, fed[i], fed[i] + widths[i]) for i in chosen]
            step, _ = _prefill_step(spans, CPU)
        cache.set_step(step)
        pieces = [[t[:, fed[i] : fed[i] + n] for t in parts[i]] for i, n in widths.items()]
        together = [torch.cat(x, 1) for x in zip(*pieces, strict=True)]
        out = packed(together, list(widths.values()), cache.recurrent_row(0))
        for i, piece in zip(widths, out.split(list(widths.values()), 1), strict=True):
            outs[i].append(piece)
            fed[i] += widths[i]
    return torch.cat([torch.cat(pieces, 1) for pieces in outs], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_decoding_and_pieces_of_a_prefill_have_the_bits_of_training(shape, dtype):
    tokens = tokens_of(LENGTHS, shape, dtype)
    for seed in range(3):
        found = fed_by_an_engine(tokens, LENGTHS, seed=seed)
        assert torch.equal(found, packed(tokens, LENGTHS))


def test_the_fast_rule_decodes_other_bits():
    """A control: the recurrence of a decoding engine rounds otherwise than chunks do."""
    tokens = tokens_of((40,), "tiny")
    cache, outs = KVCache(1, 64, device=CPU, dtype=torch.float32), []
    for t in range(40):
        step, _ = _prefill_step([RowSpan(0, t, t + 1)], CPU)
        cache.set_step(step)
        one = [x[:, t : t + 1] for x in tokens]
        outs.append(fast.delta_rule(cache.recurrent_row(0), *one)[0])
    whole = fast.delta_rule(Row(Segments((40,), CPU)), *tokens)[0]
    torch.testing.assert_close(torch.cat(outs, 1), whole, rtol=1e-4, atol=1e-5)
    assert not torch.equal(torch.cat(outs, 1), whole)


def test_values_and_gradients_are_those_of_the_fast_rule():
    generator, results = torch.Generator().manual_seed(1), []
    weight = torch.randn(1, sum(LENGTHS), 3, 6, generator=generator)
    for rule in (fast.delta_rule, delta_rule):
        leaves = [t.requires_grad_() for t in tokens_of(LENGTHS, "tiny")]
        out, _ = rule(Row(Segments(LENGTHS, CPU)), *leaves, use_qk_l2norm_in_kernel=True)
        (out * weight).sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_strong_decay_forgets_without_overflow():
    tokens = tokens_of(LENGTHS, "tiny", scale=40.0)
    out = packed(tokens, LENGTHS)
    assert out.isfinite().all()
    expected = fast.delta_rule(Row(Segments(LENGTHS, CPU)), *tokens, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(out, expected[0], rtol=1e-4, atol=1e-5)


def test_a_gradient_that_nobody_wants_is_not_computed():
    q, *rest = tokens_of((20,), "tiny")
    out = packed([q.requires_grad_(), *rest], (20,))
    (grad,) = torch.autograd.grad(out.sum(), [q])
    assert grad.abs().max() > 0
