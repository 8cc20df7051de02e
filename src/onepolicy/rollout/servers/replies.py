"""Checks of an engine server's replies: size, JSON and types.

For any reply these functions return a value or raise MalformedReply. `EngineClient` then retries.
"""

from __future__ import annotations

import asyncio
import json
import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onepolicy.config import printable
from onepolicy.errors import short_repr
from onepolicy.types import MAX_LOGP

if TYPE_CHECKING:
    import httpx2

MAX_REPLY_BYTES = 2**24  # of a reply without a limit of its own
CHUNK_BYTES = 2**20  # decompressed at once; other tasks and the time limit run between two chunks
GZIP_OVERHEAD_BYTES = 2**16  # of a gzip body: header, file name, checksum, empty blocks
MAX_DEPTH = 32  # nesting levels of a server's description
BRACKET_BYTES = 8
"""Bytes of a request's limit for each list or object that its reply may have.

Parsed, an empty one takes 80 bytes for 3 of JSON. A reply at its limit has one for each token, and
for each token and layer where the routes are nested lists.
"""
ENTRY_BYTES = 512  # of JSON for one token and its log-probability
MAX_RANKS = 4096  # of one server; a process group takes memory for each
MIN_LOGP = -1e6  # nats; a lower value is a constant for a token that cannot be sampled


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """The adapters that a server takes. A vLLM server sends it as JSON."""

    rank: int  # the largest
    layers: list[str]  # last parts of the names of layers that may have one; SGLang: or "all"


class MalformedReply(ValueError):
    """A reply that does not answer the request. The request is retried."""

    def __init__(self, problem: str) -> None:
        super().__init__(printable(problem))


async def read_body(response: httpx2.Response, max_bytes: int) -> bytes:
    """Return the decompressed body of a streamed response, at most `max_bytes`."""
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity", "gzip"):
        raise MalformedReply(f"a body in the encoding {encoding[:60]!r}, expected gzip or none")
    if encoding == "gzip":
        return await _read_gzip(response, max_bytes)
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        _check_size(body, max_bytes)
        await asyncio.sleep(0)  # many tiny chunks may arrive at once
    return bytes(body)


async def _read_gzip(response: httpx2.Response, max_bytes: int) -> bytes:
    body, sent = bytearray(), 0
    # at its worst Deflate takes 9 bits for a byte
    max_sent = max_bytes + max_bytes // 8 + GZIP_OVERHEAD_BYTES
    unzip = zlib.decompressobj(wbits=31)  # with gzip's header and checksum
    try:
        async for chunk in response.aiter_raw():
            sent += len(chunk)
            if sent > max_sent:
                raise MalformedReply(
                    f"a gzip body of more than {max_bytes:,} bytes, though it unpacks to fewer"
                )
            await _unzip_chunk(unzip, chunk, body, max_bytes)
    except zlib.error as error:
        raise MalformedReply(f"a body that is not gzip, despite its encoding ({error})") from error
    if not unzip.eof:
        raise MalformedReply("a gzip body that ends too early")
    return bytes(body)


async def _unzip_chunk(unzip: Any, chunk: bytes, body: bytearray, max_bytes: int) -> None:
    """Append the decompressed chunk to `body`, in pieces of CHUNK_BYTES."""
    rest, full = chunk, True
    while (rest or full) and not unzip.eof:
        piece = unzip.decompress(rest, CHUNK_BYTES)
        rest, full = unzip.unconsumed_tail, len(piece) == CHUNK_BYTES
        body += piece
        _check_size(body, max_bytes)
        await asyncio.sleep(0)
    if rest or unzip.unused_data:  # a second gzip member too: no engine server sends one
        raise MalformedReply("a gzip body that goes on after its end")


def _check_size(body: bytearray, max_bytes: int) -> None:
    if len(body) > max_bytes:
        raise MalformedReply(f"a body of more than {max_bytes:,} bytes, the limit of this request")


def parse_json(body: bytes, max_bytes: int) -> Any:
    """Parse JSON text. Raise MalformedReply also for a duplicate key, and for too many brackets.

    NaN and infinity are accepted: see `is_number`. max_bytes: the limit of the body.
    """
    brackets, limit = body.count(b"[") + body.count(b"{"), max_bytes // BRACKET_BYTES
    if brackets > limit:
        raise MalformedReply(
            f"{brackets:,} lists and objects, more than {limit:,}, the limit of this request"
        )
    try:
        return json.loads(body, object_pairs_hook=_unique)
    except MalformedReply:
        raise
    # bytes that are not text; thousands of digits or brackets
    except (ValueError, RecursionError) as error:
        raise MalformedReply(f"not JSON ({str(error)[:160]})") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise MalformedReply("not JSON (an object has a duplicate key)")
    return found


