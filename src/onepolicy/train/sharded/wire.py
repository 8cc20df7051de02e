"""Messages as bytes: a JSON header and tensors in one safetensors message.

Nothing is pickled. A checksum finds bytes that were changed on the way. All ranks run the same
release, so what a message holds is not checked again.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from dataclasses import dataclass, field
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from onepolicy.config import TrainingError
from onepolicy.support.trace import SupportTrace
from onepolicy.types import RoutingTrace, TokenBatch

HEADER = "header"
TRACE_FIELDS: dict[type, tuple[str, ...]] = {
    RoutingTrace: ("ids", "valid", "layers", "num_experts", "weights"),
    SupportTrace: ("ids", "offsets", "logp"),
}
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
    message = Message(header | {"kept": [], "traces": {}})
    for each in dataclasses.fields(batch):
        value = getattr(batch, each.name)
        if value is not None and value is getattr(held, each.name, None):
            message.header["kept"].append(each.name)
        elif isinstance(value, Tensor):  # other fields (fingerprints) stay with the driver
            message.tensors[each.name] = value
        elif isinstance(value, RoutingTrace | SupportTrace):
            about = message.header["traces"][each.name] = {}
            for part in TRACE_FIELDS[type(value)]:
                found = getattr(value, part)
                if isinstance(found, Tensor):
                    message.tensors[f"{each.name}.{part}"] = found
                else:
                    about[part] = found
    return message


def batch_from_message(message: Message, held: TokenBatch | None = None) -> TokenBatch:
    """Return the batch of a message of `batch_message`. held: as there."""
    header, values = message.header, dict[str, Any]()
    traces: dict[str, dict[str, Any]] = header["traces"]
    for name, tensor in message.tensors.items():
        field_name, _, part = name.partition(".")
        if part:
            traces[field_name][part] = tensor
        else:
            values[name] = tensor
    for name, parts in traces.items():
        if "layers" in parts:
            values[name] = RoutingTrace(**parts | {"layers": tuple(parts["layers"])})
        else:
            values[name] = SupportTrace(**parts)
    return TokenBatch(**values, **{name: getattr(held, name) for name in header["kept"]})
