"""Dialogues: the first prompt of an episode and the tokens between two of its turns.

Sampled tokens are never tokenised again, but for a forked history: it renders turns from their
text, in which a special token that the policy spelt out becomes one. Untrusted text (questions and
replies) is tokenised with special tokens split into plain text, so no reply can end a turn or open
another.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from onepolicy.chat_templates import render_chat
from onepolicy.config import UsageError
from onepolicy.envs.multiturn.tokenization import encode_text

LOG = logging.getLogger(__name__)

Message = dict[str, Any]
Replies = Sequence[str]
"""The replies to one turn."""
InitialPrompt = str | Sequence[tuple[str, str]]
"""A question, or (role, text) of every message before the first turn."""
Pieces = tuple[Sequence[str], Sequence[str]]
"""(texts of the template, untrusted texts between them): one more of the first."""

# Placeholders are rendered in place of texts, then found again in the rendered template.
MESSAGE_PLACEHOLDER = "textofmessage"
REPLY_PLACEHOLDER = "textofreply"
ODD_REPLY = 'a "reply"\nof lines'
THOUGHT_START, THOUGHT_END = "<think>", "</think>"
THOUGHT_TEXT = "athought"
THOUGHT = f"{THOUGHT_START}\n{THOUGHT_TEXT}\n{THOUGHT_END}\n\n"
EXAMPLE_QUESTION = {"role": "user", "content": MESSAGE_PLACEHOLDER}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. text: its argument."""

    tool: str
    text: str


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """The calls or the answer of a turn. malformed: the error of a turn that has neither."""

    calls: tuple[ToolCall, ...] = ()
    answer: str | None = None
    malformed: str = ""


class TurnFormat:
    """The form of turns and replies. This one is chat: a reply is the user's message."""

    instructions = ""
    """Text before the first prompt."""
    schemas: Sequence[Any] = ()
    """Tools that the template prints."""
    starts_in_thought = False
    """The template's prompt opens the thoughts of a turn."""

    def turn_message(self, content: str) -> Message:
        """Return an example turn of the policy, to see which text the template puts around it."""
        return {"role": "assistant", "content": f"{content}textofturn"}

    def reply_message(self, content: str) -> Message:
        """Return a reply with this content."""
        return {"role": "user", "content": content}

    def reply_lines(self, replies: Replies) -> str:
        """Return the text after a turn for a tokenizer without a chat template."""
        return "\n" + "".join(f"{reply}\n" for reply in replies)

    def parse_turn(self, text: str) -> ParsedTurn:
        """Return the calls or the answer in a turn's text."""
        return ParsedTurn(answer=self.split_thoughts(text)[1])

    def split_thoughts(self, turn: str) -> tuple[str, str]:
        """Return a turn's thoughts and the text after them."""
        return split_thoughts(turn, opened=self.starts_in_thought)


def split_thoughts(turn: str, *, opened: bool) -> tuple[str, str]:
    """Return a turn's thoughts and the text after them, which is empty if they have no end.

    opened: the prompt opens them. Otherwise a turn may, at its beginning.
    """
    thought, ended, text = turn.rpartition(THOUGHT_END)
    if not ended and (opened or turn.lstrip().startswith(THOUGHT_START)):
        thought, text = turn, ""
    return thought.replace(THOUGHT_START, "", 1).strip(), text.strip()


class ChatTemplate:
    """A tokenizer's chat template. schemas: tools that it prints."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, schemas: Sequence[Any]) -> None:
        self.tokenizer, self.schemas = tokenizer, schemas

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """Return the messages as text. prompt: end with the beginning of the policy's turn."""
        return render_chat(self.tokenizer, messages, tools=self.schemas, prompt=prompt)

    def starts_in_thought(self) -> bool:
        """Return whether the prompt of a turn opens its thoughts."""
        return self.render([EXAMPLE_QUESTION], prompt=True).rstrip().endswith(THOUGHT_START)

    def render_to_turn_end(self, messages: Sequence[Message]) -> str:
        """Return the rendered text up to the token that ends the last turn."""
        eos = str(self.tokenizer.eos_token)
        before, ended, _ = self.render(messages).rpartition(eos)
        if not ended:
            raise UsageError(
                f"model.path: the chat template does not end a turn with the tokenizer's {eos!r}"
            )
        return before + ended


