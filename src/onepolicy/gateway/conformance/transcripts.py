"""Transcripts: the requests of a program, one after the other, and the tree they must give.

A file of `transcripts/` is one of these, as JSON:

- `shape`, `like`: its subject, and a program that sends it. `path`: the dialect.
- `requests`: each has a `body`, or `again`: the number of a request whose body it repeats; and
  `headers`. One with `count` asks how many tokens it has. In a body's list `{"turn": N}` stands for
  the answer to request N as a client sends it back, changed by `change`; `{"replies": N}` for
  replies to its calls. In a text `{turn N}` is that answer's text.
- `needs`: by the number of a request, parts that its answer must have. Without them the rest of
  the transcript is left out.
- `expect`: an object for each request, or a list of such, of which one must fit. `checks.py` has
  its fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from onepolicy.gateway.conformance.answers import Answer, Body, Reader
from onepolicy.gateway.conformance.chat_answers import Chat
from onepolicy.gateway.conformance.messages_answers import Messages
from onepolicy.gateway.conformance.responses_answers import Responses

READERS: Mapping[str, Reader] = {
    reader.path: reader for reader in (Chat(), Messages(), Responses())
}
Need = Literal["text", "thought", "call", "two calls", "another answer"]
LEAST_CHARACTERS = 8
"""Of a text that can be cut or summed up."""
THOUGHTS = ("thinking", "reasoning")
"""Types of blocks and items that hold thoughts."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """A transcript."""

    name: str
    shape: str
    like: str
    path: str
    requests: tuple[Body, ...]
    needs: Mapping[int, Need]
    expect: tuple[Body | list[Body], ...]

    @property
    def reader(self) -> Reader:
        return READERS[self.path]


def load_transcripts() -> list[Transcript]:
    """Return the transcripts of this package, by name."""
    found = []
    for file in (files("onepolicy.gateway.conformance") / "transcripts").iterdir():
        told = json.loads(file.read_text(encoding="utf-8"))
        needs = {int(number): need for number, need in told.pop("needs", {}).items()}
        requests, expect = tuple(told.pop("requests")), tuple(told.pop("expect"))
        name = file.name.removesuffix(".json")
        found.append(Transcript(name, requests=requests, needs=needs, expect=expect, **told))
    return sorted(found, key=lambda transcript: transcript.name)


def lacks(answers: Sequence[Answer | None], need: Need) -> str:
    """Return the part that the last answer lacks, "" if none."""
    answer = _answer(answers, -1)
    if need == "text" and len(answer.text.strip()) < LEAST_CHARACTERS:
        return f"it wrote fewer than {LEAST_CHARACTERS} characters of text"
    if need == "thought" and not answer.thought.strip():
        return "it wrote no thought"
    if need == "call" and not answer.calls:
        return "it called no tool"
    if need == "two calls" and len(answer.calls) < 2:
        return "it called fewer than two tools in a turn"
    if need == "another answer" and any(_says(answer) == _says(each) for each in answers[:-1]):
        return "it answered the same twice"
    return ""


def body_of(
    transcript: Transcript, number: int, answers: Sequence[Answer | None], model: str
) -> Body:
    """Return the body of a request, with the answers so far in their places."""
    request = transcript.requests[number]
    if "again" in request:
        return body_of(transcript, request["again"], answers, model)
    body: Body = _fill(request["body"], transcript.reader, answers)
    return {"model": model} | body


def _fill(value: Any, reader: Reader, answers: Sequence[Answer | None]) -> Any:
    if isinstance(value, str):
        return re.sub(r"\{turn (\d+)\}", lambda found: _text_of(answers, int(found[1])), value)
    if isinstance(value, dict):
        return {key: _fill(inner, reader, answers) for key, inner in value.items()}
    if not isinstance(value, list):
        return value
    filled: list[Any] = []
    for each in value:
        if isinstance(each, dict) and "turn" in each:
            filled += _changed(_answer(answers, each["turn"]), each.get("change"), reader)
        elif isinstance(each, dict) and "replies" in each:
            filled += reader.write_replies(_answer(answers, each["replies"]), each["text"])
        else:
            filled.append(_fill(each, reader, answers))
    return filled


def _changed(answer: Answer, change: str | None, reader: Reader) -> list[Body]:
    """Return a turn as a client sends it back."""
    if change == "cut":
        text = answer.text.strip()
        return reader.write_turn(text[: len(text) // 2].strip())
    if change == "calls as text":
        written = [f"Calling {call.name} with {call.arguments}" for call in answer.calls]
        return reader.write_turn("\n".join([answer.text, *written]))
    if change == "no thoughts":
        return [_without_thoughts(part) for part in answer.turn if part.get("type") not in THOUGHTS]
    assert change is None, change
    return answer.turn


def _without_thoughts(part: Body) -> Body:
    left = {key: value for key, value in part.items() if key != "reasoning_content"}
    content = left.get("content")
    if isinstance(content, list):
        left["content"] = [block for block in content if block.get("type") not in THOUGHTS]
    return left


def _answer(answers: Sequence[Answer | None], number: int) -> Answer:
    answer = answers[number]
    assert answer is not None
    return answer


def _says(answer: Answer | None) -> object:
    return answer and (answer.text, answer.thought, [(c.name, c.arguments) for c in answer.calls])


def _text_of(answers: Sequence[Answer | None], number: int) -> str:
    return _answer(answers, number).text.strip()
