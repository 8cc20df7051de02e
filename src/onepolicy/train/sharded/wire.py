"""A command or its answer as bytes: a JSON header and tensors, in one safetensors message. Nothing is pickled."""

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
Routes = Literal["routing", "routing_native"]
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
"""A TokenBatch's tensors with a row per slot: numbers and axes."""
SAMPLE_FIELDS = {
    "temperature": ("float", 1),
    "outcome": ("float", 1),
    "group": ("int", 1),
    "episode": ("int", 1),
}
REQUIRED = {
    each.name for each in dataclasses.fields(TokenBatch) if each.default is dataclasses.MISSING
} - {"fingerprints"}


@dataclass(frozen=True, slots=True)
class Message:
    header: dict[str, Any]  # JSON
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def encode(self) -> bytes:
        # copies, because safetensors takes no two views of one storage
        tensors = {
            name: tensor.detach().cpu().contiguous().clone()
            for name, tensor in self.tensors.items()
        }
        return save(tensors, metadata={HEADER: json.dumps(self.header)})

    @classmethod
    def decode(cls, data: bytes) -> Message:
        """TrainingError for bytes that are no message."""
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
    """The batch and what `header` says besides."""
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
        elif isinstance(value, Tensor):  # what else there is (fingerprints) is the driver's
            tensors[each.name] = value
    return Message(header | {"traces": traces}, tensors)


class TraceHeader(TypedDict):
    """What a message's header says of a routing trace beside its tensors."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    layers: tuple[int, ...]
    num_experts: int


def batch_from_message(message: Message) -> TokenBatch:
    """TrainingError if the message holds no batch, or fields that do not belong together."""
    traces = validate_message(dict[Routes, TraceHeader], message.header.get("traces"), "a batch")
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
    """The trace in these tensors, under this name. TrainingError if they are none."""
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
    """TrainingError if a field has another kind of numbers or another length than the batch's."""
    slots = values["input_ids"].shape[:1].numel()
    samples = values["cu_seqlens"].shape[:1].numel() - 1
    for name, value in values.items():
        if isinstance(value, RoutingTrace):
            right, expected = len(value) == slots, slots
        else:
            kind, dims = {**SLOT_FIELDS, **SAMPLE_FIELDS, "cu_seqlens": ("int", 1)}[name]
            expected = {"cu_seqlens": samples + 1}.get(
                name, samples if name in SAMPLE_FIELDS else slots
            )
            right = kind == number_kind(value) and value.dim() == dims and len(value) == expected
        if not right:
            raise TrainingError(
                f"a batch is malformed: {name} does not fit its {slots} slots and {samples} samples"
            )
    bounds = values["cu_seqlens"]
    if samples < 0 or bounds[0] != 0 or bounds[-1] != slots or (bounds.diff() < 0).any():
        raise TrainingError("a batch is malformed: cu_seqlens are not the bounds of its samples")


def number_kind(tensor: Tensor) -> str:
    """bool, int or float"""
    if tensor.dtype == torch.bool:
        return "bool"
    return "float" if tensor.is_floating_point() else "int"
