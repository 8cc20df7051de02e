"""The names of torch that record and replay use although torch does not document them.

Each was tried on every torch of docs/reference/versions.md. They are looked up when this file is
imported, which never fails; `check_private_names` raises where one is missing, and
`recompute.check_checkpoints` where torch no longer calls one.

| name of torch | used for | where it is missing |
|---|---|---|
| `_C._current_graph_task_id` | to tell a recompute from a forward | `bind_routers` raises |
| `utils.checkpoint.CheckpointFunction.forward` | reentrant checkpoints | `bind_routers` raises |
| `utils.checkpoint._checkpoint_without_reentrant_generator`, since 2.15 only a shim around
`_checkpoint_without_reentrant_generator_impl` | the others | `bind_routers` raises |
| `_C.DisableTorchFunction` | to run an on-policy operator past a mode of functions | it is slower |
| `distributed._composable.checkpoint_activation` | composable checkpoints, which import that
generator by name | its checkpoints do not exist either |

Two classes are public since torch 2.6, and were elsewhere before: FSDPModule and DTensor. A torch
that was built without torch.distributed has neither. Nothing is sharded there.

Private names of transformers are not used: a router is recognised by what it holds (layers.py).
"""

from __future__ import annotations

from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint

from onepolicy.config import UsageError

_SHIM = "_checkpoint_without_reentrant_generator"
GENERATOR = f"{_SHIM}_impl"
if not hasattr(checkpoint, GENERATOR):  # before torch 2.15
    GENERATOR = _SHIM
COMPOSABLE = "torch.distributed._composable.checkpoint_activation"

current_graph_task_id: Any = getattr(torch._C, "_current_graph_task_id", None)
"""Return the number of the backward that runs on this thread, -1 outside a backward."""

past_function_modes: Any = getattr(torch._C, "DisableTorchFunction", nullcontext)
"""Return a context in which this thread's modes of torch's functions see no call."""

CHECKPOINT_MODULE: ModuleType = checkpoint
CHECKPOINT_FUNCTION: Any = getattr(checkpoint, "CheckpointFunction", None)
CHECKPOINT_FORWARD: Any = getattr(CHECKPOINT_FUNCTION, "forward", None)
"""The forward of a reentrant checkpoint: (ctx, run function, ...)."""
CHECKPOINT_GENERATOR: Any = getattr(checkpoint, GENERATOR, None)
"""The body of any other checkpoint, a generator function: (run function, ...)."""


def check_private_names() -> None:
    """Raise UsageError if this torch lacks a name without which replay would be wrong in silence.

    A recompute would route natively, and gradients would be those of other experts.
    """
    names = {
        "torch._C._current_graph_task_id": current_graph_task_id,
        "torch.utils.checkpoint.CheckpointFunction.forward": CHECKPOINT_FORWARD,
        f"torch.utils.checkpoint.{GENERATOR}": CHECKPOINT_GENERATOR,
    }
    missing = [name for name, value in names.items() if value is None]
    if missing:
        raise UsageError(
            f"torch {torch.__version__} has no {' and no '.join(missing)}, without which a "
            "recompute would silently use other experts than its forward; install a torch of "
            "docs/reference/versions.md"
        )


def is_fsdp_module(module: nn.Module) -> bool:
    """Return whether FSDP2 manages this module."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def is_dtensor(value: object) -> bool:
    """Return whether this is a tensor that is spread over ranks."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)
