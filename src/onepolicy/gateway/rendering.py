"""Messages to token ids by the model's chat template, and token ids of a turn to a message.

As in the episodes of envs/multiturn, placeholders are rendered in place of texts. So the template
runs without a program's texts, and each of them is tokenised on its own, with special tokens split
into plain characters: no text can end a turn or open another.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from onepolicy.chat_templates import render_chat
from onepolicy.config import UsageError
from onepolicy.envs.multiturn.call_format import (
    ARGUMENT_PLACEHOLDER,
    CALL_ID,
    NAME_PLACEHOLDER,
    VALUE_PLACEHOLDER,
    CallFormat,
    find_call_format,
)
from onepolicy.envs.multiturn.dialogue import (
    EXAMPLE_QUESTION,
    ODD_REPLY,
    THOUGHT,
    THOUGHT_END,
    THOUGHT_START,
    ChatTemplate,
    split_thoughts,
)
from onepolicy.envs.multiturn.tokenization import encode_text
from onepolicy.gateway.messages import Call, Message, RequestError, Tool
from onepolicy.gateway.unknown import UnknownText, without_surrogates

TURN_PLACEHOLDER = "textofturn"
EXAMPLE_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": NAME_PLACEHOLDER,
        "description": "An example.",
        "parameters": {"type": "object", "properties": {ARGUMENT_PLACEHOLDER: {"type": "string"}}},
    },
}


class Placeholders:
    """Texts, and the placeholders that are rendered in their place."""

    def __init__(self, texts: Sequence[str], special: Sequence[str]) -> None:
        """Choose a word that is in none of the texts. special: the tokenizer's special tokens."""
        self._word = "textofmessage"
        while any(self._word in text for text in texts):
            self._word = f"textofmessage{secrets.token_hex(8)}x"
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len)[::-1])))
        self.texts: list[str] = []
        self.required: set[int] = set()

    def hide(self, text: str, *, required: bool = True) -> str:
        """Return a placeholder. required: the template must write it."""
        if required:
            self.required.add(len(self.texts))
        self.texts.append(text)
        return f"{self._word}{len(self.texts) - 1}x"

    def hide_turn(self, text: str) -> str:
        """Return a turn of the assistant: its texts hidden, the marks of its thoughts as they are.

        A template may leave out the thoughts.
        """
        parts = re.split(f"({THOUGHT_START}|{THOUGHT_END})", text)
        last, hidden = len(parts) - 1, []
        for i, part in enumerate(parts):
            if i % 2:
                hidden.append(part)
                continue
            rest = part.lstrip() if i else part  # white space beside a mark stays
            inner = rest.rstrip() if i < last else rest
            before = part[: len(part) - len(rest)]
            hide = self.hide(inner, required=i == last) if inner else ""
            hidden += [before, hide, rest[len(inner) :]]
        return "".join(hidden)

    def hide_special(self, value: Any) -> Any:
        """Return JSON whose strings have no special tokens in them."""
        if isinstance(value, str):
            return self._special.sub(lambda found: self.hide(found[0], required=False), value)
        if isinstance(value, Mapping):
            return {
                self.hide_special(key): self.hide_special(inner) for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.hide_special(inner) for inner in value]
        return value

    def encode(self, tokenizer: PreTrainedTokenizerBase, rendered: str) -> list[int]:
        """Return the ids of a rendered text with the hidden texts in it.

        Raises RequestError if the template left out a text.
        """
        parts = re.split(f"{self._word}([0-9]+)x", rendered)
        numbers = [int(part) for part in parts[1::2]]
        if not self.required <= set(numbers):
            raise RequestError("the model's chat template leaves out one of these messages")
        ids = encode_text(tokenizer, without_surrogates(parts[0]))
        for number, after in zip(numbers, parts[2::2], strict=True):
            text = without_surrogates(self.texts[number])
            ids += encode_text(tokenizer, text, untrusted=True)
            ids += encode_text(tokenizer, without_surrogates(after))
        return ids


