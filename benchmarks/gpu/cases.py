"""The queue: what a user who rents a GPU most needs to know comes first."""

from __future__ import annotations

import gc
import importlib

from gpu import attention, decode, engine, head, invariance, moe, smoke, step, sync
from gpu.lease import Case
from gpu.tests import case_of

GPU_TESTS = "tests/integration/gpu/"
CASES = (
    Case("smoke", smoke.main, 90),
    # What was read to break, in that order (docs/measured.md).
    Case("room", case_of(GPU_TESTS + "test_room.py"), 60),  # B3
    Case("attention kernels", case_of(GPU_TESTS + "test_attention_kernels.py"), 60, alone=False),
    Case("whole steps", case_of(GPU_TESTS + "test_steps.py"), 110, alone=False),
    Case("training step", case_of(GPU_TESTS + "test_training_step.py"), 110, alone=False),
    Case("loading and pushing", case_of(GPU_TESTS + "test_loading.py"), 60, alone=False),
    Case("ranks", case_of(GPU_TESTS + "test_runs.py"), 90, alone=False),
    Case("cuda", case_of("tests/integration/test_cuda.py"), 90, alone=False),
    Case(
        "quantised", case_of("tests/integration/models/quant/test_quant_cuda.py"), 90, alone=False
    ),
    Case("on-policy", case_of("tests/integration/invariant/test_on_policy.py"), 60, alone=False),
    Case(
        "server imports",
        case_of("tests/unit/rollout/vllm/test_server_imports.py", marked=False),
        40,
        alone=False,
    ),
    Case("invariance", invariance.main, 30),
    Case("memory", case_of(GPU_TESTS + "test_memory.py"), 60),  # B6
    Case("moe", moe.main, 60),
    Case("engine", engine.main, 70),
    Case("paged generation", engine.beside_pages, 60),
    Case("step", step.main, 80),
    Case("head", head.main, 40),
    Case("attention", attention.main, 40),
    Case("sync", sync.main, 30),
    Case("decode", decode.main, 60),
    Case("generate compiled", engine.compiled, 90),
    Case("flex", attention.compiled, 40),
)


def preload() -> None:
    """Import what most cases import, once for all of them, without asking for a GPU."""
    for name in (
        "onepolicy.cli",
        "onepolicy.run.train",
        "onepolicy.audit",
        "support.whole_step",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        "hypothesis",
    ):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
