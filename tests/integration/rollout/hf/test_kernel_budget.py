"""Kernels that a decode step launches on a device without CUDA graphs, counted on meta tensors of
real shapes. A step of the embedded engine takes the time of its launches, whatever the batch is."""

from collections import Counter

import numpy as np
import pytest
import torch
from gpu.shapes import QWEN3_06B, QWEN3_30B
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from onepolicy.models import rms_norm
from onepolicy.replay.routers import bind_routers
from onepolicy.rollout.hf.continuous_batch import ContinuousBatch
from onepolicy.rollout.hf.forward import CachedForward
from onepolicy.rollout.hf.kv_cache import KVCache
from onepolicy.rollout.hf.scheduler import SequenceRequest
from onepolicy.types import Sampling

META = torch.device("meta")
NO_KERNEL = {"_reshape_alias", "_unsafe_view", "alias", "detach", "lift_fresh"}
NO_KERNEL |= {"empty", "empty_like", "empty_strided", "new_empty"}
BUDGET = {"dense": 983, "moe": 2484}
"""Kernels of one decode step of Qwen3-0.6B and Qwen3-30B-A3B, sampler included. They may only go
down."""
SLACK = 0.97  # fewer kernels than this part of the budget: lower it


class Kernels(TorchDispatchMode):
    """Counts of the operators that launch a kernel.

    One that may return a view (`to`, `reshape`) launches a kernel where it returns a copy.
    """

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name not in NO_KERNEL and not (func.is_view and is_view(result, args)):
            self.counts[name] += 1
        return result


def is_view(result, args):
    """Return whether the result has no memory of its own."""
    if not isinstance(result, torch.Tensor):
        return True
    given = {x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor)}
    return result.untyped_storage()._cdata in given


def batch_of(config, rows, length):
    """Return a batch of the embedded engine in which `rows` requests are being decoded."""
    with META:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    rms_norm.use_few_passes(model, fused=True)  # as the engine does on a GPU
    routers = None
    if config.model_type == "qwen3_moe":
        model.set_experts_implementation("grouped_mm")
        routers = bind_routers(model)
    cache = KVCache(rows, length + 64, device=META, dtype=torch.bfloat16)
    batch = ContinuousBatch(CachedForward(model, cache, routers), enable_prefix_caching=True)
    for seed in range(rows):
        request = SequenceRequest(np.zeros(4, np.int64), Sampling(1.0, 2048), seed, future=None)
        batch.rows.assign_row(request)
    batch.rows.length[:] = length - np.arange(rows) % 7
    return batch


@pytest.mark.full
@pytest.mark.parametrize("kind", BUDGET)
def test_kernels_of_a_decode_step(kind):
    config = {"dense": (Qwen3Config, QWEN3_06B), "moe": (Qwen3MoeConfig, QWEN3_30B)}[kind]
    batch = batch_of(config[0](**config[1]), rows=64, length=1024)
    with batch.step_context():
        batch.step(0)
        with Kernels() as kernels:
            batch.step(0)
    found = sum(kernels.counts.values())
    most_common = kernels.counts.most_common(12)
    assert found <= BUDGET[kind], f"{found} kernels, budget {BUDGET[kind]}: {most_common}"
    assert found > SLACK * BUDGET[kind], f"only {found} kernels: lower the budget"


def test_the_counted_step_feeds_every_row(monkeypatch):
    batch = batch_of(Qwen3Config(**{**QWEN3_06B, "num_hidden_layers": 1}), rows=3, length=9)
    real, seen = CachedForward.__call__, []

    def spy(forward, ids, step, logits_at=None):
        seen.append((tuple(ids.shape), step.keys))
        return real(forward, ids, step, logits_at)

    monkeypatch.setattr(CachedForward, "__call__", spy)
    batch.step(0)
    assert seen == [((3,), 10)]
