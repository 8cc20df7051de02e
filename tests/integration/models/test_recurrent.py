"""Recurrent layers over packed samples, against transformers' own over one sample at a time."""

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from onepolicy.config import UsageError
from onepolicy.models.buckets import BucketedPacking
from onepolicy.models.prepare import prepare_for_training
from onepolicy.models.recurrent.layers import Recurrent
from onepolicy.models.recurrent.segments import Row, Segments
from onepolicy.types import Sampling
from support.engine_runs import engine_of, run
from support.models import VOCAB
from support.recurrent_models import FAMILIES, hybrid
from support.replay_models import take_grads

CPU = torch.device("cpu")
LENGTHS = (70, 5, 1, 33)  # over and under a chunk, and one under every convolution's reach
WHOLE_CHUNKS = (64, 128, 64)


def packed_logits(model, paths):
    bounds = torch.tensor([0, *(len(p) for p in paths)]).cumsum(0).int()
    ids, places = torch.cat(paths)[None], torch.cat([torch.arange(len(p)) for p in paths])[None]
    packing = BucketedPacking.of(bounds, CPU)
    return model(input_ids=ids, position_ids=places, use_cache=False, packing=packing).logits[0]


def samples():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (n,), generator=generator) for n in LENGTHS]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_one_by_one(family):
    model = hybrid(family)
    paths = samples()
    alone = torch.cat([model(input_ids=p[None], use_cache=False).logits[0] for p in paths])
    weights = torch.randn(alone.shape, generator=torch.Generator().manual_seed(2))
    (alone * weights).sum().backward()
    expected = take_grads(model)
    prepare_for_training(model, CPU)
    together = packed_logits(model, paths)
    torch.testing.assert_close(together, alone, atol=5e-5, rtol=0)  # of about 1
    (together * weights).sum().backward()
    for name, grad in take_grads(model).items():
        assert (grad - expected[name]).abs().max() <= 2e-4 * expected[name].abs().max(), name


def row_by_row(x, weight, bias=None):
    """Return F.linear(x, weight, bias), each row rounded alike in any batch."""
    out = (x[..., None, :] * weight).sum(-1)
    if bias is not None:
        out = out + bias
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_recurrent_layers_have_the_bits_of_samples_alone(family, monkeypatch):
    model = hybrid(family)
    prepare_for_training(model, CPU)
    monkeypatch.setattr(F, "linear", row_by_row)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(1, sum(WHOLE_CHUNKS), model.config.hidden_size, generator=generator)
    mixers = [module for module in model.modules() if isinstance(module, Recurrent)]
    assert mixers

    def computed(mixer, tokens, lengths):
        mixer.row = Row(Segments(lengths, CPU))
        return mixer(tokens)

    for mixer in mixers:
        together = computed(mixer, hidden, WHOLE_CHUNKS)
        parts = hidden.split(WHOLE_CHUNKS, 1)
        alone = torch.cat([computed(mixer, part, (part.shape[1],)) for part in parts], 1)
        assert together.std() > 0
        assert torch.equal(together, alone)


def test_recomputed_activations_know_the_samples():
    model = hybrid("qwen3_5_text")
    prepare_for_training(model, CPU)
    paths, grads = samples(), []
    for checkpoint in (False, True):
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        packed_logits(model, paths).sin().sum().backward()
        grads.append(take_grads(model))
    for name, grad in grads[0].items():
        assert torch.equal(grads[1][name], grad), name


def test_a_forward_that_is_not_packed_is_transformers_own():
    model = hybrid("lfm2")
    ids = samples()[0][None]
    layer = model.model.layers[0]
    hidden = model.model.embed_tokens(ids)
    (expected,) = [layer(hidden)]
    prepare_for_training(model, CPU)
    assert type(layer.conv).__name__ == "Lfm2ShortConv"
    assert torch.equal(layer(hidden), expected)


def mamba(dtype=torch.float32):
    """Return a family whose model does not hand its layers what a caller adds."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "mamba", vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8
    )
    config.max_position_embeddings = 128
    return AutoModelForCausalLM.from_config(config).eval().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_family_that_hands_no_bounds_to_its_layers_is_refused_in_any_dtype(dtype):
    """In bfloat16 the shared state moves the logits by less than rounding may."""
    with pytest.raises(UsageError, match=r"MambaForCausalLM does not tell backbone\.layers\.0"):
        prepare_for_training(mamba(dtype), CPU)


def test_an_engine_refuses_a_model_that_returns_its_cache_under_another_name():
    engine = engine_of(mamba(), return_routes=False, max_len=100)
    with pytest.raises(UsageError, match=r"engine\.kind: MambaForCausalLM returns no past_key"):
        run(engine, [(torch.arange(5), Sampling(1.0, 3), 0)])
