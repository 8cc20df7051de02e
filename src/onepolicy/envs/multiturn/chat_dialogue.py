"""Dialogues without tools: a turn is the whole response, and the reply is the next user message."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from onepolicy.envs.multiturn.chat_template import (
    THOUGHT_END,
    InitialPrompt,
    Message,
    Replies,
    TemplateDialogue,
)
from onepolicy.envs.multiturn.tokenization import encode_text
from onepolicy.envs.multiturn.tool_dialogue import Dialogue


class PlainChatDialogue:
    """A dialogue for models without a chat template: every message and turn ends with a newline."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def encode_first_prompt(self, prompt: InitialPrompt) -> list[int]:
        if isinstance(prompt, str):
            texts = [prompt]
        else:
            texts = [text for _, text in prompt]
        return encode_text(self.tokenizer, "".join(f"{text}\n" for text in texts), untrusted=True)

    def encode_next_prompt(
        self,
        path: list[int],
        prompt: InitialPrompt,
        turns: Sequence[str],
        replies: Sequence[Replies],
    ) -> list[int]:
        text = "\n" + "".join(f"{reply}\n" for reply in replies[-1])
        return path + encode_text(self.tokenizer, text, untrusted=True)


class TemplateChatDialogue(TemplateDialogue):
    """A dialogue in the tokenizer's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, fork: bool) -> None:
        super().__init__(tokenizer, fork=fork)
        self._check_history()

    def turn_message(self, content: str) -> Message:
        return {"role": "assistant", "content": f"{content}textofturn"}

    def reply_message(self, content: str) -> Message:
        return {"role": "user", "content": content}


def build_chat_dialogue(tokenizer: PreTrainedTokenizerBase, *, fork: bool) -> Dialogue:
    """Build a dialogue in the tokenizer's chat template, or in plain text if it has no template."""
    if tokenizer.chat_template is None:
        return PlainChatDialogue(tokenizer)
    return TemplateChatDialogue(tokenizer, fork=fork)


def strip_thoughts(turn: str) -> str:
    """Return a turn's text after its thoughts."""
    return turn.rpartition(THOUGHT_END)[2].strip()
