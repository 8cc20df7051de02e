"""TEST FIXTURE, no part of onepolicy: lets SGLang 0.5.23's CUDA wheel start on a CPU. start.py puts
it on PYTHONPATH.

Four obstacles are removed. SGLang imports torchvision (which has no build that fits here) and
sgl_kernel (CUDA only) without using them for the models of these tests. Its cache of routes
registers host memory with CUDA on every device. Its adapters ask for pinned memory on every device.
The stubs raise when called. A test that passes here proves nothing about SGLang on a GPU.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

STUBS = ("torchvision", "sgl_kernel")


class Missing:
    """A stub of anything imported: it may be passed around and inspected, not called."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self._name} is a stub of the test fixture")


class StubModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")


class StubLoader(importlib.abc.Loader):
    def create_module(self, spec):
        return StubModule(spec.name)

    def exec_module(self, module):
        pass


def without_registration(module):
    module._cuda_host_register = lambda *args, **kwargs: None


def without_pinned_memory(module):
    """Let torch give ordinary memory to whoever asks for pinned memory."""
    import torch

    def ordinary(make):
        return lambda *args, pin_memory=False, **settings: make(*args, **settings)

    torch.Tensor.pin_memory = lambda tensor, *args: tensor
    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, ordinary(getattr(torch, name)))


PATCHES = {
    "sglang.srt.mem_cache.pool_host.common": without_registration,
    "sglang.srt.lora.layers": without_pinned_memory,
}
"""Module -> what is done once it was imported."""


class PatchLoader(importlib.abc.Loader):
    """A loader that runs the real module, then its patch."""

    def __init__(self, real, patch):
        self._real, self._patch = real, patch

    def create_module(self, spec):
        return self._real.create_module(spec)

    def exec_module(self, module):
        self._real.exec_module(module)
        self._patch(module)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in STUBS:
            return importlib.machinery.ModuleSpec(name, StubLoader(), is_package=True)
        if name in PATCHES:
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
            spec.loader = PatchLoader(spec.loader, PATCHES[name])
            return spec
        return None


_find_spec = importlib.util.find_spec


def find_spec(name, package=None):
    """Return no spec for torchvision: transformers asks this whether it is installed."""
    return None if name.partition(".")[0] in STUBS else _find_spec(name, package)


importlib.util.find_spec = find_spec
sys.meta_path.insert(0, Finder())
