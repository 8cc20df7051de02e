"""How much tensor memory a block of code holds at once."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Peak(TorchDispatchMode):
    """Bytes of tensor storage made inside the block that are alive at once."""

    def __init__(self, given: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.given = {tensor.untyped_storage()._cdata for tensor in given}
        self.alive: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, arguments: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*arguments, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, DTensor):
                tensor = tensor._local_tensor
            if isinstance(tensor, torch.Tensor):
                self._hold(tensor.untyped_storage())
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.alive and key not in self.given:
            self.alive[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, key)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """It has another size than when it was seen last, if it was seen."""
        key = storage._cdata
        if key in self.alive:
            self.now += storage.nbytes() - self.alive[key]
            self.alive[key] = storage.nbytes()
            self.peak = max(self.peak, self.now)
        else:
            self._hold(storage)

    def _drop(self, key: int) -> None:
        self.now -= self.alive.pop(key, 0)
