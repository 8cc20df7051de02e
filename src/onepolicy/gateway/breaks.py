"""The reason of a new root: the change that a client made to a conversation."""

from __future__ import annotations

from collections.abc import Sequence

from onepolicy.gateway.messages import Message, Request, message_key, tools_key
from onepolicy.gateway.turns import Break, Reason, Turn

LEAST_SUMMARY = 12
"""Characters of a turn that a later question repeats as a summary. An answer such as 19 is in many
questions by chance, a sub-agent's among them."""


def nearest_turn(request: Request, turns: Sequence[Turn]) -> Turn | None:
    """Return the turn whose conversation begins most like the request; of equals the latest.

    System messages at the beginning do not count. None if no conversation begins like it.
    """
    keys = _body_keys(request.messages)
    best: Turn | None = None
    most = 1
    for turn in turns:
        shared = _common_prefix(keys, _body_keys(turn.conversation))
        if shared >= most:
            best, most = turn, shared
    return best


def find_reason(request: Request, turn: Turn | None, turns: Sequence[Turn]) -> Reason | None:
    """Return the change that a request, which continues no turn, made to `turn`'s conversation.

    turn: `nearest_turn`. turns: all of the episode. None: it is a conversation of its own.
    """
    sent = _body(request.messages)
    if not request.last_assistant or turn is None:
        return _reason_without_history(request, turns)
    served = _body(turn.conversation)
    shared = _common_prefix(list(map(message_key, sent)), list(map(message_key, served)))
    if not any(message.role == "assistant" for message in sent[shared:]):
        return _reason_of_equal_history(request, turn)
    if shared == len(served):
        return Reason.UNKNOWN_ASSISTANT
    return _compare_messages(sent[shared], served[shared], served)


def first_difference(reason: Reason, ours: Sequence[int], sent: Sequence[int]) -> Break:
    """Return the break of a path whose tokens were `ours` and are `sent` now."""
    pairs = enumerate(zip(ours, sent, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(sent)))
    return Break(reason, place, _get(ours, place), _get(sent, place))


def _reason_without_history(request: Request, turns: Sequence[Turn]) -> Reason | None:
    """Return the reason for a request that begins like no conversation, or has no turn of ours."""
    texts = [message.text for message in _body(request.messages)]
    for turn in turns:
        told = turn.message.text.strip()
        summed_up = len(told) >= LEAST_SUMMARY and any(told in text for text in texts[:1])
        same_agent = _system_keys(request.messages) == _system_keys(turn.request.messages) and (
            tools_key(request.tools) == tools_key(turn.request.tools)
        )
        if summed_up and same_agent and not request.last_assistant:
            return Reason.COMPACTION
    if not request.last_assistant:
        return None
    served = {message_key(turn.message) for turn in turns}
    if any(message_key(m) in served for m in request.messages if m.role == "assistant"):
        return Reason.COMPACTION
    return Reason.UNKNOWN_ASSISTANT


def _reason_of_equal_history(request: Request, turn: Turn) -> Reason:
    """Return the reason if every message up to the last turn is as it was."""
    if _system_keys(request.messages) != _system_keys(turn.request.messages):
        return Reason.SYSTEM_CHANGED
    if tools_key(request.tools) != tools_key(turn.request.tools):
        return Reason.TOOLS_CHANGED
    turns = [message for message in request.messages if message.role == "assistant"]
    if any(message.thought for message in turns):
        return Reason.UNKNOWN_ASSISTANT  # with other thoughts than it had
    return Reason.THOUGHTS_DROPPED


def _compare_messages(sent: Message, served: Message, conversation: Sequence[Message]) -> Reason:
    """Return the reason from the first two messages that differ."""
    if "system" in (sent.role, served.role):
        return Reason.SYSTEM_CHANGED
    if sent.role != "assistant":
        return Reason.COMPACTION
    if message_key(sent) in {message_key(message) for message in conversation}:
        return Reason.COMPACTION  # those before it were left out
    if served.role != "assistant":
        return Reason.UNKNOWN_ASSISTANT
    text = sent.text.strip()
    shorter = text != served.text.strip() or len(sent.calls) < len(served.calls)
    if shorter and served.text.strip().startswith(text) and (text or not sent.calls):
        return Reason.TRUNCATED_TURN
    return Reason.UNKNOWN_ASSISTANT


def _body(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages after the system messages at the beginning."""
    first = next((i for i, each in enumerate(messages) if each.role != "system"), len(messages))
    return messages[first:]


def _system_keys(messages: Sequence[Message]) -> list[bytes]:
    return [message_key(each) for each in messages[: len(messages) - len(_body(messages))]]


def _body_keys(messages: Sequence[Message]) -> list[bytes]:
    return [message_key(message) for message in _body(messages)]


def _common_prefix(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _get(ids: Sequence[int], place: int) -> int | None:
    if place < len(ids):
        return ids[place]
    return None
