"""A command or its answer as bytes: a JSON header and tensors, in one safetensors message. Nothing is pickled."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from onepolicy.config import TrainingError
from onepolicy.types import RoutingTrace, TokenBatch

HEADER = "header"
ROUTES = ("routing", "routing_native")


@dataclass(frozen=True, slots=True)
class Message:
    header: dict[str, Any]  # JSON
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def encode(self) -> bytes:
        # copies, because safetensors takes no two views of one storage
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in self.tensors.items()}
        return save(tensors, metadata={HEADER: json.dumps(self.header)})

    @classmethod
    def decode(cls, data: bytes) -> Message:
        """TrainingError for bytes that are no message."""
        try:
            tensors = load(data)
            size = int.from_bytes(data[:8], "little")
            return cls(json.loads(json.loads(data[8 : 8 + size])["__metadata__"][HEADER]), tensors)
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise TrainingError(f"a rank sent {len(data)} bytes that are no message: {error}") from error


def batch_message(header: dict[str, Any], batch: TokenBatch) -> Message:
    """The batch and what `header` says besides."""
    tensors: dict[str, Tensor] = {}
    traces: dict[str, Any] = {}
    for each in dataclasses.fields(batch):
        value = getattr(batch, each.name)
        if isinstance(value, RoutingTrace):
            traces[each.name] = {"layers": value.layers, "num_experts": value.num_experts}
            parts = {"ids": value.ids, "valid": value.valid, "weights": value.weights}
            tensors |= {f"{each.name}.{name}": part for name, part in parts.items() if part is not None}
        elif isinstance(value, Tensor):  # what else there is (fingerprints) is the driver's
            tensors[each.name] = value
    return Message(header | {"traces": traces}, tensors)


def batch_of(message: Message) -> TokenBatch:
    values: dict[str, Any] = {name: value for name, value in message.tensors.items() if "." not in name}
    for name, about in message.header["traces"].items():
        values[name] = RoutingTrace(
            message.tensors[f"{name}.ids"],
            message.tensors[f"{name}.valid"],
            tuple(about["layers"]),
            about["num_experts"],
            weights=message.tensors.get(f"{name}.weights"),
        )
    return TokenBatch(**values)
