"""The bodies of an engine server's replies: bounded, decompressed and parsed as JSON.

For any body these functions return a value or raise MalformedReply. `EngineClient` then retries.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from typing import TYPE_CHECKING, Any

from onepolicy.config import printable

if TYPE_CHECKING:
    import httpx2

MAX_REPLY_BYTES = 2**24  # of a reply without a limit of its own
CHUNK_BYTES = 2**20  # decompressed at once; other tasks and the time limit run between two chunks
GZIP_OVERHEAD_BYTES = 2**16  # of a gzip body: header, file name, checksum, empty blocks
BRACKET_BYTES = 8
"""Bytes of a request's limit for each list or object that its reply may have.

Parsed, an empty one takes 80 bytes for 3 of JSON. A reply at its limit has one for each token, and
for each token and layer where the routes are nested lists.
"""


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

    NaN and infinity are accepted: see `replies.is_number`. max_bytes: the limit of the body.
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
