"""Rendering of a model's chat template, which is a program of whoever made the model.

Jinja's sandbox keeps it from files and attributes, but not from memory and endless loops. So a
child with limits renders it (bounded.py), without torch.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from onepolicy import bounded
from onepolicy.bounded import GIB, Limits, Message
from onepolicy.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LIMITS = Limits(memory=GIB, seconds=10)
"""Of one rendering, which takes a millisecond and some MiB of an honest template."""
LONGEST_TEXT, GROWTH = 2**18, 16
"""Characters that a template may write, and how many for each of its question."""
KEPT = 1024
"""Rendered texts that are kept: dialogues render the same placeholders again and again."""


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    prompt: bool = False,
) -> str:
    """Return the messages in the tokenizer's chat template.

    prompt: end with the beginning of the model's turn. Raises UsageError if the template cannot
    write them, or passes a limit.
    """
    given = [dict(tool) for tool in tools] or None
    try:
        question = {
            "chat_template": tokenizer.get_chat_template(None, given),
            "conversations": [list(messages)],
            "tools": given,
            "add_generation_prompt": prompt,
            **tokenizer.special_tokens_map,
        }
        return _rendered(json.dumps(question))
    except (ValueError, TypeError, KeyError, bounded.StoppedError) as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise UsageError(
            f"model.path: the chat template cannot write the roles {roles}: {error}; use another "
            "template"
        ) from None


@lru_cache(KEPT)
def _rendered(question: str) -> str:
    answer = bounded.ask("onepolicy.chat_templates:answer", json.loads(question), LIMITS)
    if "error" in answer.info:
        raise UsageError(answer.info["error"])
    text = answer.arrays["text"].tobytes().decode(errors="surrogatepass")
    if len(text) > LONGEST_TEXT + GROWTH * len(question):
        raise UsageError(f"it writes {len(text):,} characters for {len(question):,}")
    return text


def answer() -> Generator[Message | None, dict[str, Any], None]:
    """Render what `render_chat` asks for, as a task of bounded.py that is asked."""
    from transformers.utils.chat_template_utils import render_jinja_template

    question = yield None
    while True:
        try:
            rendered: Any = render_jinja_template(**question)
            text = rendered[0][0]
        except MemoryError:
            raise
        except Exception as error:  # a program of the template's author: anything may come of it
            question = yield Message({"error": f"{type(error).__name__}: {str(error)[:400]}"})
            continue
        data = np.frombuffer(text.encode(errors="surrogatepass"), np.uint8)
        question = yield Message({}, {"text": data})
