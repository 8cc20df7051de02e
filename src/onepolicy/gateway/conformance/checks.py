"""A transcript against a gateway: its answers, and the tree that came of them.

An expectation says of a request, in its fields, all of them optional but one of the first four:

- `parent`: number of the request whose turn it continues, null for the beginning of a conversation
- `repeats`: number of the request whose answer it gets again, without another turn
- `counts`: number of the request whose prompt has as many tokens
- `status`: statuses of the error that it gets
- `reason`: of the conversation's beginning; null, or not given: it breaks no other one
- `facts`, `lacks`: facts about the turn that are there, and that are not
- `auxiliary`, `abandoned`: whether the turn is one that is not trained on
- `tokens`: most sampled ones
- `needs`: "key": it is left out if the gateway has no key
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onepolicy.gateway.conformance.answers import Answer, Body, Illegal, read_events
from onepolicy.gateway.conformance.client import Client, NoAnswer, Reply
from onepolicy.gateway.conformance.transcripts import Transcript, body_of, lacks

HIGHEST_LOGP = 1e-4
"""Log-probabilities are at most 0, but for rounding."""

LONG = 2_000
"""Characters of a first request that may be too long for a small model."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a transcript. check: the one that failed, "" if none did. why: in words.

    left_out: something that it needs is missing. not_run: there was no time for all of it.
    """

    transcript: Transcript
    check: str = ""
    why: str = ""
    left_out: bool = False
    not_run: bool = False
    sees_tree: bool = False


class Failure(Exception):
    """A check that failed."""

    def __init__(self, check: str, why: str) -> None:
        super().__init__(why)
        self.check = check


class LeftOut(Exception):
    """A transcript that cannot be played to its end, and why."""


async def check_transcript(transcript: Transcript, client: Client) -> Outcome:
    """Play a transcript and compare its answers and its tree."""
    sees_tree = client.shows_trees
    outcome = Outcome(transcript, sees_tree=sees_tree)
    try:
        await client.begin(transcript.name)
        answers = await _play(transcript, client)
        if sees_tree:
            tree = await client.tree()
            try:
                _check_tree(transcript, answers, tree)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                told = f"a tree in another shape ({type(error).__name__}: {error})"
                raise Failure("tree", told) from None
    except Failure as failure:
        outcome = replace(outcome, check=failure.check, why=client.hide(str(failure)))
    except NoAnswer as error:
        outcome = replace(outcome, check="answer", why=client.hide(str(error)))
    except LeftOut as reason:
        outcome = replace(outcome, why=client.hide(str(reason)), left_out=True)
    if sees_tree:
        why = await end_episode(client)
        if why and not outcome.check:
            outcome = replace(outcome, check="end", why=client.hide(why))
    return outcome


async def end_episode(client: Client) -> str:
    """End the episode, of which the gateway then keeps nothing. Return why it does not end."""
    try:
        reply = await client.end()
    except NoAnswer as error:
        return str(error)
    if reply.status != 200:
        return f"the episode is not ended: {reply.status}: {reply.text[:200]}"
    return ""


async def _play(transcript: Transcript, client: Client) -> list[Answer | None]:
    """Return the answers to all requests, None for one that gets an error or a number."""
    answers: list[Answer | None] = []
    counted: dict[int, int] = {}
    for number, request in enumerate(transcript.requests):
        expected = _first(transcript.expect[number])
        if expected.get("needs") == "key" and not client.has_key:
            continue
        body = body_of(transcript, number, answers, client.model)
        path = transcript.path + "/count_tokens" * bool(request.get("count"))
        reply = await client.send(path, body, request.get("headers") or {})
        was_served = any(answer is not None for answer in answers)
        if "status" not in expected and (was_served or len(str(body)) > LONG):
            _leave_out_long(reply)
        where = f"request {number}"
        if "status" in expected:
            _check_error(transcript, reply, expected["status"], where)
            answers.append(None)
        elif "counts" in expected:
            counted[expected["counts"]] = _count_of(reply, where)
            answers.append(None)
        else:
            answer = _read(transcript, reply, body, where)
            answers.append(answer)
            _check_answer(answer, expected, where)
            _check_against(answers, transcript.expect[number], where)
            if number in counted and counted[number] != answer.prompt_tokens:
                told = f"{where}: {counted[number]} tokens were counted, and it has"
                raise Failure("usage", f"{told} {answer.prompt_tokens}")
            _leave_out_lacking(transcript, number, answers)
    return answers


def _leave_out_long(reply: Reply) -> None:
    """Raise LeftOut for an error that says that the conversation is too long."""
    said = reply.text.lower()
    if reply.status in (400, 413, 422) and ("context" in said or "too long" in said):
        raise LeftOut(f"the conversation is too long for the model: {reply.text[:200]}")


def _check_error(transcript: Transcript, reply: Reply, expected: list[int], where: str) -> None:
    if reply.status not in expected:
        raise Failure("error", f"{where}: status {reply.status}, expected one of {expected}")
    try:
        transcript.reader.check_error(reply.json())
    except Illegal as fault:
        raise Failure("error", f"{where}: an error in another shape: {fault}") from None


def _count_of(reply: Reply, where: str) -> int:
    body = reply.json()
    if reply.status == 200 and isinstance(body, dict) and isinstance(body.get("input_tokens"), int):
        return int(body["input_tokens"])
    raise Failure("answer", f"{where}: status {reply.status}, no input_tokens: {reply.text[:200]}")


def _read(transcript: Transcript, reply: Reply, body: Body, where: str) -> Answer:
    """Return the answer that a reply holds. Raises Failure."""
    if reply.status != 200:
        raise Failure("answer", f"{where}: status {reply.status}: {reply.text[:200]}")
    if not body.get("stream"):
        try:
            return transcript.reader.read(reply.json())
        except Illegal as fault:
            raise Failure("answer", f"{where}: {fault}") from None
    if "text/event-stream" not in reply.kind:
        raise Failure("stream", f"{where}: a stream was asked for, and {reply.kind!r} came")
    try:
        return transcript.reader.read_stream(read_events(reply.text), body)
    except Illegal as fault:
        raise Failure("stream", f"{where}: {fault}") from None


def _leave_out_lacking(
    transcript: Transcript, number: int, answers: Sequence[Answer | None]
) -> None:
    """Raise LeftOut for an answer without the parts that the transcript needs."""
    if number in transcript.needs:
        lacking = lacks(answers, transcript.needs[number])
        if lacking:
            raise LeftOut(f"the model: {lacking} (request {number})")


def _check_answer(answer: Answer, expected: Body, where: str) -> None:
    """Check the numbers that a client is told."""
    if answer.tokens == 0 or answer.prompt_tokens == 0:
        raise Failure("usage", f"{where}: {answer.prompt_tokens} and {answer.tokens} tokens")
    if answer.tokens > expected.get("tokens", answer.tokens):
        told = f"{answer.tokens} tokens, with a limit of {expected['tokens']}"
        raise Failure("limit", f"{where}: {told}")


def _check_against(
    answers: Sequence[Answer | None], expected: Body | list[Body], where: str
) -> None:
    """Check the last answer against an earlier one. expected: several where the tree decides."""
    answer = answers[-1]
    assert answer is not None
    if isinstance(expected, list):
        return
    if "repeats" in expected:
        first = answers[expected["repeats"]]
        assert first is not None
        if answer != first:
            told = f"the retry of request {expected['repeats']} got another answer"
            raise Failure("retry", f"{where}: {told}: {answer.text[:60]!r}, {first.text[:60]!r}")
    if expected.get("parent") is not None:
        parent = answers[expected["parent"]]
        assert parent is not None
        least = parent.prompt_tokens + parent.tokens
        is_told = -1 not in (parent.tokens, answer.prompt_tokens)
        if is_told and answer.prompt_tokens < least:
            told = f"its prompt has {answer.prompt_tokens} tokens; the conversation had {least}"
            raise Failure("history", f"{where}: {told}: what was sampled has been changed")


def _check_tree(transcript: Transcript, answers: Sequence[Answer | None], tree: Body) -> None:
    """Check the turns that a gateway recorded."""
    turns = tree["turns"]
    reasons = {each["root"]: each["reason"] for each in tree["breaks"]}
    numbers: dict[int, int] = {}  # of requests: their turn
    sampled = (
        i
        for i, answer in enumerate(answers)
        if answer is not None and "repeats" not in _first(transcript.expect[i])
    )
    for number in sampled:
        numbers[number] = len(numbers)
    if len(turns) != len(numbers):
        raise Failure("tree", f"{len(turns)} turns for {len(numbers)} questions")
    for number, turn in ((number, turns[place]) for number, place in numbers.items()):
        where = f"request {number}"
        _check_tokens(turn, answers[number], where)
        if turn["parent"] is not None:
            _check_ids(turn, turns[turn["parent"]], where)
        expected = transcript.expect[number]
        if isinstance(expected, dict):
            expected = [expected]
        faults = [_fault_of(turn, each, numbers, reasons, where) for each in expected]
        if all(faults):
            raise faults[0]  # type: ignore[misc]


def _check_tokens(turn: Body, answer: Answer | None, where: str) -> None:
    """Check that a recorded turn has the tokens that the client was told of, with their values."""
    assert answer is not None
    recorded = len(turn["prompt"]), len(turn["sampled"])
    told = answer.prompt_tokens, answer.tokens
    if recorded != told and -1 not in told:
        raise Failure("usage", f"{where}: {recorded} tokens are recorded, the client heard {told}")
    if not answer.calls and answer.cut != (turn["finish"] == "length"):
        ended = f"the turn ended by {turn['finish']}, and the client heard another end"
        raise Failure("answer", f"{where}: {ended}")
    values, versions = turn["logp"], turn["versions"]
    fitting = len(values) == len(versions) == len(turn["sampled"])
    if not fitting or any(v is None or v > HIGHEST_LOGP for v in values):
        raise Failure("values", f"{where}: its tokens have no log-probabilities and versions")


def _check_ids(turn: Body, parent: Body, where: str) -> None:
    """Check that a turn was sampled after exactly the tokens of the one that it continues."""
    ours = [*parent["prompt"], *parent["sampled"]]
    pairs = itertools.zip_longest(ours, turn["prompt"][: len(ours)])
    for place, (one, other) in enumerate(pairs):
        if one != other:
            told = f"token {place} of its prompt is {other}, and {one} was there before"
            raise Failure("history", f"{where}: {told}")


def _fault_of(
    turn: Body,
    expected: Body,
    numbers: Mapping[int, int],
    reasons: Mapping[int, str],
    where: str,
) -> Failure | None:
    """Return the difference of a recorded turn from the expected one, None if there is none."""
    parent = expected["parent"]
    if parent is not None:
        parent = numbers[parent]
    if turn["parent"] != parent:
        return Failure("tree", f"{where}: continues turn {turn['parent']}, expected {parent}")
    reason = reasons.get(turn["root"])
    if parent is None and reason != expected.get("reason"):
        told = f"the reason of its root is {reason!r}, expected {expected.get('reason')!r}"
        return Failure("reason", f"{where}: {told}")
    facts = set(turn["facts"])
    missing = set(expected.get("facts", ())) - facts
    wrong = set(expected.get("lacks", ())) & facts
    if missing or wrong:
        told = f"facts {sorted(facts)}; missing {sorted(missing)}, wrong {sorted(wrong)}"
        return Failure("reason", f"{where}: {told}")
    for name in ("auxiliary", "abandoned"):
        if turn[name] != expected.get(name, turn[name]):
            return Failure("tree", f"{where}: {name} is {turn[name]}, expected {expected[name]}")
    return None


def _first(expected: Any) -> Body:
    if isinstance(expected, list):
        return dict(expected[0])
    return dict(expected)
