"""What an engine's server sent, as JSON that may be checked: bounded before it is held, one kind of error.

Whatever a server sends, these functions return a value or raise `Malformed`; `EngineClient` then asks again.
"""

from __future__ import annotations

import asyncio
import json
import math
import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onepolicy.config import printable
from onepolicy.config.base import short_repr
from onepolicy.types import MAX_LOGP

if TYPE_CHECKING:
    import httpx2

MAX_REPLY_BYTES = 2**24  # of a reply that has no bound of its own
PIECE_BYTES = (
    2**20
)  # decompressed at once; other tasks, and the time limit, come between two pieces
GZIP_BYTES = (
    2**16
)  # of a gzip body beside its data: a header with a file's name, a checksum, empty blocks
DEEPEST = 32  # levels of what a server says of itself
ENTRY_BYTES = 512  # of JSON for one token and its log-probability, at most
SMALLEST_LOGP = -1e6  # nats; below it stands a constant for a token that cannot be sampled


class MalformedReply(ValueError):
    """A reply that is not what was asked for. `parse` raises it; the request is tried again."""

    def __init__(self, problem: str) -> None:
        super().__init__(printable(problem))


async def read_body(response: httpx2.Response, most: int) -> bytes:
    """Return the body of a streamed response, decompressed. Refuse more than `most` bytes."""
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity", "gzip"):
        raise MalformedReply(f"a body in the encoding {encoding[:60]!r}, which nobody asked for")
    if encoding == "gzip":
        return await _read_gzip(response, most)
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        _check_size(body, most)
        await asyncio.sleep(0)  # of tiny chunks many come at once
    return bytes(body)


async def _read_gzip(response: httpx2.Response, most: int) -> bytes:
    body, sent = bytearray(), 0
    unzip = zlib.decompressobj(wbits=31)  # with gzip's header and checksum
    try:
        async for chunk in response.aiter_raw():
            sent += len(chunk)
            if (
                sent > most + most // 8 + GZIP_BYTES
            ):  # the worst code of Deflate takes 9 bits for a byte
                raise MalformedReply(
                    f"a gzip body of more than {most:,} bytes, and as it unpacks to fewer"
                )
            left, full = chunk, True
            while (left or full) and not unzip.eof:
                piece = unzip.decompress(left, PIECE_BYTES)
                left, full = unzip.unconsumed_tail, len(piece) == PIECE_BYTES
                body += piece
                _check_size(body, most)
                await asyncio.sleep(0)
            if left or unzip.unused_data:  # a second member too: no server of an engine sends one
                raise MalformedReply("a gzip body that goes on after its end")
    except zlib.error as error:
        raise MalformedReply(f"a body that is not gzip, though it says so ({error})") from error
    if not unzip.eof:
        raise MalformedReply("a gzip body that ends too early")
    return bytes(body)


def _check_size(body: bytearray, most: int) -> None:
    if len(body) > most:
        raise MalformedReply(
            f"a body of more than {most:,} bytes, the most that the answer can have"
        )


def parse_json(body: bytes) -> Any:
    """Return what the JSON text holds. Refuse a key that stands twice. NaN and infinity pass: see `is_number`."""
    try:
        return json.loads(body, object_pairs_hook=_unique)
    except MalformedReply:
        raise
    except (
        ValueError,
        RecursionError,
    ) as error:  # also bytes that are no text, and thousands of digits or brackets
        raise MalformedReply(f"not JSON ({str(error)[:160]})") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise MalformedReply("not JSON (a key stands twice in one object)")
    return found


def make_printable(value: Any, depth: int = DEEPEST) -> Any:
    """Return what a server says of itself, with all text in it printable: errors quote it. Malformed if deeper."""
    if depth < 0:
        raise MalformedReply(f"what it says of itself is more than {DEEPEST} deep")
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [make_printable(each, depth - 1) for each in value]
    if isinstance(value, dict):
        return {printable(name): make_printable(each, depth - 1) for name, each in value.items()}
    return value


def get_field(of: Any, name: str, kind: type) -> Any:
    """of[name], if `of` is a JSON object that has it, of this kind. Malformed if not."""
    value = of.get(name) if isinstance(of, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise MalformedReply(f"{name} is {type(value).__name__}, expected {kind.__name__}")
    return value


def get_count(of: Any, name: str, most: int) -> int:
    """of[name], a whole number from 0 to `most`. Malformed if not."""
    value = get_field(of, name, int)
    if not 0 <= value <= most:
        raise MalformedReply(f"{name} is {short_repr(value)}, expected 0 to {most}")
    return int(value)


def get_token_ids(of: Any, name: str, *, vocab: int) -> list[int]:
    """of[name], a list of ids of a vocabulary of `vocab`. Malformed if not."""
    values: list[Any] = get_field(of, name, list)
    for value in values:
        if type(value) is not int or not 0 <= value < vocab:
            raise MalformedReply(
                f"{name}: {short_repr(value)!r} is no token id in 0..{vocab - 1}; is it this model's server?"
            )
    return values


def is_number(value: Any) -> bool:
    """Whether it is an int or float that float32 can hold. Not a bool, NaN or infinity."""
    return type(value) in (int, float) and -3e38 <= value <= 3e38


def logprob_tensor(values: list[Any], name: str) -> Tensor:
    """[n] float32. Malformed if one of them is not that of a token that was sampled."""
    for value in values:
        if not is_number(value):
            raise MalformedReply(
                f"{name}: {short_repr(value)} is no log-probability; if it stays so, the log-probabilities are not numbers "
                "because the server's weights or kernels are broken for this model"
            )
        if not SMALLEST_LOGP <= value <= MAX_LOGP:
            raise MalformedReply(
                f"{name}: {short_repr(value)} is no log-probability of a token that was sampled"
            )
    return torch.tensor(values, dtype=torch.float32)


def top_tokens_tensors(
    rows: list[
        list[tuple[int, float]]
    ],  # [n] of at least k pairs (id, log-probability), in any order
    k: int,
    name: str,
) -> tuple[Tensor, Tensor]:
    """([n, k] int32, [n, k] float32), the likeliest first. Malformed for fewer than k tokens, or one twice."""
    chosen = [sorted(row, key=lambda pair: -pair[1])[:k] for row in rows]
    for row in chosen:
        if len(row) < k:
            raise MalformedReply(f"{name}: {len(row)} of {k} tokens")
        if len({token for token, _ in row}) < k:
            raise MalformedReply(f"{name}: a token stands twice")
    ids = torch.tensor([[token for token, _ in row] for row in chosen], dtype=torch.int32).view(
        len(rows), k
    )
    logp = torch.tensor([[value for _, value in row] for row in chosen], dtype=torch.float32).view(
        len(rows), k
    )
    return ids, logp


def max_reply_bytes(*, tokens: int, path: int, per_token: int, routes: int) -> int:
    """The most bytes an answer of `tokens` tokens can have. path: tokens of the prompt; per_token: entries of JSON for
    one sampled token; routes: bytes of all routing rows, before base64."""
    return MAX_REPLY_BYTES + ENTRY_BYTES * tokens * per_token + 16 * path + base64_bytes(routes)


def base64_bytes(size: int) -> int:
    return 4 * math.ceil(size / 3)
