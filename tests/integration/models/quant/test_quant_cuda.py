"""Quantised weights of the embedded engine on a CUDA device: run with `pytest -m gpu`. CI runs none
of these."""

import pytest
import torch

from onepolicy.cli import main
from onepolicy.config import Fp8, Fp8Weight, Int8
from onepolicy.models import decode_experts
from onepolicy.models.quant.formats import (
    check_device,
    e4m3_product,
    e4m3_rows,
    int8_product,
    int8_rows,
)
from onepolicy.models.quant.quantise import check_kernels
from onepolicy.rollout.copies import quantise_policy
from support.gpu import CUDA, need_commands
from support.metrics import rows
from support.models import make

pytestmark = CUDA
FORMATS = [Int8(), Int8(activations="static"), Fp8(), Fp8Weight()]


@pytest.fixture
def cuda():
    return torch.device("cuda")


@pytest.mark.parametrize("quant", FORMATS, ids=str)
def test_the_device_has_the_kernels(quant, cuda):
    check_kernels(quant, cuda)
    check_device(quant, cuda)


@pytest.mark.parametrize("count", [1, 16, 17, 200])
def test_codes_and_products_equal_those_of_the_cpu(count, cuda):
    """int8 is equal to the bit. e4m3 sums agree within 2^-10 of the sum of magnitudes (Hopper keeps
    14 bits of a partial sum)."""
    random = torch.Generator().manual_seed(0)
    x, weight = torch.randn(count, 192, generator=random), torch.randn(64, 192, generator=random)
    (a, scale), (w, w_scale) = int8_rows(x), int8_rows(weight)
    (ga, gscale), (gw, gw_scale) = int8_rows(x.to(cuda)), int8_rows(weight.to(cuda))
    for ours, theirs in ((a, ga), (w, gw), (scale, gscale), (w_scale, gw_scale)):
        assert torch.equal(ours, theirs.cpu())
    assert torch.equal(int8_product(a, w.t()), int8_product(ga, gw.t()).cpu())
    (a, scale), (w, w_scale) = e4m3_rows(x), e4m3_rows(weight)
    (ga, gscale), (gw, gw_scale) = e4m3_rows(x.to(cuda)), e4m3_rows(weight.to(cuda))
    for ours, theirs in ((a, ga), (w, gw)):
        assert torch.equal(ours.view(torch.int8), theirs.view(torch.int8).cpu())
    exact = (a.double() * scale) @ (w.double() * w_scale).T
    sizes = (a.double().abs() * scale) @ (w.double().abs() * w_scale).T
    found = e4m3_product(ga, gscale, gw, gw_scale).cpu().double()
    assert ((found - exact).abs() <= 2**-10 * sizes).all()


MODELS = [(name, quant) for name in ("qwen3_moe", "gpt_oss") for quant in FORMATS]
# 24 rows of deepseek's kv_a_proj are too odd for fp8.
MODELS += [("deepseek_v3", Int8()), ("deepseek_v3", Fp8Weight())]


@pytest.mark.parametrize(("family", "quant"), MODELS, ids=str)
def test_a_quantised_model_equals_that_of_the_cpu(family, quant, cuda):
    ids = torch.arange(2, 42).view(2, 20) % 32
    found = []
    for device in (torch.device("cpu"), cuda):
        model = make(family).to(device)
        quantise_policy(model, quant)
        decode_experts.use_decode_experts(model, device)
        with torch.no_grad():
            logits = model(input_ids=ids.to(device), use_cache=False).logits
        found.append(logits.log_softmax(-1).cpu())
    assert (found[0] - found[1]).abs().mean() < 0.01  # a code on a boundary may round the other way
    torch.testing.assert_close(*found, atol=0.2, rtol=0.05)


@pytest.mark.parametrize("quant", ["int8", "fp8", "fp8-weight"])
def test_a_run_on_the_gpu(recipe, tmp_path, quant):
    need_commands()
    out = tmp_path / "run"
    overrides = ["train.device=cuda", f"rollout.quant={quant}", "correction.preset=tis", "steps=2"]
    assert main(["train", str(recipe), f"out={out}", *overrides]) == 0
    last = rows(out)[-1]
    assert last["train/grad_norm"] > 0
    assert last["mismatch/k3"] < 1e-2
