"""The tensors of the trainer as an engine takes them: its dtype, before they are gathered or sent.

The trainer holds float32 and most engines bfloat16, so a cast at the source halves what travels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.models.load import DTYPES
from onepolicy.models.lora import merged_tensors
from onepolicy.replay.checks import is_moe
from onepolicy.replay.layers import find_routers

ENGINES_KEEP = ("A_log",)
"""Names of tensors that engines hold in float32 though transformers does not: decays of Mamba."""


def sent_tensors(model: PreTrainedModel, dtype: str | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's tensors, cast to `dtype` where that is narrower. None: as they are.

    Of a model with adapters they are base + adapter. Yielded as they are: routers, biases and
    norms, and everything that the family wants in float32 (`cast_model`). Some engines hold them in
    float32, and they are small. A shard stays a shard.
    """
    tensors: Iterable[tuple[str, Tensor]] = model.state_dict().items()
    if getattr(model, "peft_config", None):
        tensors = merged_tensors(model)
    routers: tuple[str, ...] = ()
    kept = {*(model._keep_in_fp32_modules_strict or ()), *ENGINES_KEEP}
    if dtype is not None and is_moe(model.config):
        routers = tuple(
            f"{router.path.removesuffix('.base_layer')}." for router in find_routers(model)
        )
    for name, tensor in tensors:
        whole = tensor.dim() < 2 or name.startswith(routers) or not kept.isdisjoint(name.split("."))
        if dtype is None or whole:
            yield name, tensor
        elif tensor.is_floating_point() and tensor.itemsize > DTYPES[dtype].itemsize:
            yield name, tensor.to(DTYPES[dtype])
        else:
            yield name, tensor
