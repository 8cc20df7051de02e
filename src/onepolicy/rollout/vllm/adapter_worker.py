"""vLLM's CPU worker for a server that loads adapters. `onepolicy engine serve` names it to vLLM."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from onepolicy.rollout.vllm.adapter import cpu_experts


class AdapterCPUWorker(CPUWorker):
    """A worker that keeps the CPU's kernel for experts, which have no adapter."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model with that kernel."""
        with cpu_experts():
            super().load_model(*args, **kwargs)
