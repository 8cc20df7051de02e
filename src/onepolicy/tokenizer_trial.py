"""A trial of a model's tokenizer.json in a child with limits, before this process loads it.

The file is a program of whoever made the model: rules that replace text, regular expressions and
fixed lengths. The library that runs it ends its process where memory is short.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Generator, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from onepolicy import bounded
from onepolicy.bounded import GIB, Limits, Message
from onepolicy.errors import UsageError, short_repr

MEMORY_PER_BYTE = 64
SECONDS, BYTES_PER_SECOND = 10.0, 2**20
TEXT = (
    "".join(f"{chr(code) * 32} " for code in range(32, 127)) + "1 + 1 = two\n\t" + "é中\U0001f600"
)
MOST_GROWTH = 2**12
"""How many times longer its rules of replacement may make a text together. Known ones do not."""
TOKENS_PER_BYTE = 16
"""Tokens of the trial's text, and characters that these are decoded to, for each of its bytes."""

PLAIN_SIZE, LONGEST_WORD = 2**20, 256
CHARACTERS = {"type": "Split", "behavior": "Isolated", "invert": False}
PLAIN = {
    "truncation": (None,),
    "padding": (None,),
    "normalizer": (None,),
    "pre_tokenizer": (CHARACTERS | {"pattern": {"Regex": r"[\s\S]"}},),
    "decoder": (None, {"type": "Fuse"}),
}
"""Parts of tokenizers as `onepolicy make-policy` writes them: words of a list, none replaced."""


def try_tokenizers(model: str) -> None:
    """Raise UsageError if a tokenizer.json crashes, takes much, or makes short texts long.

    A small file with none but harmless parts needs no trial, which takes a third of a second.
    model: a folder or a hub id. In a folder all files count that transformers may take for it.
    """
    if Path(model).exists():
        found = [file for file in Path(model).glob("tokenizer*.json") if file.is_file()]
        _refuse_other_files(Path(model) / "tokenizer_config.json", {file.name for file in found})
    else:
        found = _from_hub(model)
    for file in found:
        if file.name != "tokenizer_config.json":
            stat = file.stat()
            _try_once(str(file), stat.st_mtime_ns, stat.st_size)


def _refuse_other_files(settings: Path, known: set[str]) -> None:
    """Raise UsageError if the settings name a tokenizer that is not among the `known` files."""
    try:
        named = json.loads(settings.read_bytes()).get("fast_tokenizer_files")
    except (OSError, ValueError, RecursionError, AttributeError):
        return  # transformers explains them
    place = f"model.path: {settings}: fast_tokenizer_files"
    if named is not None and not isinstance(named, list):
        raise UsageError(
            f"{place} is {short_repr(named)}, expected a list of this folder's files; leave it out"
        )
    for name in named or ():
        if not isinstance(name, str) or name not in known:
            raise UsageError(
                f"{place} names {short_repr(name)}, which is no tokenizer*.json of this folder; "
                "leave it out"
            )


def _from_hub(model: str) -> list[Path]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return [Path(hf_hub_download(model, "tokenizer.json"))]
    except EntryNotFoundError:
        return []


@lru_cache(64)  # a command loads its tokenizer several times
def _try_once(file: str, mtime: int, size: int) -> None:
    if size <= PLAIN_SIZE and _is_plain(Path(file)):
        return
    limits = Limits(GIB + MEMORY_PER_BYTE * size, SECONDS + size / BYTES_PER_SECOND)
    try:
        for _ in bounded.stream("onepolicy.tokenizer_trial:trial", {"file": file}, limits):
            pass
    except (bounded.StoppedError, UsageError) as error:
        raise UsageError(
            f"model.path: {file}: {error}; use the tokenizer that the model was trained with"
        ) from None


def _is_plain(file: Path) -> bool:
    """Return whether a tokenizer looks short words up in a list and does nothing else."""
    try:
        tree = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return False
    match tree:
        case {
            "model": {"type": "WordLevel", "vocab": dict(vocabulary)},
            "added_tokens": list(tokens),
            "post_processor": {"special_tokens": {**inserted}},
            **parts,
        }:
            words = [*vocabulary, *(str(token) for token in tokens)]
            has_long = max(map(len, words), default=0) > LONGEST_WORD
            # a copy of it takes room for all numbers up to the largest
            has_large = any(number not in range(PLAIN_SIZE) for number in vocabulary.values())
            is_known = all(parts.get(name) in known for name, known in PLAIN.items())
            return is_known and not inserted and not has_long and not has_large
    return False


def trial(file: str) -> Generator[Message | None, None, None]:
    """Copy a tokenizer, encode and decode a short text, as a task of bounded.py."""
    from tokenizers import Tokenizer

    yield None
    tokenizer = Tokenizer.from_file(file)
    for part in (tokenizer.normalizer, tokenizer.decoder):
        if part is None:
            continue
        growth = _growth(json.loads(part.__getstate__()))
        if growth > MOST_GROWTH:
            raise UsageError(f"its rules of replacement make a text {growth:,.0f} times longer")
    copy.deepcopy(tokenizer)  # as transformers does
    size = len(TEXT.encode())
    ids = tokenizer.encode(TEXT).ids
    if len(ids) > TOKENS_PER_BYTE * size:
        raise UsageError(f"makes {len(ids):,} tokens of {size:,} bytes")
    text = tokenizer.decode(ids)
    if len(text) > TOKENS_PER_BYTE * size:
        raise UsageError(f"decodes {size:,} bytes to {len(text):,} characters")


def _growth(rules: Any) -> float:
    """Return how many times longer all rules {"type": "Replace"} in a tree make a text at most."""
    growth = 1.0
    for rule in _nodes(rules):
        if rule.get("type") != "Replace":
            continue
        match rule:
            case {"pattern": {"String": str(pattern)}, "content": str(content)}:
                growth *= max(1, len(content) / max(1, len(pattern)))
            case {"content": str(content)}:  # an expression may match the empty text
                growth *= 1 + len(content)
    return growth


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    children = tree
    if isinstance(tree, dict):
        yield tree
        children = list(tree.values())
    if isinstance(children, list):
        for child in children:
            yield from _nodes(child)
