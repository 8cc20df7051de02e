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
    max_memory_allocated=_no_bytes,
    max_memory_reserved=_no_bytes,
    memory_allocated=_no_bytes,
    memory_reserved=_no_bytes,
    mem_get_info=lambda *_: (0, 0),
    empty_cache=_nothing,
    synchronize=_nothing,
    set_device=_nothing,
    manual_seed=_nothing,
    manual_seed_all=_nothing,
    ipc_collect=_nothing,
    reset_peak_memory_stats=_nothing,
    is_available=lambda: True,
    device_count=lambda: 1,
    current_device=lambda: torch.device("cpu"),
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
)


@PlatformRegistry.register(platform="onepolicy_cpu")
class CPUPlatform(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = DEVICE

    def is_available(self):
        return True

    def current_device(self):
        return torch.device("cpu")

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg):
        return nullcontext()

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None


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
