"""Packed attention and our experts against the stock model, for every family."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CONFIGS, MOE, VOCAB, make

from onepolicy.models.experts import NAME as EXPERTS
from onepolicy.models.load import prepare_for_training
from onepolicy.models.packed_attention import Packing

CPU = torch.device("cpu")
LENGTHS = (20, 7, 31, 12, 3)  # several buckets; longer and shorter than the sliding window of 8


def packed_logits(model, paths):
    bounds = torch.tensor([0, *(len(p) for p in paths)]).cumsum(0).int()
    positions = torch.cat([torch.arange(len(p)) for p in paths])
    return model(
        input_ids=torch.cat(paths)[None],
        position_ids=positions[None],
        use_cache=False,
        packing=Packing.of(bounds, CPU),
    ).logits[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_equals_one_by_one(name):
    model = make(name)
    generator = torch.Generator().manual_seed(1)
    paths = [torch.randint(0, VOCAB, (n,), generator=generator) for n in LENGTHS]
    weights = torch.randn(sum(LENGTHS), VOCAB, generator=generator)
    model.set_attn_implementation("eager")
    alone = torch.cat([model(input_ids=p[None], use_cache=False).logits[0] for p in paths])
    (alone * weights).sum().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    prepare_for_training(model, CPU)
    together = packed_logits(model, paths)
    torch.testing.assert_close(together, alone, atol=2e-6, rtol=1e-5)
    (together * weights).sum().backward()
    for n, p in model.named_parameters():
        if n in expected:
            torch.testing.assert_close(p.grad, expected[n], atol=2e-4, rtol=1e-3, msg=lambda m, n=n: f"{n}: {m}")


def test_attention_without_packing_is_refused():
    model = make("qwen3_moe")
    prepare_for_training(model, CPU)
    with pytest.raises(ValueError, match="packed"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long), use_cache=False)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12))
def test_buckets_hold_every_slot_once(lengths):
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    packing = Packing.of(bounds, CPU)
    slots = torch.cat([b.slots for b in packing.buckets])
    assert sorted(slots.tolist()) == list(range(sum(lengths)))
    for bucket in packing.buckets:
        assert torch.equal(bucket.pad[bucket.places], bucket.slots)
        assert bucket.samples * bucket.width <= 2 * len(bucket.slots)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 40))
def test_experts_equal_the_eager_loop(seed, tokens):
    """Values and gradients of hidden states, routing weights and expert weights; some experts get no token."""
    block = make("qwen3_moe").model.layers[0].mlp.experts
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
        results[implementation] = [out, leaves[0].grad, leaves[1].grad, *(p.grad.clone() for p in block.parameters())]
    for ours, theirs in zip(results[EXPERTS], results["eager"], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MOE)
def test_experts_are_selected_on_this_model_only(name):
    first, second = make(name), make(name)
    before = second.config._experts_implementation
    prepare_for_training(first, CPU)
    assert first.config._experts_implementation == EXPERTS
    assert second.config._experts_implementation == before
