"""Packed attention as one call of the flash kernel that exists on CUDA alone.

torch's operators run here with kernels of plain arithmetic (support/cpu_varlen.py), so the call,
the sinks and the gradients are ours and torch's. The kernel itself is for a GPU
(tests/integration/gpu/test_attention_kernels.py).
"""

import copy
from types import SimpleNamespace

import pytest
import torch

from onepolicy.models import decode_attention, flash, packed_attention
from onepolicy.models.buckets import BucketedPacking
from onepolicy.models.prepare import prepare_for_training
from onepolicy.rollout.hf import forward
from onepolicy.rollout.hf.forward import CachedForward
from onepolicy.types import Sampling
from support import cpu_varlen
from support.engine_runs import build, run
from support.models import CONFIGS, VOCAB, make
from support.replay_models import take_grads

CUDA = torch.device("cuda", 0)
LENGTHS = (20, 7, 31, 12, 3)  # longer and shorter than the sliding window of 8


@pytest.fixture
def with_flash(monkeypatch):
    monkeypatch.setattr(packed_attention, "takes_flash", lambda *_: True)
    cpu_varlen.CALLS.clear()
    return cpu_varlen.CALLS


def logits_and_gradients(model, paths, weights):
    bounds = torch.tensor([0, *(len(p) for p in paths)]).cumsum(0).int()
    packing = BucketedPacking.of(bounds, torch.device("cpu"))
    ids, places = torch.cat(paths)[None], torch.cat([torch.arange(len(p)) for p in paths])[None]
    out = model(input_ids=ids, position_ids=places, use_cache=False, packing=packing)
    (out.logits[0] * weights).sum().backward()
    return out.logits[0].detach(), take_grads(model)


@pytest.mark.parametrize("family", CONFIGS)
def test_it_is_the_packed_attention_of_a_cpu(family, monkeypatch):
    model = make(family)
    prepare_for_training(model, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    paths = [torch.randint(0, VOCAB, (n,), generator=generator) for n in LENGTHS]
    weights = torch.randn(sum(LENGTHS), VOCAB, generator=generator)
    expected, expected_grads = logits_and_gradients(model, paths, weights)
    monkeypatch.setattr(packed_attention, "takes_flash", lambda *_: True)
    cpu_varlen.CALLS.clear()
    found, grads = logits_and_gradients(model, paths, weights)
    assert len(cpu_varlen.CALLS) == model.config.num_hidden_layers
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    assert grads.keys() == expected_grads.keys()
    for n, grad in grads.items():
        assert torch.allclose(grad, expected_grads[n], atol=2e-4, rtol=1e-3), n


def attend(lengths, *, heads=4, groups=2, width=16, value=16, dtype=torch.float32, **rest):
    generator = torch.Generator().manual_seed(0)
    slots, bounds = sum(lengths), torch.tensor([0, *lengths]).cumsum(0).int()
    shapes = [(1, heads, slots, width), (1, groups, slots, width), (1, groups, slots, value)]
    query, key, values = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    packing = BucketedPacking.of(bounds, torch.device("cpu"))
    given = (torch.nn.Identity(), query, key, values, None)
    return packed_attention.packed_attention(*given, packing=packing, **rest)[0]


def test_the_kernel_gets_bounds_and_no_padding(with_flash):
    out = attend((5, 2, 9), sliding_window=4)
    assert out.shape == (1, 16, 4, 16)
    ((query, key, bounds_q, bounds_k, longest_q, longest_k, window, used),) = with_flash
    assert (query.shape, key.shape) == ((16, 4, 16), (16, 2, 16))
    assert bounds_q.tolist() == bounds_k.tolist() == [0, 5, 7, 16]
    assert (longest_q, longest_k, window, used) == (9, 9, (3, 0), None)


def test_heads_of_values_are_as_wide_as_those_of_keys(with_flash):
    """Those of DeepSeek have 192 and 128 elements; the kernel takes one width, a multiple of 8."""
    found = attend((5, 2, 9), groups=4, width=20, value=12)
    assert with_flash[0][0].shape == (16, 4, 24)
    assert found.shape == (1, 16, 4, 12)


def test_a_cache_may_have_such_heads_too():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 4, 5, n, generator=generator) for n in (20, 20, 12))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    bounds, stops = torch.tensor([0, 5]).int(), torch.tensor([5]).int()
    how = {"scale": 20**-0.5, "window": None, "sinks": None}
    found = flash.attend_cache(query[0].transpose(0, 1), key, value, bounds, stops, 5, **how)
    torch.testing.assert_close(found.transpose(0, 1), expected[0])


