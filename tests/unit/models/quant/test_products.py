"""Products for GPUs: on the CPU where it has the same operators, else only their shapes and
devices."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from onepolicy.config import Fp8, Fp8Weight, Int8, UsageError
from onepolicy.models.quant import layers as quant_experts
from onepolicy.models.quant.formats import (
    MIN_INT_MM_ROWS,
    check_device,
    check_shape,
    e4m3_product,
    e4m3_rows,
    int8_rows,
    padded_int8_product,
)
from onepolicy.models.quant.layers import (
    E4M3CodedExperts,
    E4M3Linear,
    ExpertRows,
    Int8Experts,
    Int8Linear,
    QuantEmbedding,
)
from onepolicy.models.quant.quantise import StaticScale
from support.quantised_layers import MODULE, case, dequantised, linear, reference

CUDA = torch.device("cuda")


def test_rows_of_zeros_change_nothing():
    for rows in (1, MIN_INT_MM_ROWS - 1):
        codes = torch.randint(-127, 128, (rows, 40), dtype=torch.int8)
        weight = torch.randint(-127, 128, (40, 24), dtype=torch.int8)
        assert torch.equal(padded_int8_product(codes, weight), codes.int() @ weight.int())


def test_e4m3_product_is_one_of_float32():
    plain, x = linear()
    x, weight = x.view(6, 40), plain.weight
    exact = dequantised(e4m3_rows, x) @ dequantised(e4m3_rows, weight).T
    found = e4m3_product(*e4m3_rows(x), *e4m3_rows(weight))
    torch.testing.assert_close(found, exact.float(), rtol=1e-5, atol=1e-6)


def test_experts_one_by_one():
    """The routing is uneven: some experts have no row."""
    up, down, x, index, weights = case(9)
    index = index.where(index != 3, 4).sort(1).values
    index[:, 1] = (index[:, 0] + 1) % 3
    for activations in (True, False):
        how = {"rows": e4m3_rows, "activations": activations}
        own = E4M3CodedExperts(up, down, activations=activations)
        expected = reference(up, down, x, index, weights, **how)
        torch.testing.assert_close(own(MODULE, x, index, weights), expected, atol=1e-4, rtol=1e-4)
        own.up.set_weight(up * 2)  # a sync
        assert not torch.allclose(own(MODULE, x, index, weights), expected, rtol=0.1)


def test_int8_experts_with_too_few_rows_for_a_gpu(monkeypatch):
    up, down, x, index, weights = case(9)
    monkeypatch.setattr(quant_experts, "BAG_SIZE", 0)
    own = Int8Experts(up, down, (int8_rows, int8_rows))
    expected = own(MODULE, x, index, weights)
    rows, (codes, scale) = ExpertRows.of(index, weights, 5, sort=True), int8_rows(x)
    padded = [
        padded_int8_product(part, matrix) if len(part) else part.new_zeros(0, 12)
        for part, matrix in zip(codes[rows.token].split(rows.counts), own.up._matrices, strict=True)
    ]
    product = torch.cat(padded) * scale[rows.token] * own.up.scale[rows.expert]
    inner = torch.tanh(product)
    assert torch.equal(rows.sum(own.down(*int8_rows(inner), rows)), expected)


def looks(tensor):
    return tensor.device.type, tensor.dtype, tuple(tensor.shape)


def test_a_gpu_takes_the_arguments_of_an_e4m3_product():
    """No GPU is needed: torch checks layouts, scales and multiples for fake tensors of one."""
    for rows in (1, 40):
        with FakeTensorMode(), CUDA:
            weight = e4m3_rows(torch.empty(32, 64))
            found = e4m3_product(*e4m3_rows(torch.empty(rows, 64)), *weight)
        assert looks(found) == ("cuda", torch.float32, (rows, 32))


def test_layers_on_another_device_make_nothing_on_the_cpu():
    """`meta` represents a GPU: any device but the CPU takes the GPU's path, and mixing the two is
    an error."""
    with torch.device("meta"):
        plain, x = nn.Linear(64, 32), torch.empty(3, 64, dtype=torch.bfloat16)
        calibrated = StaticScale()
        calibrated.calibrate(3.0)
        calibrated.scale = torch.tensor(1.0, device="cpu")  # read from calibration.json
        layers = [Int8Linear(plain, int8_rows), Int8Linear(plain, calibrated)]
        layers += [E4M3Linear(plain, activations=activations) for activations in (True, False)]
        for layer in layers:
            assert looks(layer(x)) == ("meta", torch.bfloat16, (3, 32))
        assert calibrated.largest.device.type == calibrated.scale.device.type == "meta"
        for int8 in (True, False):
            own = QuantEmbedding(nn.Embedding(10, 8), int8=int8, dtype=lambda: torch.bfloat16)
            found = own(torch.arange(3))
            assert (found.device.type, tuple(found.shape)) == ("meta", (3, 8))


def test_experts_on_another_device_make_nothing_on_the_cpu(monkeypatch):
    """`meta` tensors do not know how many rows an expert has: 3."""
    of = ExpertRows.of

    def even(index, weights, num_experts, *, sort):
        assert sort  # bags are the CPU's
        rows = of(index, weights, num_experts, sort=False)
        order, counts = torch.empty_like(index), [3] * num_experts
        return ExpertRows(rows.token, rows.expert, rows.weight, counts, order, rows.top_k)

    monkeypatch.setattr(ExpertRows, "of", even)
    with torch.device("meta"):
        up, down = torch.empty(4, 32, 16), torch.empty(4, 16, 32)
        index = torch.empty(6, 2, dtype=torch.int64)
        weights = torch.empty(6, 2, dtype=torch.bfloat16)
        for own in (
            Int8Experts(up, down, (int8_rows, int8_rows)),
            E4M3CodedExperts(up, down, activations=True),
            E4M3CodedExperts(up, down, activations=False),
        ):
            out = own(MODULE, torch.empty(6, 16, dtype=torch.bfloat16), index, weights)
            assert looks(out) == ("meta", torch.bfloat16, (6, 16))


def test_a_gpu_without_the_tensor_cores_is_refused(monkeypatch):
    for quant, capability, needed in ((Fp8(), (8, 6), "8.9"), (Int8(), (7, 0), "7.5")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, own=capability: own)
        this = r"\.".join(map(str, capability))
        message = rf"{quant.format} needs .* {needed}, this one has {this}"
        with pytest.raises(UsageError, match=message):
            check_device(quant, CUDA)


def test_sides_a_gpu_cannot_multiply_are_refused():
    odd = torch.empty(24, 40, device="meta")
    check_shape(Fp8(), "layer", odd)
    with FakeTensorMode():
        odd = torch.empty(24, 40, device=CUDA)
        check_shape(Int8(), "layer", odd)
        check_shape(Fp8Weight(), "layer", odd)
        with pytest.raises(
            UsageError, match=r"of 16, but model\.q_proj is 24 x 40; use fp8-weight"
        ):
            check_shape(Fp8(), "model.q_proj", odd)
        with pytest.raises(UsageError, match=r"of 8, but model\.q_proj is 8 x 24 x 41"):
            check_shape(Int8(), "model.q_proj", torch.empty(8, 24, 41, device=CUDA))
