"""Messages as bytes: a JSON header and tensors in one safetensors message.

Nothing is pickled. A checksum finds bytes that were changed on the way. All ranks run the same
release, so what a message holds is not checked again.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ConfigDict
from safetensors.torch import load, save
from torch import Tensor
from typing_extensions import TypedDict

from onepolicy.config import TrainingError
from onepolicy.support.trace import SupportTrace
from onepolicy.types import RouteSpan, RoutingTrace, TokenBatch

HEADER = "header"
CHECKSUM_BYTES = 4


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
        body = save(tensors, metadata={HEADER: json.dumps(self.header)})
        return body + _checksum(body)

    @classmethod
    def decode(cls, data: bytes, sender: str = "another process") -> Message:
        """Read the bytes of `encode`. Raises TrainingError, which names the sender, for others."""
        body = data[:-CHECKSUM_BYTES]
        if data[-CHECKSUM_BYTES:] != _checksum(body):
            raise TrainingError(
                f"{sender} sent {len(data)} bytes that are no message, or were changed on the way"
            )
        size = int.from_bytes(body[:8], "little")
        header = json.loads(json.loads(body[8 : 8 + size])["__metadata__"][HEADER])
        return cls(header, load(body))


def _checksum(body: bytes) -> bytes:
    return zlib.crc32(body).to_bytes(CHECKSUM_BYTES, "little")


def batch_message(
    header: dict[str, Any], batch: TokenBatch, held: TokenBatch | None = None
) -> Message:
    """Return a message with this header and the batch.

    held: a batch that the receiver has. The fields that are the same objects are not sent again.
    """
    tensors: dict[str, Tensor] = {}
    traces: dict[str, Any] = {}
    supports: list[str] = []
    kept: list[str] = []
    for each in dataclasses.fields(batch):
        value = getattr(batch, each.name)
        if value is not None and value is getattr(held, each.name, None):
            kept.append(each.name)
        elif isinstance(value, RoutingTrace):
            traces[each.name] = {"layers": value.layers, "num_experts": value.num_experts}
            parts = {"ids": value.ids, "valid": value.valid, "weights": value.weights}
            tensors |= {
                f"{each.name}.{name}": part for name, part in parts.items() if part is not None
            }
        elif isinstance(value, SupportTrace):
            supports.append(each.name)
            tensors |= support_tensors(value, each.name)
        elif isinstance(value, Tensor):  # other fields (fingerprints) stay with the driver
            tensors[each.name] = value
    return Message(header | {"traces": traces, "supports": supports, "kept": kept}, tensors)


def support_tensors(support: SupportTrace, name: str) -> dict[str, Tensor]:
    """Return the tensors of a support with this name, for a message."""
    parts = {"ids": support.ids, "offsets": support.offsets, "logp": support.logp}
    return {f"{name}.{part}": value for part, value in parts.items() if value is not None}


def support_from_tensors(tensors: Mapping[str, Tensor], name: str) -> SupportTrace:
    """Return the support with this name. Raises TrainingError if it is malformed."""
    try:
        return SupportTrace(
            tensors[f"{name}.ids"], tensors[f"{name}.offsets"], tensors.get(f"{name}.logp")
        )
    except KeyError as error:
        raise TrainingError(f"a support is malformed: no tensor {error}") from None
    except ValueError as error:
        raise TrainingError(f"a support is malformed: {error}") from None


class TraceHeader(TypedDict):
    """Header fields of a routing trace, whose tensors are in the same message."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    layers: tuple[int, ...]
    num_experts: int


def batch_from_message(message: Message, held: TokenBatch | None = None) -> TokenBatch:
    """Return the batch of a message of `batch_message`. held: as there."""
    values: dict[str, Any] = {name: getattr(held, name) for name in message.header["kept"]}
    values |= {name: value for name, value in message.tensors.items() if "." not in name}
    for name, about in message.header["traces"].items():
        values[name] = trace_from_tensors(message.tensors, name, about)
    for name in message.header["supports"]:
        values[name] = support_from_tensors(message.tensors, name)
    return TokenBatch(**values)


def trace_from_tensors(
    tensors: Mapping[str, Tensor], name: str, about: TraceHeader, spans: tuple[RouteSpan, ...] = ()
) -> RoutingTrace:
    """Return the routing trace with this name. Raises TrainingError if it is malformed."""
    try:
        return RoutingTrace(
            tensors[f"{name}.ids"],
            tensors[f"{name}.valid"],
            tuple(about["layers"]),
            about["num_experts"],
            spans,
            tensors.get(f"{name}.weights"),
        )
    except KeyError as error:
        raise TrainingError(f"a routing trace is malformed: no tensor {error}") from None
    except ValueError as error:
        raise TrainingError(f"a routing trace is malformed: {error}") from None