def test_autocast_reaches_the_kernel(with_flash):
    """torch's list of operators that autocast casts does not have it."""
    with torch.autocast("cpu", torch.bfloat16):
        out = attend((5, 2, 9))
    assert with_flash[0][0].dtype == out.dtype == torch.bfloat16


def test_a_sink_takes_its_part_of_the_denominator(with_flash):
    """One slot: its weight is exp(score) / (exp(score) + exp(sink)), by hand."""
    query = torch.full((1, 1, 8), 0.5)
    value, bounds = torch.ones(1, 1, 8), torch.tensor([0, 1]).int()
    sinks = torch.tensor([1.0], requires_grad=True)
    out = flash.attend_spans(query, query, value, bounds, 1, scale=1.0, window=None, sinks=sinks)
    weight = torch.tensor(2.0).exp() / (torch.tensor(2.0).exp() + torch.tensor(1.0).exp())
    torch.testing.assert_close(out, torch.full((1, 1, 8), float(weight)))
    out.sum().backward()
    torch.testing.assert_close(sinks.grad, -8 * (weight * (1 - weight))[None])


def test_the_operators_are_those_that_this_was_written_for():
    """Only the gradient beside sinks calls an operator of torch that is not public."""
    names = [a.name for a in torch.ops.torch_attn._varlen_attn_backward.default._schema.arguments]
    assert names[:6] == ["grad_out", "query", "key", "value", "out", "lse"]
    assert names[6:10] == ["cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert names[10:] == ["is_causal", "rng_state", "scale", "window_size"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shapes_and_dtypes_agree_with_torchs_own_contract(dtype):
    """On the meta device torch checks the call and no kernel runs."""
    query, sinks = torch.empty(16, 8, 64, dtype=dtype, device="meta"), torch.empty(8, device="meta")
    leaves = [query, query[:, :2], query[:, :2, :32], sinks]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    bounds = torch.empty(4, dtype=torch.int32, device="meta")
    out = flash.attend_spans(*leaves[:3], bounds, 9, scale=None, window=128, sinks=leaves[3])
    assert (out.shape, out.dtype) == ((16, 8, 32), dtype)
    out.sum().backward()
    assert all(leaf.grad.shape == leaf.shape for leaf in leaves)
    assert all(leaf.grad.dtype == leaf.dtype for leaf in leaves)


@pytest.fixture
def gpu(monkeypatch):
    """Return a function that gives the GPU a capability."""
    capability = [(9, 0)]

    def become(*version):
        capability[:] = [version]
        flash._has_kernel.cache_clear()

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability[0])
    flash._has_kernel.cache_clear()
    yield become
    flash._has_kernel.cache_clear()


def test_what_the_kernel_cannot_take_goes_the_other_way(gpu):
    for dtype, width, capability, taken in (
        (torch.bfloat16, 128, (9, 0), True),
        (torch.float16, 256, (8, 0), True),
        (torch.bfloat16, 264, (9, 0), False),
        (torch.float32, 128, (9, 0), False),
        (torch.bfloat16, 128, (7, 5), False),
    ):
        gpu(*capability)
        on_gpu = SimpleNamespace(device=CUDA, shape=(1, 4, 16, width), dtype=dtype)
        assert packed_attention.takes_flash(on_gpu, on_gpu) == taken
    assert not packed_attention.takes_flash(torch.zeros(1), torch.zeros(1))


