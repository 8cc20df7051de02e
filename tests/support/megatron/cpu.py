"""Megatron-core on a CPU: stand-ins for the few calls into CUDA that its pure torch path makes."""

from __future__ import annotations

import contextlib
import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.torch_norm import WrappedTorchNorm


class NoCudaRandomness:
    """A random state tracker of a machine without CUDA."""

    def get_states(self) -> dict[str, torch.Tensor]:
        return {}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        pass

    @contextlib.contextmanager
    def fork(self, name: str = ""):
        yield


class TorchOnCpu:
    """torch as Megatron's schedules see it: a tensor that they ask of CUDA is on the CPU."""

    def __getattr__(self, name: str):
        return getattr(torch, name)

    def zeros(self, *sizes, device=None, **options) -> torch.Tensor:
        return torch.zeros(*sizes, **options)


def torch_norm(_, config, hidden_size: int, eps: float = 1e-5, **options) -> torch.nn.RMSNorm:
    """Return a norm for sequence parallelism too, which WrappedTorchNorm refuses.

    Its weight has the mark by which Megatron sums a gradient over the tensor-parallel ranks.
    """
    norm = torch.nn.RMSNorm(hidden_size, eps=eps)
    norm.weight.sequence_parallel = config.sequence_parallel
    return norm


def run_on_cpu() -> None:
    """Let Megatron-core of this process build and train models on the CPU."""
    tracker = NoCudaRandomness()
    torch.cuda.current_device = lambda: "cpu"
    for module in (megatron_random, tensor_parallel):
        module.get_cuda_rng_tracker = lambda: tracker
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.zeros(0)
    megatron_random._set_cuda_rng_state = lambda *args, **kwargs: None
    schedules.torch = TorchOnCpu()
    WrappedTorchNorm.__new__ = torch_norm
    moe_utils.te_general_gemm = None  # 0.16.1 defines it with Transformer Engine only


def start(folder: str, rank: int = 0, ranks: int = 1, **sizes: int) -> None:
    """Join a gloo process group and make Megatron's groups (tensor_model_parallel_size=2)."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    torch.set_num_threads(1)
    run_on_cpu()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks
    )
    parallel_state.initialize_model_parallel(**sizes)


def stop() -> None:
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
