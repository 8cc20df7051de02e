"""Float32 products that a library replaced for the whole process are found by their effect."""

import logging

import pytest
import torch

from onepolicy.config import UsageError
from onepolicy.models.product_check import LARGEST_ERROR, check_float32_products, product_errors

CPU = torch.device("cpu")


def as_tf32(tensor):
    """Round to 10 bits of mantissa, as tensor cores read float32."""
    return (tensor.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)


@pytest.fixture
def rough_bmm():
    """Replace aten::bmm in this process, as vLLM's batch-invariant mode does."""
    original = torch.library.Library("aten", "IMPL", "CPU")

    def bmm(left, right):
        left, right = as_tf32(left.contiguous()), as_tf32(right.contiguous())
        return (left.double()[:, :, :, None] * right.double()[:, None]).sum(2).float()

    original.impl("bmm", bmm, "CPU", allow_override=True)
    yield
    original._destroy()


def test_products_of_this_process_are_float32():
    errors = product_errors(CPU)
    assert set(errors) == {"mm", "addmm", "bmm", "matmul", "linear"}
    assert max(errors.values()) < LARGEST_ERROR / 10
    check_float32_products(CPU, needed=True)


def test_a_bmm_of_tf32_accuracy_is_refused(rough_bmm, caplog):
    errors = product_errors(CPU)
    assert 1e-4 < errors["bmm"] < 1e-3
    assert errors["mm"] < LARGEST_ERROR
    with pytest.raises(UsageError, match=r"\(bmm.*VLLM_BATCH_INVARIANT=1.*vllm-server"):
        check_float32_products(CPU, needed=True)
    with caplog.at_level(logging.WARNING):
        check_float32_products(CPU, needed=False)  # a bfloat16 trainer
    assert "batch-invariant" in caplog.text


def test_the_replacement_is_gone_after_the_test_above():
    assert max(product_errors(CPU).values()) < LARGEST_ERROR
