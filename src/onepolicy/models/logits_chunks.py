"""The logits of a causal LM, a chunk of slots at a time.

A family computes its logits in two parts: the base model makes hidden states, and `forward` of the
causal LM projects them and may scale or cap the logits. The second part is the family's own code
here as well. It is called once for each chunk, with a base model that returns the hidden states of
that chunk. In the backward a chunk is computed again, so that the logits of one chunk exist at a
time.

All of it happens inside one call of the model, so FSDP2 gathers the weights before and after it as
for any other forward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from onepolicy.models.buckets import BucketedPacking
from onepolicy.models.chunk_size import MARK

LOG = logging.getLogger(__name__)
# A family's code whose logits need more of the base model's output than the last hidden states
UNKNOWN_CODE = (AttributeError, TypeError, ValueError, IndexError, KeyError, RuntimeError)

Compute = Callable[[Tensor, slice], tuple[Tensor, ...]]


def install_logits_chunks(model: PreTrainedModel, slots: int) -> None:
    """Mark the model: its logits are computed `slots` slots at a time, if that changes no bit.

    Calls the model once, so every rank of a sharded model must call this. Logs one line if the
    family's code cannot be called in chunks; its logits are then computed whole.
    """
    if _can_chunk(model):
        setattr(model, MARK, slots)
        return
    LOG.warning(
        "train.logits_chunk: the logits of %s cannot be computed in chunks, so those of a "
        "micro-batch's trainable slots are made at once; lower train.tokens_per_micro_batch if "
        "memory runs out",
        type(model).__name__,
    )


@contextmanager
def whole_logits(model: PreTrainedModel) -> Iterator[None]:
    """Compute the model's logits whole inside the context."""
    with _attribute(model, MARK, 0):
        yield


def base_of(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return the part of a causal LM that makes hidden states, None if it is not found."""
    parts = [part for part in model.children() if isinstance(part, PreTrainedModel)]
    if len(parts) == 1:
        return parts[0]
    return None


def map_logits(
    model: PreTrainedModel, slots: Tensor, compute: Compute, chunk: int, **arguments: Any
) -> tuple[Tensor, ...]:
    """Call `compute` on the logits of every chunk of slots, and concatenate its results.

    Args:
        model: a causal LM.
        slots: [n] int64, positions of the single sequence that the model is called with.
        compute: maps logits [m, V] and the chunk's slice of `slots` to tensors of m rows.
        chunk: the largest m.
        arguments: of the model's forward.

    Returns:
        For each tensor of `compute`: the rows of all slots.
    """
    family = _FamilyForward(model)

    def forward(**arguments: Any) -> tuple[Tensor, ...]:
        _, output = family.run_base(arguments, slots[:1])
        assert output is not None, "install_logits_chunks() marks no such model"
        kind, hidden = type(output), output.last_hidden_state[:, slots]

        def compute_chunk(hidden: Tensor, rows: slice) -> tuple[Tensor, ...]:
            return compute(family.project(arguments, kind(last_hidden_state=hidden)), rows)

        call: Callable[..., tuple[Tensor, ...]] = compute_chunk
        if torch.is_grad_enabled():
            call = partial(checkpoint, compute_chunk, use_reentrant=False, preserve_rng_state=False)
        rows = [slice(start, start + chunk) for start in range(0, len(slots), chunk)]
        parts = [call(part, own) for part, own in zip(hidden.split(chunk, 1), rows, strict=True)]
        return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))

    with _attribute(model, "forward", forward):
        return model(**arguments)


class _FamilyForward:
    """The forward of a family's causal LM in its two parts."""

    def __init__(self, model: PreTrainedModel) -> None:
        base = base_of(model)
        assert base is not None, "install_logits_chunks() marks no such model"
        self.base, self._forward = base, model.forward

    def run_base(self, arguments: dict[str, Any], slots: Tensor) -> tuple[Tensor, Any]:
        """Return the logits [n, V] of the slots [n] and the base model's ModelOutput.

        The output is None if the family does not call the base model just once for hidden states.
        """
        outputs: list[Any] = []
        forward = self.base.forward

        def record(*args: Any, **named: Any) -> Any:
            outputs.append(forward(*args, **named))
            return outputs[-1]

        with _attribute(self.base, "forward", record):
            logits = self._forward(**arguments, logits_to_keep=slots).logits[0]
        if len(outputs) != 1 or getattr(outputs[0], "last_hidden_state", None) is None:
            return logits, None
        return logits, outputs[0]

    def project(self, arguments: dict[str, Any], output: Any) -> Tensor:
        """Return the logits [m, V] of a base model's output with hidden states [1, m, H]."""
        with _attribute(self.base, "forward", lambda *_, **__: output):
            logits: Tensor = self._forward(**arguments, logits_to_keep=0).logits[0]  # 0: all
        return logits


@torch.no_grad()
def _can_chunk(model: PreTrainedModel) -> bool:
    """Return whether the logits of a chunk are the bits that the whole forward computes."""
    if base_of(model) is None:
        return False
    family, device = _FamilyForward(model), next(model.parameters()).device
    ids = torch.arange(5, device=device) % model.config.get_text_config().vocab_size
    slots = torch.tensor([1, 3], device=device)

    def forward(**arguments: Any) -> bool:
        logits, output = family.run_base(arguments, slots)
        if output is None:
            return False
        rows = type(output)(last_hidden_state=output.last_hidden_state[:, slots])
        try:
            again = family.project(arguments, rows)
        except UNKNOWN_CODE:
            return False
        return torch.equal(logits, again)

    bounds = torch.tensor([0, len(ids)], dtype=torch.int32, device="cpu")  # read on the host
    packing = BucketedPacking.of(bounds, device)
    with _attribute(model, "forward", forward):
        return model(
            input_ids=ids[None],
            position_ids=torch.arange(len(ids), device=device)[None],
            use_cache=False,
            packing=packing,
        )


@contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of this object inside the context."""
    own = vars(owner)
    missing = object()
    before = own.get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