def make_printable(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Return a JSON value with printable text, which errors may quote.

    Raises MalformedReply if it is nested more than `depth` levels.
    """
    if depth < 0:
        raise MalformedReply(f"its description is nested more than {MAX_DEPTH} levels")
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [make_printable(each, depth - 1) for each in value]
    if isinstance(value, dict):
        return {printable(name): make_printable(each, depth - 1) for name, each in value.items()}
    return value


def get_field(container: Any, name: str, kind: type) -> Any:
    """Return container[name]. Raise MalformedReply unless it exists and is of this type."""
    value = None
    if isinstance(container, dict):
        value = container.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise MalformedReply(f"{name} is {type(value).__name__}, expected {kind.__name__}")
    return value


def get_count(container: Any, name: str, maximum: int, minimum: int = 0) -> int:
    """Return container[name]. Raise MalformedReply unless it is an int in these bounds."""
    value = get_field(container, name, int)
    if not minimum <= value <= maximum:
        raise MalformedReply(f"{name} is {short_repr(value)}, expected {minimum} to {maximum}")
    return int(value)


def get_token_ids(container: Any, name: str, *, vocab: int) -> list[int]:
    """Return container[name]. Raise MalformedReply unless it is a list of ids below `vocab`."""
    values: list[Any] = get_field(container, name, list)
    for value in values:
        if type(value) is not int or not 0 <= value < vocab:
            raise MalformedReply(
                f"{name}: {short_repr(value)!r} is no token id in 0..{vocab - 1}; is it this "
                "model's server?"
            )
    return values


def is_number(value: Any) -> bool:
    """Return whether the value is an int or float that float32 holds, not NaN or infinity."""
    return type(value) in (int, float) and -3e38 <= value <= 3e38


def logprob_tensor(values: list[Any], name: str) -> Tensor:
    """Return the log-probabilities of sampled tokens as [n] float32.

    Raises MalformedReply for a value that is none.
    """
    for value in values:
        if not is_number(value):
            raise MalformedReply(
                f"{name}: {short_repr(value)} is no log-probability; if this repeats, the "
                "log-probabilities are not numbers because the server's weights or kernels are "
                "broken for this model"
            )
        if not MIN_LOGP <= value <= MAX_LOGP:
            raise MalformedReply(
                f"{name}: {short_repr(value)} is no log-probability of a sampled token"
            )
    return torch.tensor(values, dtype=torch.float32)


def top_tokens_tensors(
    rows: list[list[tuple[int, float]]], k: int, name: str
) -> tuple[Tensor, Tensor]:
    """Return ids [n, k] int32 and log-probabilities [n, k] float32, most likely first.

    rows: [n] of at least k pairs (id, log-probability), in any order. Raises MalformedReply for
    fewer than k tokens, or for a duplicate.
    """
    top = [sorted(row, key=lambda pair: -pair[1])[:k] for row in rows]
    for row in top:
        if len(row) < k:
            raise MalformedReply(f"{name}: {len(row)} of {k} tokens")
        if len({token for token, _ in row}) < k:
            raise MalformedReply(f"{name}: a token is listed twice")
    ids = torch.tensor([[token for token, _ in row] for row in top], dtype=torch.int32)
    logp = torch.tensor([[value for _, value in row] for row in top], dtype=torch.float32)
    return ids.view(len(rows), k), logp.view(len(rows), k)


def max_reply_bytes(*, tokens: int, path: int, per_token: int, routes: int) -> int:
    """Return the most bytes that a reply with `tokens` tokens may have.

    path: tokens of the prompt. per_token: JSON entries for each sampled token. routes: bytes of
    all routing rows, before base64.
    """
    return MAX_REPLY_BYTES + ENTRY_BYTES * tokens * per_token + 16 * path + base64_bytes(routes)


def base64_bytes(size: int) -> int:
    return 4 * math.ceil(size / 3)


def adapter_names(reply: Any) -> list[str]:
    """Return the names of the adapters in a list of models: those that have a parent."""
    names = []
    for card in get_field(reply, "data", list):
        if not isinstance(card, dict):
            raise MalformedReply("data: not a list of models")
        if card.get("parent") is not None:
            names.append(get_field(card, "id", str))
    return names