class Renderer:
    """A tokenizer and its chat template, as the gateway uses them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Read off the template how calls are written. Raises UsageError without a template."""
        if tokenizer.chat_template is None:
            raise UsageError(
                "model.path: its tokenizer has no chat template, which the gateway writes messages "
                "by; give one by --template FILE, or use a model with one"
            )
        self.tokenizer = tokenizer
        self.unknown = UnknownText(tokenizer)
        self.calls: CallFormat | None = None
        self.no_calls = ""  # why this template's calls cannot be read
        example = _template_turn("", [_example_call(CALL_ID, NAME_PLACEHOLDER)])
        try:
            template = ChatTemplate(tokenizer, [EXAMPLE_TOOL])
            self.calls = find_call_format(template, [NAME_PLACEHOLDER], example)
        except UsageError as error:
            self.no_calls = str(error).removeprefix("task.tools: ")
        self._starts_in_thought = ChatTemplate(tokenizer, ()).starts_in_thought()
        self._late_system = "system"
        if not self._writes_late_system():
            self._late_system = "user"
        self._escapes = self._escapes_replies()
        self._joins_users = self._example([EXAMPLE_QUESTION, EXAMPLE_QUESTION]) is None

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the ids of a conversation up to the beginning of the next turn."""
        hidden = self._placeholders(messages, tools)
        leading = next((i for i, each in enumerate(messages) if each.role != "system"), 0)
        if leading > 1:  # templates know one system message
            text = "\n\n".join(message.text for message in messages[:leading])
            messages = [Message("system", text), *messages[leading:]]
        written = self._write(messages, hidden, first=True)
        return hidden.encode(self.tokenizer, self._render(written, tools, hidden))

    def encode_tail(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, ended: bool
    ) -> list[int]:
        """Return the ids between a turn's tokens and the beginning of the next turn.

        messages: the turn as the client sent it, whose calls have the ids that replies name, and
        what follows it. ended: the last token of the turn is the one that ends turns.
        """
        turn, *tail = messages
        hidden = self._placeholders(messages, tools)
        calls = [
            _example_call(hidden.hide_special(call.id), hidden.hide_special(call.name))
            for call in turn.calls
        ]
        example = _template_turn(f"{THOUGHT}{TURN_PLACEHOLDER}", calls)
        written = [EXAMPLE_QUESTION, example, *self._write(tail, hidden, turn.calls)]
        mark = TURN_PLACEHOLDER
        if calls:
            mark = VALUE_PLACEHOLDER
        eos = str(self.tokenizer.eos_token)
        after_turn = self._render(written, tools, hidden).rpartition(mark)[2]
        _, found, text = after_turn.partition(eos)
        if not found:
            raise RequestError(
                f"the model's chat template does not end a turn with the tokenizer's {eos!r}"
            )
        ids = hidden.encode(self.tokenizer, text)
        if ended:
            return ids
        return [int(self.tokenizer.eos_token_id), *ids]

    def read_turn(self, text: str, tools: Sequence[Tool], first_call: int) -> Message:
        """Return a sampled turn as a message.

        Calls get the ids from number `first_call` on. Calls that are not written as the template
        writes them are text.
        """
        thought, rest = split_thoughts(text, opened=self._starts_in_thought)
        if not tools or self.calls is None:
            return Message("assistant", rest, thought)
        read = [self.calls.read(call) for call in self.calls.find(rest)]
        if not read or None in read:
            return Message("assistant", rest, thought)
        before = rest[: rest.index(self.calls.start)].strip()
        calls = [
            Call(f"call{first_call + i:05d}", call[0], json.dumps(call[1]))
            for i, call in enumerate(read)
            if call is not None
        ]
        return Message("assistant", before, thought, tuple(calls))

    def _placeholders(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Placeholders:
        texts = [json.dumps(list(tools))]
        for message in messages:
            texts += [message.text, message.thought]
            texts += [f"{call.name} {call.arguments}" for call in message.calls]
        added = self.tokenizer.added_tokens_decoder.values()
        return Placeholders(texts, [str(token) for token in added if token.special])

    def _write(
        self,
        messages: Sequence[Message],
        hidden: Placeholders,
        calls: Sequence[Call] = (),
        *,
        first: bool = False,
    ) -> list[dict[str, Any]]:
        """Return messages for the template.

        calls: of the message before them. first: they begin the conversation.
        """
        names = {call.id: call.name for call in calls}
        written: list[dict[str, Any]] = []
        for message in messages:
            names |= {call.id: call.name for call in message.calls}
            role: str = message.role
            if role == "system" and (written or not first):
                role = self._late_system
            if role == "assistant":
                written.append(_write_turn(message, hidden))
                continue
            text = message.text
            if role == "tool" and self._escapes:
                text = json.dumps(text, ensure_ascii=False)[1:-1]
            entry: dict[str, Any] = {"role": role, "content": hidden.hide(text)}
            if role == "user" and self._joins_users and written and written[-1]["role"] == "user":
                written[-1]["content"] += f"\n\n{entry['content']}"
                continue
            if role == "tool":
                entry["tool_call_id"] = hidden.hide_special(message.call_id)
                name = names.get(message.call_id, NAME_PLACEHOLDER)
                entry["name"] = hidden.hide_special(name)
            written.append(entry)
        return written

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], hidden: Placeholders
    ) -> str:
        try:
            safe = [hidden.hide_special(tool) for tool in tools]
            return render_chat(self.tokenizer, messages, tools=safe, prompt=True)
        except RequestError:
            raise
        except UsageError as error:
            raise RequestError(str(error).removeprefix("model.path: ")) from None

    def _example(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the template's text of these messages, None if it refuses them."""
        try:
            return render_chat(self.tokenizer, messages)
        except UsageError:
            return None

    def _writes_late_system(self) -> bool:
        """Return whether the template writes a system message after the first one as such."""
        late = {"content": "latemessage"}
        texts = [
            self._example([EXAMPLE_QUESTION, late | {"role": role}, EXAMPLE_QUESTION]) or ""
            for role in ("system", "assistant")
        ]
        return "latemessage" in texts[0] and texts[0] != texts[1]

    def _escapes_replies(self) -> bool:
        """Return whether it writes a tool's reply as the inside of a JSON string, as Llama 3.1."""
        turn = _template_turn("", [_example_call(CALL_ID, NAME_PLACEHOLDER)])
        reply = {"role": "tool", "content": ODD_REPLY, "tool_call_id": CALL_ID}
        reply["name"] = NAME_PLACEHOLDER
        text = self._example([EXAMPLE_QUESTION, turn, reply]) or ODD_REPLY
        return ODD_REPLY not in text and json.dumps(ODD_REPLY)[1:-1] in text


def _example_call(number: str, name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": {ARGUMENT_PLACEHOLDER: VALUE_PLACEHOLDER}}
    return {"type": "function", "id": number, "function": function}


def _template_turn(content: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        turn["tool_calls"] = list(calls)
    return turn


def _write_turn(message: Message, hidden: Placeholders) -> dict[str, Any]:
    text = message.text
    if message.thought:
        text = f"{THOUGHT_START}\n{message.thought}\n{THOUGHT_END}\n\n{text}"
    calls = [
        {
            "type": "function",
            "id": hidden.hide_special(call.id),
            "function": {
                "name": hidden.hide_special(call.name),
                "arguments": hidden.hide_special(call.values()),
            },
        }
        for call in message.calls
    ]
    return _template_turn(hidden.hide_turn(text), calls)
