"""Characters and tokens that the tokenizer lacks, and whose they are.

A prompt has texts of the program, turns that the policy sampled, and words of the template. Only
the first are what a program sent: a turn that is rendered anew may have characters that the policy
wrote as JSON escapes, or bytes of it that are no text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from onepolicy.envs.multiturn.tokenization import encode_text
from onepolicy.gateway.messages import Message, Tool
from onepolicy.gateway.turns import Reason, Turn

LOG = logging.getLogger(__name__)
TOLD = {
    Reason.UNKNOWN_CHARACTERS: "a program sent characters that the tokenizer does not know; the "
    "policy reads %s in their place",
    Reason.UNKNOWN_TOKENS: "the policy's own turns have tokens or characters that the tokenizer "
    "does not know; programs read a turn without such tokens, and %s stands for such characters in "
    "a turn that is rendered anew",
    None: "the model's chat template writes characters that the tokenizer does not know; the "
    "policy reads %s in their place",
}


WITHOUT_TOKEN = (
    "the policy sampled ids that the tokenizer has no token for; programs read a turn without them"
)


class UnknownText:
    """The search for text that a tokenizer does not know. The first find of each kind is told."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._told: set[Reason | None] = set()

    def find(
        self,
        rendered: Sequence[int],
        messages: Iterable[Message],
        tools: Iterable[Tool],
        turns: Sequence[Turn],
    ) -> tuple[Reason, ...]:
        """Return whose characters the ids of messages lack, none if the template's own.

        rendered: the ids of the messages. turns: all of the episode.
        """
        if not self._is_in(rendered):
            return ()
        sampled = "\n".join(text for turn in turns for text in _texts(turn.message))
        found: set[Reason | None] = set()
        for message in messages:
            for part in self._unknown_parts(_texts(message)):
                reason = Reason.UNKNOWN_CHARACTERS
                if message.role == "assistant" and part in sampled:
                    reason = Reason.UNKNOWN_TOKENS
                found.add(reason)
        if self._unknown_parts(_strings(list(tools))):
            found.add(Reason.UNKNOWN_CHARACTERS)
        for each in found or {None}:
            self._tell(each)
        return tuple(sorted(each for each in found if each is not None))

    def has_sampled(self, ids: Sequence[int]) -> bool:
        """Return whether the policy sampled the unknown token, or an id that has no token."""
        if not self._is_in(ids) and None not in self._tokenizer.convert_ids_to_tokens(list(ids)):
            return False
        self._tell(Reason.UNKNOWN_TOKENS)
        return True

    def _is_in(self, ids: Sequence[int]) -> bool:
        unknown = self._tokenizer.unk_token_id
        # Some tokenizers name the token that ends turns as their unknown one, and know every text.
        return unknown is not None and unknown != self._tokenizer.eos_token_id and unknown in ids

    def _unknown_parts(self, texts: Iterable[str]) -> set[str]:
        """Return the characters of texts that are unknown, or the words if each of these is known.

        Tokenizers of words know every letter and yet not every word.
        """
        parts: set[str] = set()
        for text in texts:
            if self._lacks(text):
                characters = set(filter(self._lacks, set(text)))
                parts |= characters or set(filter(self._lacks, set(text.split()))) or {text}
        return parts

    def _lacks(self, text: str) -> bool:
        return self._is_in(encode_text(self._tokenizer, without_surrogates(text), untrusted=True))

    def _tell(self, reason: Reason | None) -> None:
        if reason not in self._told:
            self._told.add(reason)
            if self._tokenizer.unk_token is None:  # it knows every text
                LOG.warning(WITHOUT_TOKEN)
            else:
                LOG.warning(TOLD[reason], self._tokenizer.unk_token)


def without_surrogates(text: str) -> str:
    """Return the text without lone surrogates, which JSON allows and UTF-8 does not."""
    return text.encode(errors="replace").decode()


def _texts(message: Message) -> Iterator[str]:
    """Yield the texts of a message that a template may write."""
    yield message.text
    yield message.thought
    for call in message.calls:
        yield call.name
        yield from _strings(call.values())


def _strings(value: Any) -> Iterator[str]:
    """Yield the strings of JSON, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner)
