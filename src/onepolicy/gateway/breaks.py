"""The reason of a new root: the change that a client made to a conversation."""

from __future__ import annotations

from collections.abc import Sequence

from onepolicy.gateway.messages import Message, Request, message_key, tools_key
from onepolicy.gateway.turns import Break, Reason, Turn

LEAST_SUMMARY = 12
"""Characters of a turn that a later question repeats as a summary. An answer such as 19 is in many
questions by chance, a sub-agent's among them."""


def find_break(request: Request, turns: Sequence[Turn]) -> tuple[Reason, Turn | None] | None:
    """Return the change that a request, which continues no turn, made to a conversation.

    turns: all of the episode. The turn is the last one of that conversation, None if no turn is
    known to be of it. None: the request is a conversation of its own.
    """
    if not request.last_assistant:
        turn = _summed_up(request, turns)
        return None if turn is None else (Reason.COMPACTION, turn)
    turn = _nearest(request, turns)
    if turn is not None:
        return _reason(request, turn), turn
    turn = _sent_back(request, turns)
    return Reason.UNKNOWN_ASSISTANT if turn is None else Reason.COMPACTION, turn


def first_difference(reason: Reason, ours: Sequence[int], sent: Sequence[int]) -> Break:
    """Return the break of a path whose tokens were `ours` and are `sent` now."""
    pairs = enumerate(zip(ours, sent, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(sent)))
    return Break(reason, place, _get(ours, place), _get(sent, place))


def _nearest(request: Request, turns: Sequence[Turn]) -> Turn | None:
    """Return the turn whose conversation begins most like the request.

    Of equals the one with its system and tools, then the latest. System messages at the beginning
    do not count. None if no conversation begins like it.
    """
    keys = _body_keys(request.messages)
    leaves = [turn for turn in turns if not turn.children]
    shared = {turn: _common_prefix(keys, _body_keys(turn.conversation)) for turn in leaves}
    alike = [turn for turn in leaves if shared[turn]]
    return max(
        alike,
        key=lambda turn: (shared[turn], _same_agent(request, turn), turn.number),
        default=None,
    )


def _summed_up(request: Request, turns: Sequence[Turn]) -> Turn | None:
    """Return the turn of the request's agent that its question repeats, as a summary does.

    Another agent may have written the summary, of a conversation that it was given.
    """
    for turn in _quoted(request, turns):
        left = [turn, *_quoted(turn.request, turns)]
        left += [each for each in reversed(turns) if each.root is turn.root.origin]
        for each in left:
            if _same_agent(request, each):
                return each
    return None


def _quoted(request: Request, turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns that are in the first question of a request, the latest first."""
    text = _body(request.messages)[0].text
    told = [(turn, turn.message.text.strip()) for turn in reversed(turns)]
    return [turn for turn, said in told if len(said) >= LEAST_SUMMARY and said in text]


def _sent_back(request: Request, turns: Sequence[Turn]) -> Turn | None:
    """Return the turn that is among the request's; of several its agent's, then the latest."""
    sent = {message_key(each) for each in request.messages if each.role == "assistant"}
    found = [turn for turn in turns if message_key(turn.message) in sent]
    return max(found, key=lambda turn: (_same_agent(request, turn), turn.number), default=None)


def _same_agent(request: Request, turn: Turn) -> bool:
    """Return whether a request has the system messages and tools of a turn's."""
    other = turn.request
    systems = _system_keys(request.messages) == _system_keys(other.messages)
    return systems and tools_key(request.tools) == tools_key(other.tools)


def _reason(request: Request, turn: Turn) -> Reason:
    """Return the change to the conversation of a turn that begins like the request."""
    sent, served = _body(request.messages), _body(turn.conversation)
    shared = _common_prefix(list(map(message_key, sent)), list(map(message_key, served)))
    if not any(message.role == "assistant" for message in sent[shared:]):
        return _reason_of_equal_history(request, turn)
    if shared == len(served):
        return Reason.UNKNOWN_ASSISTANT
    return _compare_messages(sent[shared], served[shared], served)


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
