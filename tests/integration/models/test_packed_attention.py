"""Packed attention and our experts against the stock model, for every family."""

from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, BloomConfig, RwkvConfig
from transformers.models.rwkv import modeling_rwkv

from onepolicy.config import UsageError
from onepolicy.models import experts, linear
from onepolicy.models.buckets import BucketedPacking
from onepolicy.models.experts import NAME as EXPERTS
from onepolicy.models.prepare import prepare_for_training
from support.examples import examples
from support.models import CONFIGS, MOE, VOCAB, make
from support.replay_models import take_grads

CPU = torch.device("cpu")
LENGTHS = (20, 7, 31, 12, 3)  # several buckets; longer and shorter than the sliding window of 8


def packed_logits(model, paths):
    bounds = torch.tensor([0, *(len(p) for p in paths)]).cumsum(0).int()
    ids, places = torch.cat(paths)[None], torch.cat([torch.arange(len(p)) for p in paths])[None]
    packing = BucketedPacking.of(bounds, CPU)
    return model(input_ids=ids, position_ids=places, use_cache=False, packing=packing).logits[0]


@pytest.mark.parametrize("family", CONFIGS)
def test_packed_equals_one_by_one(family):
    model = make(family)
    generator = torch.Generator().manual_seed(1)
    paths = [torch.randint(0, VOCAB, (n,), generator=generator) for n in LENGTHS]
    weights = torch.randn(sum(LENGTHS), VOCAB, generator=generator)
    model.set_attn_implementation("eager")
    alone = torch.cat([model(input_ids=p[None], use_cache=False).logits[0] for p in paths])
    (alone * weights).sum().backward()
    expected = take_grads(model)
    prepare_for_training(model, CPU)
    if family in MOE:
        assert model.config._experts_implementation == EXPERTS
    together = packed_logits(model, paths)
    torch.testing.assert_close(together, alone, atol=2e-6, rtol=1e-5)
    (together * weights).sum().backward()
    found = take_grads(model)
    for n, grad in expected.items():
        assert torch.allclose(found[n], grad, atol=2e-4, rtol=1e-3), n


def test_attention_without_packing_is_refused():
    model = make("qwen3_moe")
    prepare_for_training(model, CPU)
    with pytest.raises(ValueError, match="packed"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long), use_cache=False)


@examples(60)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=12))
def test_buckets_hold_every_slot_once(lengths):
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    packing = BucketedPacking.of(bounds, CPU)
    slots = torch.cat([b.slots for b in packing.buckets])
    assert sorted(slots.tolist()) == list(range(sum(lengths)))
    for bucket in packing.buckets:
        assert torch.equal(bucket.pad[bucket.places], bucket.slots)
        assert bucket.samples * bucket.width <= 2 * len(bucket.slots)


@cache
def experts_block():
    return make("qwen3_moe").model.layers[0].mlp.experts


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10_000), st.integers(1, 60), st.booleans())
def test_experts_equal_the_eager_loop(monkeypatch, seed, tokens, blocks):
    """Compared are values and gradients of hidden states, routing weights and expert weights. Some
    experts get no token."""
    block_size, least = (2, 0) if blocks else (1 << 40, 1 << 40)
    monkeypatch.setattr(experts, "BLOCK", block_size)  # rows are filled up to pairs, or not
    monkeypatch.setattr(linear, "prefers_onednn", lambda: True)
    monkeypatch.setattr(linear, "MIN_MULTIPLICATIONS", least)
    block = experts_block()
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 64, generator=generator)
    index = torch.rand(tokens, 8, generator=generator).topk(2).indices
    weights = torch.rand(tokens, 2, generator=generator)
    out_grad = torch.randn(tokens, 64, generator=generator)
    results = {}
    for implementation in ("eager", EXPERTS):
        block.config._experts_implementation = implementation
        leaves = [hidden.clone().requires_grad_(), weights.clone().requires_grad_()]
        block.zero_grad()
        out = block(leaves[0], index, leaves[1])
        out.backward(out_grad)
        grads = [leaf.grad for leaf in leaves] + [p.grad.clone() for p in block.parameters()]
        results[implementation] = [out, *grads]
    for ours, theirs in zip(results[EXPERTS], results["eager"], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_experts_are_selected_on_this_model_only():
    first, second = make("qwen3_moe"), make("qwen3_moe")
    before = second.config._experts_implementation
    prepare_for_training(first, CPU)
    assert first.config._experts_implementation == EXPERTS
    assert second.config._experts_implementation == before


def test_families_that_cannot_be_packed_are_refused(monkeypatch):
    """They have recurrent state of unknown operators, or a mask that packed attention does not
    use."""
    monkeypatch.setattr(modeling_rwkv, "is_ninja_available", lambda: False)  # it would run ninja
    refused = {
        "recurrent layers": RwkvConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2),
        "attention function": BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
    }
    for words, config in refused.items():
        torch.manual_seed(0)
        with pytest.raises(UsageError, match=words):
            prepare_for_training(AutoModelForCausalLM.from_config(config).eval(), CPU)


def test_autocast_reaches_the_experts():
    block = make("qwen3_moe").model.layers[0].mlp.experts
    block.config._experts_implementation = EXPERTS
    seen = []
    block._apply_gate = lambda x: (seen.append(x.dtype), type(block)._apply_gate(block, x))[1]
    with torch.autocast("cpu", torch.bfloat16):
        block(torch.randn(5, 64), torch.arange(10).view(5, 2) % 8, torch.rand(5, 2))
    assert seen == [torch.bfloat16]


def test_a_head_that_rules_tokens_out_is_trained():
    model = make("qwen3_dense")
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(model.config.vocab_size))
    model.lm_head.bias.data[3:9] = float("-inf")
    prepare_for_training(model, torch.device("cpu"))
    assert model.config._attn_implementation == "onepolicy_packed"
