"""A dialogue in the tokenizer's chat template: what it writes before the first turn and between two turns.

Nothing that was sampled is ever tokenised again. Text from outside (questions, replies) is tokenised with special
tokens split into plain text, so no reply can end a turn or open another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from onepolicy.config import UsageError
from onepolicy.envs.multiturn.render import encode

Message = dict[str, Any]
Replies = Sequence[str]  # to one turn
Opening = (
    str | Sequence[tuple[str, str]]
)  # a question, or (role, text) of every message before the first turn

# Stand-ins, found again in what a template makes of them.
QUESTION, SAID, REPLY = "textofquestion", "textofmessage", "textofreply"
THOUGHT_END = "</think>"
THOUGHT = f"<think>\nathought\n{THOUGHT_END}\n\n"


class ChatTurns:
    """Renders openings and replies. A subclass says what a turn and a reply are as messages, and calls `_check_history`
    once they can be rendered."""

    instructions = ""  # before a question that is one text
    schemas: Sequence[Any] = ()  # tools the template prints

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, fork: bool) -> None:
        """fork: render the whole history for every turn, as the template wants it; else only what is new."""
        self.tokenizer, self.fork = tokenizer, fork
        self._user = {"role": "user", "content": QUESTION}
        self._between: dict[int, list[str]] = {}  # number of replies -> the texts around them

    def turn_message(self, content: str) -> Message:
        """A turn of the policy as the template gets it, to see what it writes around one."""
        raise NotImplementedError

    def reply_message(self, content: str) -> Message:
        raise NotImplementedError

    def start(self, opening: Opening) -> list[int]:
        messages, marks, values = self._asked(opening)
        return self._encoded(self._render(messages, prompt=True), marks, values)

    def following(
        self, path: list[int], opening: Opening, turns: Sequence[str], replies: Sequence[Replies]
    ) -> list[int]:
        if self.fork:
            return self._whole(opening, turns, replies)
        return path + self._joined(self._texts_between(len(replies[-1])), replies[-1])

    def _asked(self, opening: Opening) -> tuple[list[Message], list[str], list[str]]:
        """Messages with stand-ins for their texts, the stand-ins, the texts."""
        if isinstance(opening, str):
            return [self._user], [QUESTION], [self.instructions + opening]
        marks = [f"{SAID}{i}x" for i in range(len(opening))]
        messages = [
            {"role": role, "content": mark} for (role, _), mark in zip(opening, marks, strict=True)
        ]
        return messages, marks, [text for _, text in opening]

    def _texts_between(self, count: int) -> list[str]:
        """What the template writes before, between and after `count` replies, up to the next turn."""
        if count not in self._between:
            # with a thought: a template may write an empty one while the turn is the last, and no longer after it
            turn = [self._user, self.turn_message(THOUGHT)]
            marks = [_mark(i) for i in range(count)]
            ended = self._until_end(turn)
            text = self._render([*turn, *map(self.reply_message, marks)], prompt=True)
            assert text.startswith(ended), "_check_history refuses such a template"
            self._between[count] = _split(text[len(ended) :], marks)
        return self._between[count]

    def _whole(
        self, opening: Opening, turns: Sequence[str], replies: Sequence[Replies]
    ) -> list[int]:
        messages, marks, values = self._asked(opening)
        word = REPLY
        while any(word in turn for turn in turns):  # a turn may say anything
            word += "s"
        for turn, answered in zip(turns, replies, strict=True):
            messages.append({"role": "assistant", "content": turn})
            for reply in answered:
                marks.append(_mark(len(marks), word))
                messages.append(self.reply_message(marks[-1]))
                values.append(reply)
        return self._encoded(self._render(messages, prompt=True), marks, values)

    def _check_history(self) -> None:
        turn, opening = self.turn_message(THOUGHT), self._render([self._user], prompt=True)
        one = [self._user, turn]
        sampled = self._until_end(one)
        before = self._render([*one, self.reply_message(_mark(0))], prompt=True)
        after = self._render(
            [*one, self.reply_message(_mark(0)), turn, self.reply_message(_mark(1))], prompt=True
        )
        kept = (
            sampled.startswith(opening) and before.startswith(sampled) and after.startswith(before)
        )
        rewritten = not kept or THOUGHT.split()[1] not in sampled
        if rewritten and not self.fork:
            raise UsageError(
                "task.history: the chat template renders earlier turns anew once there are later ones (it drops their "
                "thoughts, for instance); set task.history=fork to train on every rewritten history as a sample of its "
                "own, or use a template that keeps them"
            )
        if self.fork and not rewritten:
            raise UsageError(
                "task.history: fork has no effect, the chat template keeps earlier turns as they were; leave it out"
            )

    def _until_end(self, messages: Sequence[Message]) -> str:
        """The text up to the token that ends its last turn."""
        eos = str(self.tokenizer.eos_token)
        before, ended, _ = self._render(messages).rpartition(eos)
        if not ended:
            raise UsageError(
                f"model.path: the chat template does not end a turn with the tokenizer's {eos!r}"
            )
        return before + ended

    def _render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(self.schemas) or None,
                add_generation_prompt=prompt,
                tokenize=False,
            )
        except TemplateError as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise UsageError(
                f"model.path: the chat template cannot write the roles {roles}: {error}; use another template"
            ) from error
        assert isinstance(text, str)
        return text

    def _encoded(self, text: str, marks: Sequence[str], values: Sequence[str]) -> list[int]:
        return self._joined(_split(text, marks), values)

    def _joined(self, texts: Sequence[str], values: Sequence[str]) -> list[int]:
        ids = encode(self.tokenizer, texts[0])
        for value, text in zip(values, texts[1:], strict=True):
            ids += encode(self.tokenizer, value, outside=True) + encode(self.tokenizer, text)
        return ids


def _mark(index: int, word: str = REPLY) -> str:
    return f"{word}{index}x"


def _split(text: str, marks: Sequence[str]) -> list[str]:
    texts = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found:
            raise UsageError("model.path: the chat template leaves out a message; use another one")
        texts.append(before)
    return [*texts, text]
