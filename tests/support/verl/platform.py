"""A CPU as verl's platform. verl has none, but its FSDP engine runs on one with gloo.

Imported, this module makes it the platform of the process; VERL_USE_EXTERNAL_MODULES imports it in
the processes of a whole run.
"""

from __future__ import annotations

import types
from contextlib import nullcontext

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from verl.plugin.platform import PlatformBase, PlatformRegistry, set_platform
from verl.utils.flops_counter import FlopsCounter


def _nothing(*args, **kwargs):
    return None


def _no_bytes(*args, **kwargs):
    return 0


DEVICE = types.ModuleType("cpu_device")
DEVICE.__dict__.update(
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), _no_bytes),
    **dict.fromkeys(("memory_allocated", "memory_reserved"), _no_bytes),
    **dict.fromkeys(("empty_cache", "synchronize", "set_device", "ipc_collect"), _nothing),
    **dict.fromkeys(("manual_seed", "manual_seed_all", "reset_peak_memory_stats"), _nothing),
    mem_get_info=lambda *_: (0, 0),
    is_available=lambda: True,
    device_count=lambda: 1,
    current_device=lambda: torch.device("cpu"),
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
)


def _always(value):
    return lambda *_: value


@PlatformRegistry.register(platform="onepolicy_cpu")
class CPUPlatform(PlatformBase):
    device_name = vendor_name = "cpu"
    device_module = DEVICE

    set_device = synchronize = empty_cache = set_allocator_settings = _nothing
    profiler_start = profiler_stop = cudart = _nothing
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    is_available, is_ipc_supported = _always(True), _always(False)
    current_device, device_count = _always(torch.device("cpu")), _always(1)
    get_device_capability, communication_backend_name = _always((None, None)), _always("gloo")
    visible_devices_envvar = _always("CUDA_VISIBLE_DEVICES")
    ray_resource_name, ray_noset_envvars = _always("GPU"), _always([])

    def nvtx_range(self, msg):
        return nullcontext()


def _shard_without_broadcast(init):
    """FSDP1 broadcasts weights on a GPU only."""

    def sharded(self, module, *args, **kwargs):
        init(self, module, *args, **(kwargs | {"sync_module_states": False}))

    return sharded


def _open_gloo_once(init):
    """verl asks for one backend for the CPU and one for its device, which are the same here."""

    def opened(backend=None, *args, **kwargs):
        if backend == "cpu:gloo,cpu:gloo":
            backend = "gloo"
        return init(backend, *args, **kwargs)

    return opened


FlopsCounter.estimate_flops = lambda *args, **kwargs: (0.0, 1.0)  # it knows no CPU
torch.distributed.init_process_group = _open_gloo_once(torch.distributed.init_process_group)
FullyShardedDataParallel.__init__ = _shard_without_broadcast(FullyShardedDataParallel.__init__)
set_platform(CPUPlatform())