def test_which_models_have_the_kernel(gpu, monkeypatch):
    """It takes heads of at most 256 elements, by whatever name a family has for them. The call of
    an older torch lacks grouped heads, windows or caches."""
    narrow, wide = (copy.deepcopy(CONFIGS["qwen3_moe"]) for _ in range(2))
    wide.global_head_dim = 512
    assert flash.fits_model(narrow, CUDA, torch.bfloat16)
    assert not flash.fits_model(narrow, CUDA, torch.float32)
    assert not flash.fits_model(narrow, torch.device("cpu"), torch.bfloat16)
    assert not flash.fits_model(wide, CUDA, torch.bfloat16)
    gpu(9, 0)
    monkeypatch.setattr(flash, "ARGUMENTS", {"return_aux"})
    assert not flash.fits_model(narrow, CUDA, torch.bfloat16)


def test_the_call_of_torch_2_11_attends_to_samples_and_not_to_caches(gpu, with_flash, monkeypatch):
    """It takes grouped heads unasked, and cannot be told how many keys a row has."""
    monkeypatch.setattr(flash, "ARGUMENTS", {"return_aux", "scale", "window_size"})
    on_gpu = SimpleNamespace(device=CUDA, shape=(1, 4, 16, 128), dtype=torch.bfloat16)
    assert flash.takes(on_gpu, on_gpu)
    assert not flash.takes_cache(on_gpu, on_gpu)
    assert not flash.fits_model(CONFIGS["qwen3_moe"], CUDA, torch.bfloat16)
    seen = []
    monkeypatch.setattr(
        flash, "varlen_attn", lambda *_, **named: seen.append(named) or (_[0], None)
    )
    attend((5, 2, 9))
    assert "enable_gqa" not in seen[0]


def test_float32_heads_are_repeated_where_no_fused_kernel_groups_them(monkeypatch):
    """On CUDA the kernel that does keeps all scores in memory. The result is the same."""
    expected, seen = attend((5, 2, 9)), []
    attention = packed_attention.scaled_dot_product_attention

    def recorded(query, key, value, **rest):
        seen.append((query.shape[1], key.shape[1], value.shape[1], rest["enable_gqa"]))
        return attention(query, key, value, **rest)

    monkeypatch.setattr(packed_attention, "scaled_dot_product_attention", recorded)
    monkeypatch.setattr(packed_attention, "expands_heads", lambda _: True)
    torch.testing.assert_close(attend((5, 2, 9)), expected)
    assert set(seen) == {(4, 4, 4, False)}


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_long_prompts_are_prefilled_by_the_kernel(family, monkeypatch):
    """Prompts of 2 to 50 tokens in pieces of up to 16, which read what earlier pieces cached."""
    monkeypatch.setattr(forward, "MAX_TOKENS", 16)
    lengths = (50, 31, 2, 20, 17)
    generator = torch.Generator().manual_seed(0)
    requests = [
        (torch.randint(2, VOCAB, (n,), generator=generator).tolist(), Sampling(1.0, 6), i)
        for i, n in enumerate(lengths)
    ]
    expected = run(build(family), requests)
    cpu_varlen.CALLS.clear()
    monkeypatch.setattr(decode_attention, "takes_flash", lambda *_, **__: True)
    monkeypatch.setattr(CachedForward, "_most_scores", lambda _: forward.NO_SCORES)
    found = run(build(family), requests)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.token_ids, theirs.token_ids)
        torch.testing.assert_close(ours.logp, theirs.logp, atol=1e-5, rtol=1e-5)
    assert cpu_varlen.CALLS
    for query, _, bounds, starts, longest, keys, _, used in cpu_varlen.CALLS:
        assert longest == int(bounds.diff().max()) <= 16
        assert int(bounds[-1]) == len(query)
        assert int(used.max()) == keys == int(starts[1])
    pieces = {int(call[7].max()) for call in cpu_varlen.CALLS}
    assert {16, 32, 48, 50} <= pieces


def test_a_prompt_of_32k_tokens_is_a_few_forwards():
    spans = [forward.RowSpan(0, 0, 32768)]
    assert len(list(forward.prefill_chunks(spans, forward.NO_SCORES))) == 8
    assert len(list(forward.prefill_chunks(spans))) == 256
