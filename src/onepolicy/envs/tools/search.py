"""Retrieval over a local corpus by BM25 (the library bm25s)."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

from onepolicy.config import SearchTool, UsageError


class Search:
    """Search in a corpus of passages."""

    name, argument = "search", "query"
    description = "Finds the passages of the corpus that match best."

    def __init__(self, config: SearchTool) -> None:
        if find_spec("bm25s") is None:
            raise UsageError(
                "task.tools: search needs bm25s, which is not installed; pip install "
                "'onepolicy[envs]'"
            )
        import bm25s

        self.config = config
        self.passages = read_corpus(Path(config.corpus))
        tokens = bm25s.tokenize(self.passages, stopwords=None, show_progress=False)
        if not tokens.vocab:
            raise UsageError(
                f"{config.corpus}: no passage has a word of two characters or more, so nothing can "
                "be found"
            )
        self._index = bm25s.BM25()
        self._index.index(tokens, show_progress=False)

    async def call(self, text: str) -> str:
        """Return the best config.passages passages, numbered, the best first.

        Every passage shares a word with the query.
        """
        import bm25s

        query = bm25s.tokenize([text], stopwords=None, show_progress=False)
        if not query.vocab:
            return "nothing found"
        k = min(self.config.passages, len(self.passages))
        found, scores = self._index.retrieve(query, k=k, show_progress=False)
        hits = [
            self.passages[i]
            for i, score in zip(found[0].tolist(), scores[0].tolist(), strict=True)
            if score > 0
        ]
        return "\n".join(f"[{n}] {passage}" for n, passage in enumerate(hits, 1)) or "nothing found"

    def reply_texts(self) -> list[str]:
        return self.passages


def read_corpus(path: Path) -> list[str]:
    """Return the `text` of every line of a JSONL file. Raises UsageError."""
    try:
        lines = path.read_text(encoding="utf-8-sig").rstrip().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"task.tools: search cannot read its corpus {path}: {error}") from error
    if lines == [""]:
        raise UsageError(f"{path}: is empty; a corpus needs at least one line")
    passages = []
    for number, line in enumerate(lines, 1):
        text = _read_text(line)
        if text is None or not text.strip():
            raise UsageError(
                f'{path}:{number}: expected {{"text": "..."}} with some text, got {line[:80]!r}'
            )
        passages.append(text)
    return passages


def _read_text(line: str) -> str | None:
    """Return the `text` of a line, or None if the line has none that the policy can read."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
        return None
    text: str = entry["text"]
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which no tokenizer accepts
        return None
    return text
