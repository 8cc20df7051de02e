"""Episodes in which the policy talks: a whole turn is what it says, what it is told next is a user's message."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from onepolicy.envs.multiturn.chat_template import THOUGHT_END, ChatTurns, Message, Opening, Replies
from onepolicy.envs.multiturn.render import encode
from onepolicy.envs.multiturn.tool_dialogue import Dialogue


class PlainTalk:
    """For models without a chat template: texts and turns on lines of their own."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def start(self, opening: Opening) -> list[int]:
        texts = [opening] if isinstance(opening, str) else [text for _, text in opening]
        return encode(self.tokenizer, "".join(f"{text}\n" for text in texts), outside=True)

    def following(
        self, path: list[int], opening: Opening, turns: Sequence[str], replies: Sequence[Replies]
    ) -> list[int]:
        return path + encode(
            self.tokenizer, "\n" + "".join(f"{reply}\n" for reply in replies[-1]), outside=True
        )


class ChatTalk(ChatTurns):
    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, fork: bool) -> None:
        super().__init__(tokenizer, fork=fork)
        self._check_history()

    def turn_message(self, content: str) -> Message:
        return {"role": "assistant", "content": f"{content}textofturn"}

    def reply_message(self, content: str) -> Message:
        return {"role": "user", "content": content}


def build_talk(tokenizer: PreTrainedTokenizerBase, *, fork: bool) -> Dialogue:
    return (
        PlainTalk(tokenizer) if tokenizer.chat_template is None else ChatTalk(tokenizer, fork=fork)
    )


def said(turn: str) -> str:
    """What a turn says out loud: the text after its thoughts."""
    return turn.rpartition(THOUGHT_END)[2].strip()
