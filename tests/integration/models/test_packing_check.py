"""`op.check_packing`: which layer of a model shares what between packed samples."""

import itertools
import math
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

import onepolicy as op
from onepolicy.models.buckets import BucketedPacking
from onepolicy.models.prepare import prepare_for_training
from onepolicy.models.recurrent import layers
from onepolicy.models.recurrent.layers import RUNNING, Recurrent, operators
from onepolicy.models.recurrent.segments import Row, Segments
from support.models import make
from support.recurrent_models import FAMILIES, hybrid

CPU = torch.device("cpu")


def packed(model):
    """Return a forward as the trainer computes it."""

    def forward(samples):
        bounds = torch.tensor([0, *(len(ids) for ids in samples)]).cumsum(0).int()
        positions = torch.cat([torch.arange(len(ids)) for ids in samples])[None]
        packing = BucketedPacking.of(bounds, CPU)
        arguments = {"position_ids": positions, "use_cache": False, "packing": packing}
        return model(input_ids=torch.cat(samples)[None], **arguments).logits[0]

    return forward


def prepared(family):
    model = hybrid(family)
    prepare_for_training(model, CPU)
    return model


def joined(lengths, sample):
    """Return lengths of which one begins a sample too late: it is joined with the one before."""
    if len(lengths) <= sample:
        return lengths
    both = lengths[sample - 1] + lengths[sample]
    return (*lengths[: sample - 1], both, *lengths[sample + 1 :])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_boundary_that_one_operator_misses_is_named(family, monkeypatch, subtests):
    """The state of a scan or the reach of a convolution, of one sample, in the last such layer."""
    model = prepared(family)
    layer, mixer = [x for x in model.named_modules() if isinstance(x[1], Recurrent)][-1]
    if hasattr(mixer, "A_log"):  # random states fade within a token, those of a trained layer last
        mixer.A_log.data.fill_(-4)
    assert op.check_packing(model, packed(model))
    scans = [name for name in operators(model) if layers.OPERATORS[name] is not layers._not_fused]
    for name, sample in itertools.product(sorted(scans), (1, 3)):
        own = layers.OPERATORS[name]

        def leaking(row, *args, own=own, sample=sample, **arguments):
            if RUNNING.get() is mixer:
                row = Row(Segments(joined(row.segments.lengths, sample), CPU))
            return own(row, *args, **arguments)

        with subtests.test(operator=name, sample=sample), monkeypatch.context() as patched:
            patched.setitem(layers.OPERATORS, name, leaking)
            found = op.check_packing(model, packed(model))
            assert not found
            assert (found.layer, found.samples) == (layer, (sample,))
            assert f"{layer} (samples" in str(found)


def test_transformers_own_operators_leak():
    """Bounds reach a CPU's operators, which ignore them; attention obeys position ids."""
    found = op.check_packing(hybrid("qwen3_5_text"))
    assert (found.layer, found.samples) == ("model.layers.0.linear_attn", (1, 2, 3))
    assert "first in model.layers.0.linear_attn" in str(found)


@pytest.mark.parametrize(
    ("family", "dtype", "layer"),
    [
        ("lfm2", torch.float32, "model.layers.0.conv"),
        ("lfm2", torch.bfloat16, "model.layers.0.conv"),
        ("qwen3_5_text", torch.bfloat16, "model.layers.0.linear_attn"),
    ],
)
def test_a_layer_that_leaks_is_refused_however_little_the_logits_differ(family, dtype, layer):
    """Layers of fresh weights write little: the logits hardly differ."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hybrid(family).config).eval().to(dtype)
    found = op.check_packing(model)
    assert found.difference < found.tolerance
    assert not found
    assert found.layer == layer
    assert f"first in {layer}" in str(found)


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe"])
def test_a_token_that_takes_another_expert_by_rounding_is_no_leak(family):
    """In bfloat16 a token of sample 1 does: its row of one layer's experts is another."""
    model = make(family).to(torch.bfloat16)
    found = op.check_packing(model)
    assert found, str(found)
    assert found.layer == ""
    assert found.difference > 0


def test_attention_that_sees_all_samples_is_named():
    model = make("qwen3_dense")
    assert op.check_packing(model)
    assert "computed as they are alone" in str(op.check_packing(model))

    def sees_all(samples):
        positions = torch.cat([torch.arange(len(ids)) for ids in samples])[None]
        ids = torch.cat(samples)[None]
        return model(ids, attention_mask=torch.ones_like(ids), position_ids=positions).logits[0]

    found = op.check_packing(model, sees_all)
    assert (found.layer, found.samples) == ("model.layers.0.self_attn", (1, 2, 3))


def test_a_forward_of_other_rows_is_refused():
    with pytest.raises(op.UsageError, match=r"forward: .* expected \[70, V\]"):
        op.check_packing(make("qwen3_dense"), lambda samples: torch.zeros(3, 64))


@pytest.mark.parametrize("place", [0, 2, 3])
def test_a_nan_is_named_and_never_equal(place):
    """A NaN compares as no difference where Python's max passes over it."""
    model = make("qwen3_dense")

    def forward(samples, only_packed=True):
        alone = [model(ids[None]).logits[0] for ids in samples]
        if len(samples) > 1 or not only_packed:
            alone[min(place, len(alone) - 1)][0, 5] = math.nan
        return torch.cat(alone)

    for only_packed, nan_in in ((True, "packed"), (False, "alone and packed")):
        found = op.check_packing(model, partial(forward, only_packed=only_packed))
        assert not found
        assert str(found).startswith(f"NaN in the logits of samples {nan_in}")


def test_tokens_that_a_head_rules_out_are_compared_as_equal():
    model = make("qwen3_dense")

    def forward(samples):
        logits = torch.cat([model(ids[None]).logits[0] for ids in samples])
        logits[:, 3] = -math.inf
        return logits

    assert op.check_packing(model, forward)
