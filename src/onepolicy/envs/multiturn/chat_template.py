"""Dialogues in the tokenizer's chat template: the first prompt and the tokens between two turns.

Sampled tokens are never tokenised again. Untrusted text (questions and replies) is tokenised with
special tokens split into plain text, so no reply can end a turn or open another.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from onepolicy.config import UsageError
from onepolicy.envs.multiturn.tokenization import encode_text

LOG = logging.getLogger(__name__)

Message = dict[str, Any]
Replies = Sequence[str]
"""The replies to one turn."""
InitialPrompt = str | Sequence[tuple[str, str]]
"""A question, or (role, text) of every message before the first turn."""

# Placeholders are rendered in place of texts, then found again in the rendered template.
QUESTION_PLACEHOLDER = "textofquestion"
MESSAGE_PLACEHOLDER = "textofmessage"
REPLY_PLACEHOLDER = "textofreply"
THOUGHT_END = "</think>"
THOUGHT_TEXT = "athought"
THOUGHT = f"<think>\n{THOUGHT_TEXT}\n{THOUGHT_END}\n\n"


class TemplateDialogue:
    """Renderer of prompts and replies in a chat template.

    A subclass defines the messages of a turn and of a reply. It calls `_check_history` as soon as
    both can be rendered.
    """

    instructions = ""
    """Text before a prompt that is one question."""
    schemas: Sequence[Any] = ()
    """Tools that the template prints."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, fork: bool) -> None:
        """Store the settings.

        fork: render the whole history anew for every turn, as the template defines it. Otherwise
        only the new messages are rendered.
        """
        self.tokenizer, self.fork = tokenizer, fork
        self._user = {"role": "user", "content": QUESTION_PLACEHOLDER}
        self._between_turns: dict[int, list[str]] = {}  # number of replies -> texts around them

    def turn_message(self, content: str) -> Message:
        """Return an example turn of the policy, to see which text the template puts around it."""
        raise NotImplementedError

    def reply_message(self, content: str) -> Message:
        """Return a reply with this content."""
        raise NotImplementedError

    def encode_first_prompt(self, prompt: InitialPrompt) -> list[int]:
        messages, placeholders, texts = self._with_placeholders(prompt)
        return self._encode_filled(self._render(messages, prompt=True), placeholders, texts)

    def encode_next_prompt(
        self,
        path: list[int],
        prompt: InitialPrompt,
        turns: Sequence[str],
        replies: Sequence[Replies],
    ) -> list[int]:
        if self.fork:
            return self._encode_history(prompt, turns, replies)
        between = self._render_between_turns(len(replies[-1]))
        return path + self._encode_alternating(between, replies[-1])

    def _with_placeholders(
        self, prompt: InitialPrompt
    ) -> tuple[list[Message], list[str], list[str]]:
        """Return the messages with placeholders for their texts, the placeholders and the texts."""
        if isinstance(prompt, str):
            return [self._user], [QUESTION_PLACEHOLDER], [self.instructions + prompt]
        placeholders = [_placeholder(i, MESSAGE_PLACEHOLDER) for i in range(len(prompt))]
        messages = [
            {"role": role, "content": placeholder}
            for (role, _), placeholder in zip(prompt, placeholders, strict=True)
        ]
        return messages, placeholders, [text for _, text in prompt]

    def _render_between_turns(self, count: int) -> list[str]:
        """Return the template's text before, between and after `count` replies to a turn."""
        if count not in self._between_turns:
            # The turn has a thought: a template may write an empty thought into the last turn only.
            turn = [self._user, self.turn_message(THOUGHT)]
            placeholders = [_placeholder(i) for i in range(count)]
            ended = self._render_to_turn_end(turn)
            text = self._render([*turn, *map(self.reply_message, placeholders)], prompt=True)
            assert text.startswith(ended), "_check_history refuses such a template"
            self._between_turns[count] = _split_at(text[len(ended) :], placeholders)
        return self._between_turns[count]

    def _encode_history(
        self, prompt: InitialPrompt, turns: Sequence[str], replies: Sequence[Replies]
    ) -> list[int]:
        messages, placeholders, texts = self._with_placeholders(prompt)
        word = REPLY_PLACEHOLDER
        while any(word in turn for turn in turns):  # a turn may contain any text
            word += "s"
        for turn, turn_replies in zip(turns, replies, strict=True):
            messages.append({"role": "assistant", "content": turn})
            for reply in turn_replies:
                placeholders.append(_placeholder(len(placeholders), word))
                messages.append(self.reply_message(placeholders[-1]))
                texts.append(reply)
        return self._encode_filled(self._render(messages, prompt=True), placeholders, texts)

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
        turn = self.turn_message(THOUGHT)
        first = [self._user, turn]
        second = [*first, self.reply_message(_placeholder(0))]
        third = [*second, turn, self.reply_message(_placeholder(1))]
        rendered = [
            self._render([self._user], prompt=True),
            self._render_to_turn_end(first),
            self._render(second, prompt=True),
            self._render(third, prompt=True),
        ]
        kept = all(later.startswith(earlier) for earlier, later in itertools.pairwise(rendered))
        return not kept or THOUGHT_TEXT not in rendered[1]

    def _render_to_turn_end(self, messages: Sequence[Message]) -> str:
        """Return the rendered text up to the token that ends the last turn."""
        eos = str(self.tokenizer.eos_token)
        before, ended, _ = self._render(messages).rpartition(eos)
        if not ended:
            raise UsageError(
                f"model.path: the chat template does not end a turn with the tokenizer's {eos!r}"
            )
        return before + ended

    def _render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        from onepolicy.chat_templates import render_chat

        return render_chat(self.tokenizer, messages, tools=self.schemas, prompt=prompt)

    def _encode_filled(
        self, rendered: str, placeholders: Sequence[str], texts: Sequence[str]
    ) -> list[int]:
        return self._encode_alternating(_split_at(rendered, placeholders), texts)

    def _encode_alternating(self, rendered: Sequence[str], texts: Sequence[str]) -> list[int]:
        """Return the ids of rendered[0], texts[0], rendered[1], texts[1], ... rendered[-1]."""
        ids = encode_text(self.tokenizer, rendered[0])
        for text, after in zip(texts, rendered[1:], strict=True):
            ids += encode_text(self.tokenizer, text, untrusted=True)
            ids += encode_text(self.tokenizer, after)
        return ids


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
