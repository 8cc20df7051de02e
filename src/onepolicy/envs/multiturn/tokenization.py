"""Conversion between text and token ids."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from onepolicy.chat_templates import render_chat


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Return the ids of one user message in the tokenizer's chat template.

    Without a template, return the ids of the plain prompt.
    """
    if tokenizer.chat_template is None:
        return tokenizer.encode(prompt, add_special_tokens=False)
    text = render_chat(tokenizer, [{"role": "user", "content": prompt}], prompt=True)
    # The template has already written the special tokens.
    return tokenizer.encode(text, add_special_tokens=False)


def encode_text(
    tokenizer: PreTrainedTokenizerBase, text: str, *, untrusted: bool = False
) -> list[int]:
    """Return the ids of a text. untrusted: encode special tokens in it as plain characters."""
    ids: list[int] = tokenizer.encode(
        text, add_special_tokens=False, split_special_tokens=untrusted
    )
    return ids


def decode_tokens(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the exact text of these ids without special tokens."""
    text = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text