class Dialogue:
    """The prompts of an episode in the tokenizer's chat template, or in lines if it has none."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, turns: TurnFormat, *, fork: bool
    ) -> None:
        """Store the settings. Raises UsageError if the template rewrites history without `fork`.

        fork: render the whole history anew for every turn, as the template defines it. Otherwise
        only the new messages are rendered.
        """
        self.tokenizer, self.turns, self.fork = tokenizer, turns, fork
        self._template = ChatTemplate(tokenizer, turns.schemas)
        self._between_turns: dict[int, list[str]] = {}  # number of replies -> texts around them
        if tokenizer.chat_template is not None:
            self._check_history()
            self._escapes = self._escapes_replies()
            turns.starts_in_thought = self._template.starts_in_thought()

    def encode_first_prompt(self, prompt: InitialPrompt) -> list[int]:
        """Return the ids of the prompt of the first turn."""
        if self.tokenizer.chat_template is not None:
            return self._encode(self._render_history(prompt, (), ()))
        lines = "".join(f"{text}\n" for _, text in _messages_of(prompt))
        return self._encode(([self.turns.instructions, ""], [lines]))

    def encode_next_prompt(
        self,
        path: list[int],
        prompt: InitialPrompt,
        turns: Sequence[str],
        replies: Sequence[Replies],
    ) -> list[int]:
        """Return the ids of the prompt of the next turn, which is sampled after them.

        path: all ids so far. turns: the text of every turn so far. replies: the replies to each.
        """
        last = replies[-1]
        if self.tokenizer.chat_template is None:
            return path + self._encode((["", ""], [self.turns.reply_lines(last)]))
        if self.fork:
            return self._encode(self._render_history(prompt, turns, replies))
        texts = list(map(self._reply_text, last))
        return path + self._encode((self._render_between_turns(len(last)), texts))

    def _render_history(
        self, prompt: InitialPrompt, turns: Sequence[str], replies: Sequence[Replies]
    ) -> Pieces:
        messages: list[Message] = []
        placeholders: list[str] = []
        texts: list[str] = []
        for role, text in _messages_of(prompt, self.turns.instructions):
            placeholders.append(_placeholder(len(placeholders), MESSAGE_PLACEHOLDER))
            messages.append({"role": role, "content": placeholders[-1]})
            texts.append(text)
        word = REPLY_PLACEHOLDER
        while any(word in turn for turn in turns):  # a turn may contain any text
            word += "s"
        for turn, turn_replies in zip(turns, replies, strict=True):
            messages.append({"role": "assistant", "content": turn})
            for reply in turn_replies:
                placeholders.append(_placeholder(len(placeholders), word))
                messages.append(self.turns.reply_message(placeholders[-1]))
                texts.append(self._reply_text(reply))
        return _split_at(self._template.render(messages, prompt=True), placeholders), texts

    def _render_between_turns(self, count: int) -> list[str]:
        """Return the template's text before, between and after `count` replies to a turn."""
        if count not in self._between_turns:
            # The turn has a thought: a template may write an empty thought into the last turn only.
            turn = [EXAMPLE_QUESTION, self.turns.turn_message(THOUGHT)]
            placeholders = [_placeholder(i) for i in range(count)]
            ended = self._template.render_to_turn_end(turn)
            replies = map(self.turns.reply_message, placeholders)
            text = self._template.render([*turn, *replies], prompt=True)
            assert text.startswith(ended), "_check_history refuses such a template"
            self._between_turns[count] = _split_at(text[len(ended) :], placeholders)
        return self._between_turns[count]

    def _reply_text(self, reply: str) -> str:
        """Return the reply as the template writes it."""
        return json.dumps(reply, ensure_ascii=False)[1:-1] if self._escapes else reply

    def _escapes_replies(self) -> bool:
        """Return whether the template writes a reply as the inside of a JSON string, as Llama 3.1.

        Raises UsageError if it writes something else than the reply.
        """
        turn = [EXAMPLE_QUESTION, self.turns.turn_message(THOUGHT)]
        text = self._template.render([*turn, self.turns.reply_message(ODD_REPLY)], prompt=True)
        if ODD_REPLY in text:
            return False
        if json.dumps(ODD_REPLY)[1:-1] not in text:
            raise UsageError(
                "model.path: the chat template does not write a tool's reply as it is, nor as a "
                "JSON string; use another one"
            )
        return True

    def _check_history(self) -> None:
        """Raise UsageError if the template rewrites history, unless fork is set."""
        rewritten = self._rewrites_history()
        if rewritten and not self.fork:
            raise UsageError(
                "task.history: the chat template renders earlier turns anew once there are later "
                "ones (it drops their thoughts, for instance); set task.history=fork to train on "
                "every rewritten history as a sample of its own, or use a template that keeps them"
            )
        if self.fork and not rewritten:
            LOG.warning(
                "task.history: fork has no effect, the chat template keeps earlier turns as they "
                "were"
            )
            self.fork = False

    def _rewrites_history(self) -> bool:
        """Return whether a rendered turn changes, or loses its thought, when messages follow it."""
        turn = self.turns.turn_message(THOUGHT)
        first = [EXAMPLE_QUESTION, turn]
        second = [*first, self.turns.reply_message(_placeholder(0))]
        third = [*second, turn, self.turns.reply_message(_placeholder(1))]
        rendered = [
            self._template.render(first[:1], prompt=True),
            self._template.render_to_turn_end(first),
            self._template.render(second, prompt=True),
            self._template.render(third, prompt=True),
        ]
        kept = all(later.startswith(earlier) for earlier, later in itertools.pairwise(rendered))
        return not kept or THOUGHT_TEXT not in rendered[1]

    def _encode(self, pieces: Pieces) -> list[int]:
        """Return the ids of the pieces' texts in turn: rendered, untrusted, ..., rendered."""
        rendered, texts = pieces
        ids = encode_text(self.tokenizer, rendered[0])
        for text, after in zip(texts, rendered[1:], strict=True):
            ids += encode_text(self.tokenizer, text, untrusted=True)
            ids += encode_text(self.tokenizer, after)
        return ids


def _messages_of(prompt: InitialPrompt, instructions: str = "") -> Sequence[tuple[str, str]]:
    if isinstance(prompt, str):
        return [("user", instructions + prompt)]
    return prompt


def _placeholder(index: int, word: str = REPLY_PLACEHOLDER) -> str:
    return f"{word}{index}x"


def _split_at(text: str, placeholders: Sequence[str]) -> list[str]:
    texts = []
    for placeholder in placeholders:
        before, found, text = text.partition(placeholder)
        if not found:
            raise UsageError("model.path: the chat template leaves out a message; use another one")
        texts.append(before)
    return [*texts, text]
