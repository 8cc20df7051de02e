"""Commands and answers of ranks as bytes: a JSON header and tensors in one safetensors message.

Nothing is pickled.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import ConfigDict
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from typing_extensions import TypedDict

from onepolicy.config import TrainingError
from onepolicy.sync.messages import validate_message
from onepolicy.types import RouteSpan, RoutingTrace, TokenBatch

HEADER = "header"
TraceField = Literal["routing", "routing_native"]
SLOT_FIELDS = {
    "input_ids": ("int", 1),
    "target_ids": ("int", 1),
    "positions": ("int", 1),
    "segment": ("int", 1),
    "trainable": ("bool", 1),
    "version": ("int", 1),
    "turn": ("int", 1),
    "logp_rollout": ("float", 1),
    "top_ids": ("int", 2),
    "top_logp_rollout": ("float", 2),
    "routers_differing": ("int", 2),
    "gate_mass": ("float", 2),
    "logp_old": ("float", 1),
    "top_logp_old": ("float", 2),
    "trainer_top_ids": ("int", 2),
    "trainer_top_logp": ("float", 2),
    "logp_ref": ("float", 1),
    "value": ("float", 1),
    "value_target": ("float", 1),
    "entropy": ("float", 1),
    "advantage": ("float", 1),
    "weight": ("float", 1),
    "keep": ("bool", 1),
    "loss_weight": ("float", 1),
}
"""Tensors of a TokenBatch with a row per slot: kind of number, and number of axes."""
SAMPLE_FIELDS = {
    "temperature": ("float", 1),
    "outcome": ("float", 1),
    "group": ("int", 1),
    "episode": ("int", 1),
}
"""Tensors of a TokenBatch with an entry per sample."""
REQUIRED = {
    each.name for each in dataclasses.fields(TokenBatch) if each.default is dataclasses.MISSING
} - {"fingerprints"}


@dataclass(frozen=True, slots=True)
class Message:
    """A JSON header and named tensors."""

    header: dict[str, Any]  # JSON
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def encode(self) -> bytes:
        # Copies, because safetensors accepts no two views of one storage.
        tensors = {
            name: tensor.detach().cpu().contiguous().clone()
            for name, tensor in self.tensors.items()
        }
        return save(tensors, metadata={HEADER: json.dumps(self.header)})

    @classmethod
    def decode(cls, data: bytes) -> Message:
        """Read the bytes of `encode`. Raises TrainingError for any other bytes."""
        try:
            tensors = load(data)
            size = int.from_bytes(data[:8], "little")
            header = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][HEADER])
        except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise TrainingError(
                f"a rank sent {len(data)} bytes that are no message: {error}"
            ) from error
        if not isinstance(header, dict):
            raise TrainingError(
                f"a rank sent {len(data)} bytes that are no message: its header is no object"
            )
        return cls(header, tensors)


def batch_message(header: dict[str, Any], batch: TokenBatch) -> Message:
    """Return a message with this header and the batch."""
    tensors: dict[str, Tensor] = {}
    traces: dict[str, Any] = {}
    for each in dataclasses.fields(batch):
        value = getattr(batch, each.name)
        if isinstance(value, RoutingTrace):
            traces[each.name] = {"layers": value.layers, "num_experts": value.num_experts}
            parts = {"ids": value.ids, "valid": value.valid, "weights": value.weights}
            tensors |= {
                f"{each.name}.{name}": part for name, part in parts.items() if part is not None
            }
        elif isinstance(value, Tensor):  # other fields (fingerprints) stay with the driver
            tensors[each.name] = value
    return Message(header | {"traces": traces}, tensors)


class TraceHeader(TypedDict):
    """Header fields of a routing trace, whose tensors are in the same message."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    layers: tuple[int, ...]
    num_experts: int


def batch_from_message(message: Message) -> TokenBatch:
    """Return the batch of a message.

    Raises TrainingError if the message holds no batch, or fields that do not fit together.
    """
    traces = validate_message(
        dict[TraceField, TraceHeader], message.header.get("traces"), "a batch"
    )
    values: dict[str, Any] = {
        name: value for name, value in message.tensors.items() if "." not in name
    }
    for name, about in traces.items():
        values[name] = trace_from_tensors(message.tensors, name, about)
    unknown = values.keys() - {*SLOT_FIELDS, *SAMPLE_FIELDS, *traces, "cu_seqlens"}
    if unknown:
        raise TrainingError(f"a batch is malformed: it has no field {min(unknown)[:80]!r}")
    missing = REQUIRED - values.keys()
    if missing:
        raise TrainingError(f"a batch is malformed: {min(missing)!r} is missing")
    _check_fields(values)
    return TokenBatch(**values)


def trace_from_tensors(
    tensors: Mapping[str, Tensor], name: str, about: TraceHeader, spans: tuple[RouteSpan, ...] = ()
) -> RoutingTrace:
    """Return the routing trace with this name. Raises TrainingError if it is malformed."""
    try:
        return RoutingTrace(
            tensors[f"{name}.ids"],
            tensors[f"{name}.valid"],
            about["layers"],
            about["num_experts"],
            spans,
            tensors.get(f"{name}.weights"),
        )
    except KeyError as error:
        raise TrainingError(f"a routing trace is malformed: no tensor {error}") from None
    except ValueError as error:
        raise TrainingError(f"a routing trace is malformed: {error}") from None


def _check_fields(values: Mapping[str, Any]) -> None:
    """Raise TrainingError if a field has the wrong kind of number, number of axes, or length."""
    slots = values["input_ids"].shape[:1].numel()
    samples = values["cu_seqlens"].shape[:1].numel() - 1
    for name, value in values.items():
        if not _fits(name, value, slots, samples):
            raise TrainingError(
                f"a batch is malformed: {name} does not fit its {slots} slots and {samples} samples"
            )
    bounds = values["cu_seqlens"]
    if samples < 0 or bounds[0] != 0 or bounds[-1] != slots or (bounds.diff() < 0).any():
        raise TrainingError("a batch is malformed: cu_seqlens are not the bounds of its samples")


def _fits(name: str, value: Tensor | RoutingTrace, slots: int, samples: int) -> bool:
    if isinstance(value, RoutingTrace):
        return len(value) == slots
    if name == "cu_seqlens":
        expected = "int", 1, samples + 1
    elif name in SAMPLE_FIELDS:
        expected = (*SAMPLE_FIELDS[name], samples)
    else:
        expected = (*SLOT_FIELDS[name], slots)
    # a tensor without axes has no length
    return value.dim() > 0 and (number_kind(value), value.dim(), len(value)) == expected


def number_kind(tensor: Tensor) -> str:
    """Return "bool", "int" or "float"."""
    if tensor.dtype == torch.bool:
        return "bool"
    if tensor.is_floating_point():
        return "float"
    return "int"
