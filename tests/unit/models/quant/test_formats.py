"""Number formats, quantised layers and experts, against hand-computed codes and sums over
dequantised weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onepolicy.models.quant import layers as quant_experts
from onepolicy.models.quant.formats import (
    E4M3,
    E4M3_UNIT,
    e4m3_rows,
    fake_quantise,
    from_e4m3,
    int8_rows,
)
from onepolicy.models.quant.layers import (
    E4M3Experts,
    E4M3Linear,
    Int8Experts,
    Int8Linear,
    QuantEmbedding,
)
from onepolicy.models.quant.quantise import StaticScale, scale_staleness
from support.quantised_layers import MODULE, case, dequantised, linear, reference


def test_int8_codes_by_hand():
    rows = torch.tensor([[127.0, -63.6, 0.5, 1.5, -254.0 / 2], [0.0, 0, 0, 0, 0]])
    codes, scale = int8_rows(rows)
    assert codes.tolist() == [[127, -64, 0, 2, -127], [0, 0, 0, 0, 0]]  # halves go to even
    assert scale[0].tolist() == [1.0]


def test_int4_and_int3_by_hand():
    four = fake_quantise(torch.tensor([[7.0, 2.4, -3.5, 0.4]]), 4)
    assert four.tolist() == [[7.0, 2.0, -4.0, 0.0]]
    assert fake_quantise(torch.tensor([[3.0, 1.2, -1.6]]), 3).tolist() == [[3.0, 1.0, -2.0]]


def test_every_finite_e4m3_code_is_converted_exactly():
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3)
    values = codes.float()
    finite = values.isfinite()
    assert finite.sum() == 254
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(from_e4m3(codes, dtype).float()[finite] * E4M3_UNIT, values[finite])


def test_e4m3_saturates():
    codes, scale = e4m3_rows(torch.tensor([[3.3e38, 1e-30, -3.3e38]]))
    assert codes.float().tolist() == [[448.0, 0.0, -448.0]]
    assert scale.isfinite().all()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20))
def test_errors_are_half_a_step_at_most(values):
    x = torch.tensor([values])
    codes, scale = int8_rows(x)
    assert ((codes * scale - x).abs() <= scale * 0.5001).all()
    codes, scale = e4m3_rows(x)
    assert ((codes.float() * scale - x).abs() <= x.abs() / 16 * 1.001 + scale * 2**-10).all()


def test_int8_linear_multiplies_codes():
    plain, x = linear()
    exact = dequantised(int8_rows, x) @ dequantised(int8_rows, plain.weight).T + plain.bias
    torch.testing.assert_close(Int8Linear(plain, int8_rows)(x), exact.float(), atol=2e-6, rtol=1e-5)


def test_e4m3_linear_equals_scaled_mm():
    plain, x = linear()
    plain.bias.zero_()
    (a, a_scale), (w, w_scale) = e4m3_rows(x.view(6, 40)), e4m3_rows(plain.weight)
    theirs = torch._scaled_mm(a, w.t(), a_scale, w_scale.t(), out_dtype=torch.bfloat16)
    ours = E4M3Linear(plain, activations=True)(x).view(6, 24)
    torch.testing.assert_close(ours, theirs.float(), atol=0, rtol=2**-8)
    alone = E4M3Linear(plain, activations=False)(x)
    torch.testing.assert_close(alone, (x.double() @ dequantised(e4m3_rows, plain.weight).T).float())


def test_embedding_looks_codes_up():
    plain, ids = torch.nn.Embedding(10, 6), torch.tensor([[3, 0], [9, 3]])
    for int8, rows in ((True, int8_rows), (False, e4m3_rows)):
        values = dequantised(rows, plain.weight.detach())[ids].float()
        quantised = QuantEmbedding(plain, int8=int8, dtype=lambda: torch.float32)
        assert torch.equal(quantised(ids), values)


def test_experts_of_codes(monkeypatch):
    up, down, *tokens = case(9)

    def check(own, **how):
        expected = reference(up, down, *tokens, **how)
        torch.testing.assert_close(own(MODULE, *tokens), expected, atol=1e-4, rtol=1e-4)

    for activations in (True, False):
        own = E4M3Experts(up, down, activations=activations)
        check(own, rows=e4m3_rows, activations=activations)
    check(Int8Experts(up, down, (int8_rows, int8_rows)), rows=int8_rows, activations=True)
    monkeypatch.setattr(quant_experts, "BAG_SIZE", 0)
    check(Int8Experts(up, down, (int8_rows, int8_rows)), rows=int8_rows, activations=True)


def test_few_and_many_rows_give_the_same_bits(monkeypatch):
    up, down, *tokens = case(9)
    own = Int8Experts(up, down, (int8_rows, int8_rows))
    few = own(MODULE, *tokens)
    monkeypatch.setattr(quant_experts, "MATMUL_CALL_COST", 0)
    assert torch.equal(few, own(MODULE, *tokens))
    monkeypatch.setattr(quant_experts, "BAG_SIZE", 0)
    assert torch.equal(few, Int8Experts(up, down, (int8_rows, int8_rows))(MODULE, *tokens))


def test_widest_bag_is_exact():
    """Codes at their bounds over as many inputs as bags are used for: every partial sum is a
    float32 integer."""
    width = quant_experts.BAG_WIDTH
    up = torch.ones(1, 4, width)
    own = Int8Experts(up, torch.ones(1, width, 4), (int8_rows, int8_rows))
    assert own.up.bags
    codes = torch.full((1, width), 127, dtype=torch.int8)
    sums = own.up.by_rows(codes, torch.zeros(1, dtype=torch.int64))
    assert sums.tolist() == [[127.0 * 127 * width] * 4]


def test_a_static_scale_is_kept_and_its_clipping_is_counted():
    static = StaticScale()
    static(torch.tensor([[1.0, -12.7], [0.5, 2.0]]))
    static.calibrate(float(static.largest))
    codes, scale = static(torch.tensor([[25.4, 1.0], [0.1, -6.35]]))
    assert codes.tolist() == [[127, 10], [1, -64]]
    assert scale[:, 0].tolist() == pytest.approx([0.1, 0.1])
    expected = {"quant/clipped": 0.25, "quant/drift_mean": 2.0, "quant/drift_max": 2.0}
    assert scale_staleness({"layer": static}) == pytest.approx(expected)
    assert scale_staleness({"layer": static}) == {}
    static(torch.tensor([[254.0]]))
    static.calibrate(25.4)  # what came before counts no more
    static(torch.tensor([[12.7]]))
    expected = {"quant/clipped": 0.0, "quant/drift_mean": 0.5, "quant/drift_max": 0.5}
    assert scale_staleness({"layer": static}) == pytest.approx(expected)
