"""Float32 products that a library replaced for the whole process are found by their effect."""

import logging
from types import SimpleNamespace

import pytest
import torch

from onepolicy.build import components
from onepolicy.build.components import build_engine_for
from onepolicy.config import ModelConfig, UsageError, resolve
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


def test_only_a_trainer_of_float32_on_a_gpu_needs_them(monkeypatch):
    """The check comes after the engine: that is what may have replaced them."""
    calls = []
    monkeypatch.setattr(components, "divide_gpu", lambda spec, *_, **__: spec)
    monkeypatch.setattr(
        components,
        "check_float32_products",
        lambda device, *, needed: calls.append((device.type, needed)),
    )
    tree = {"out": "unused", "steps": 1, "model": {"path": "unused"}, "task": {"kind": "chain"}}
    cases = (
        ("cuda", "model.dtype=float32", ["engine", ("cuda", True)]),
        ("cuda", "model.dtype=bfloat16", ["engine", ("cuda", False)]),
        ("cuda", "train.autocast=bfloat16", ["engine", ("cuda", False)]),
        ("cpu", "model.dtype=float32", ["engine"]),
    )
    for device, setting, expected in cases:
        calls.clear()
        scorer = SimpleNamespace(device=torch.device(device), routers=None)
        given = resolve(tree, [setting]), ModelConfig(path="unused"), 96, scorer
        build_engine_for(*given, lambda spec: calls.append("engine"), trains=True)
        assert calls == expected
