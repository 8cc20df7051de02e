"""The conversations of one episode as exact token paths.

A request's messages are matched against the turns that were served. A turn that was served is
continued from its own ids; only the messages after it are rendered. Where the client changed the
history, the request begins a new root, with the reason and the first token that differs. Nothing
here knows a network or an engine: `plan` names a turn to sample, `record` takes its tokens.

Every sampled token is trained on once, in the path that it was sampled in. Paths that share a
beginning divide it like this: the first path keeps its tokens, in the others they are observed. If
a client asks the same again and goes on from one of the answers, the others are left out.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from onepolicy.config import DuplicateRoutes
from onepolicy.envs.multiturn.tokenization import decode_tokens
from onepolicy.envs.multiturn.trajectory import Trajectory
from onepolicy.gateway.breaks import find_break, first_difference
from onepolicy.gateway.messages import (
    Message,
    Request,
    RequestError,
    Tool,
    chain_key,
    join_calls,
    tools_key,
)
from onepolicy.gateway.rendering import Renderer
from onepolicy.gateway.turns import Break, Reason, Root, Turn
from onepolicy.types import MAX_LOGP, Completion, Sample

Thoughts = Literal["keep", "as-sent"]
"""A served turn that comes back without its thoughts. keep: is continued from our ids, thoughts
included. as-sent: a new root."""
Credit = Literal["episode", "main"]
"""Conversations that are trained on. episode: all. main: the one that began the episode, with what
it was compacted to."""
MOST_CHARACTERS = 32
"""Characters of a conversation for each token of the context: a longer one is not tokenised."""
MOST_TURNS = 4096
"""Turns of an episode, so that a client in an endless loop does not fill the memory."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A turn to sample."""

    request: Request
    key: bytes
    parent: Turn | None  # the turn that it continues; None: `prompt` begins a root
    tokens: list[int]  # what it is sampled after
    tail: list[int]  # those of them that follow the parent's tokens
    max_tokens: int
    routes_from: int
    initial_prompt_len: int
    left: Turn | None = None  # the last turn of the conversation that a root changes
    break_: Break | None = None
    facts: tuple[Reason, ...] = ()


class History:
    """The tree of an episode."""

    def __init__(
        self,
        renderer: Renderer,
        *,
        max_len: int,
        max_tokens: int,
        thoughts: Thoughts = "keep",
        credit: Credit = "episode",
        duplicate_routes: DuplicateRoutes = "as-sampled",
        expects_routes: bool = False,
    ) -> None:
        """Begin an episode.

        max_len: tokens of a path. max_tokens: of a turn. expects_routes: the engine returns them.
        """
        self.renderer = renderer
        self.max_len, self.max_tokens = max_len, max_tokens
        self.thoughts: Thoughts = thoughts
        self.credit: Credit = credit
        self.duplicate_routes: DuplicateRoutes = duplicate_routes
        self.expects_routes = expects_routes
        self.roots: list[Root] = []
        self.turns: list[Turn] = []
        # by the digest of the conversation up to the turn; several differ in their thoughts
        self._served: dict[bytes, list[Turn]] = {}
        self._calls = 0
        self._calls_of: dict[str, tuple[str, ...]] = {}  # of the turn that each call is of

    def plan(self, request: Request) -> Plan:
        """Return the turn to sample for a request. Changes nothing.

        Raises RequestError if there is no room for it, or the template cannot write it.
        """
        request = self._checked(request)
        if len(self.turns) >= MOST_TURNS:
            raise RequestError(f"this episode has had {MOST_TURNS} turns", status=429)
        turn, place, key, dropped = self._match(request)
        facts = _facts_of(request, self.max_tokens)
        if dropped:
            facts = (*facts, Reason.THOUGHTS_DROPPED)
        if turn is None or place < request.last_assistant:
            return self._plan_root(request, key, facts)
        tail = self.renderer.encode_tail(
            request.messages[place - 1 :], request.tools, ended=turn.finish == "stop"
        )
        tokens = turn.path.tokens[: turn.length] + tail
        return Plan(
            request,
            key,
            turn,
            tokens,
            tail,
            self._room(tokens, request),
            min(turn.path.first_missing_route, turn.length),
            len(turn.root.prompt),
            facts=facts + self._unknown(tail, request.messages[place:], request.tools),
        )

    def count_tokens(self, request: Request) -> int:
        """Return how many tokens a request's turn would be sampled after."""
        request = self._checked(request)
        turn, place, _, _ = self._match(request)
        if turn is None or place < request.last_assistant:
            return len(self.renderer.encode_prompt(request.messages, request.tools))
        tail, ended = request.messages[place - 1 :], turn.finish == "stop"
        new = self.renderer.encode_tail(tail, request.tools, ended=ended)
        return turn.length + len(new)

    def record(
        self,
        plan: Plan,
        completion: Completion,
        versions: tuple[int, int] | None,
        stop: str | None = None,
        asked: int | None = None,
    ) -> Turn:
        """Append a sampled turn and return it.

        versions: of the engine's weights before and after, None if they are not known. stop: the
        client's text that ended it. asked: the place of its request among the episode's, for those
        that are sampled at one time; default: they were answered in their order.
        """
        number = len(self.turns)
        facts = tuple(dict.fromkeys(plan.facts + self._facts_about(completion, versions)))
        if asked is None:
            asked = number
        key = _key_of(plan)
        root, family = self._family_of(plan, key, asked)
        siblings = [each for each in family if each.key == key]
        if siblings:
            facts = (*facts, Reason.RETRY_SIBLING)
        path = self._path_for(plan, siblings)
        start = len(path.tokens)
        assert path.tokens == plan.tokens
        path.forget_last_route()  # of another turn's forward; this one has its own
        _append(path, completion)
        text = decode_tokens(self.renderer.tokenizer, completion.token_ids.tolist())
        if stop is not None:
            text = text.partition(stop)[0]
        message = self.renderer.read_turn(text, plan.request.tools, self._calls)
        self._calls += len(message.calls)
        of_turn = tuple(call.id for call in message.calls)
        self._calls_of.update(dict.fromkeys(of_turn, of_turn))
        turn = Turn(
            number,
            asked,
            key,
            plan.request,
            message,
            root,
            plan.parent,
            path,
            start,
            len(path.tokens),
            completion.finish,
            completion,
            facts,
            stop,
        )
        family.append(turn)
        self.turns.append(turn)
        self._served.setdefault(chain_key(plan.key, message), []).append(turn)
        return turn

    def counts(self) -> Counter[str]:
        """Return how many turns, roots, samples left out and breaks there are, by reason."""
        found: Counter[str] = Counter({"turns": len(self.turns), "roots": len(self.roots)})
        found.update(str(fact) for turn in self.turns for fact in turn.facts)
        found.update(str(root.break_.reason) for root in self.roots if root.break_ is not None)
        found["auxiliary"] = sum(map(self.is_auxiliary, self.roots))
        found["abandoned"] = sum(turn.is_abandoned for turn in self.turns)
        return found

    def is_auxiliary(self, root: Root) -> bool:
        """Return whether a conversation is a call beside the episode, such as one for a title."""
        return root.is_single_call and any(other.request.tools for other in self.roots)

    def to_samples(self, *, reward: float, temperature: float) -> tuple[Sample, ...]:
        """Return one sample of every path, without auxiliary calls and abandoned turns."""
        samples = []
        for turn in self.last_turns():
            path = turn.path
            if turn.length < len(path.tokens):
                path = path.fork()
                path.truncate(turn.length)
            finish = turn.finish
            if turn.stop is not None:  # cut where the client asked, and not by a limit
                finish = "stop"
            if path.sampled_tokens:
                samples.append(
                    path.to_sample(reward=reward, temperature=temperature, finish=finish)
                )
        return tuple(samples)

    def last_turns(self) -> list[Turn]:
        """Return the last turn of every path that counts, the one that ended the episode last."""
        last: dict[int, Turn] = {}
        counted = [root for root in self.roots if not self.is_auxiliary(root)]
        if self.credit == "main" and counted:
            first = min(counted, key=lambda root: root.asked)
            counted = [root for root in counted if root.origin is first.origin]
        kept = set(counted)
        for turn in self.turns:
            if turn.root in kept and not turn.is_abandoned:
                last[id(turn.path)] = turn
        return sorted(last.values(), key=lambda turn: turn.number)

    def _match(self, request: Request) -> tuple[Turn | None, int, bytes, bool]:
        """Return the last served turn that the messages begin with.

        Also the number of messages up to it, the digest of all messages, and whether thoughts of
        turns were left out.
        """
        key, place = tools_key(request.tools), 0
        found: dict[Turn, bool] = {}  # turns that the messages may go on from: thoughts left out?
        for i, message in enumerate(request.messages):
            key = chain_key(key, message)
            if message.role != "assistant":
                continue
            accepted = {}
            for turn in self._served.get(key, ()):
                goes_on = turn.parent is None or turn.parent in found
                if goes_on and self._accepts_thoughts(message, turn.message):
                    dropped = message.thought.strip() != turn.message.thought
                    accepted[turn] = dropped or (turn.parent is not None and found[turn.parent])
            if accepted:
                found, place = accepted, i + 1
            else:
                key = chain_key(key, Message("assistant", message.thought))
        if not found:
            return None, 0, key, False
        best = min(found, key=lambda turn: (found[turn], -turn.asked))
        return best, place, key, found[best]

    def _accepts_thoughts(self, sent: Message, served: Message) -> bool:
        if sent.thought.strip() == served.thought:
            return True
        return self.thoughts == "keep" and not sent.thought.strip()

    def _plan_root(self, request: Request, key: bytes, facts: tuple[Reason, ...]) -> Plan:
        tokens = self.renderer.encode_prompt(request.messages, request.tools)
        left, break_ = None, None
        found = find_break(request, self.turns)
        if found is not None:
            reason, left = found
            break_ = self._describe_break(reason, request, left, tokens)
        return Plan(
            request,
            key,
            None,
            tokens,
            tokens,
            self._room(tokens, request),
            0,
            len(tokens),
            left,
            break_,
            facts + self._unknown(tokens, request.messages, request.tools),
        )

    def _describe_break(
        self, reason: Reason, request: Request, left: Turn | None, tokens: list[int]
    ) -> Break:
        if left is None:
            return first_difference(reason, (), tokens)
        assistants = sum(message.role == "assistant" for message in request.messages)
        chain = left.chain
        last = chain[min(assistants, len(chain)) - 1]
        ours = last.path.tokens[: last.length]
        if reason is Reason.UNKNOWN_ASSISTANT and self._is_same_text(ours, tokens):
            reason = Reason.RETOKENISED
        return first_difference(reason, ours, tokens)

    def _is_same_text(self, ours: Sequence[int], sent: Sequence[int]) -> bool:
        """Return whether a path's text is the beginning of another one's."""
        decode = self.renderer.tokenizer.decode
        one, other = (str(decode(list(ids))).split() for ids in (ours, sent))
        return "".join(other).startswith("".join(one))

    def _checked(self, request: Request) -> Request:
        """Return the request with the calls of a turn together. Raises RequestError."""
        _check_order(request)
        self._check_size(request)
        return replace(request, messages=join_calls(request.messages, self._calls_of))

    def _check_size(self, request: Request) -> None:
        """Raise RequestError for a text that cannot fit, before it is tokenised.

        That takes seconds a megabyte, in which nothing else is served.
        """
        texts = [each for message in request.messages for each in (message.text, message.thought)]
        calls = [call for message in request.messages for call in message.calls]
        texts += [text for call in calls for text in (call.name, call.arguments)]
        size, count = sum(map(len, texts)) + len(repr(request.tools)), len(request.messages)
        if size > MOST_CHARACTERS * (self.max_len - count - len(calls)):  # each has a token or more
            raise RequestError(
                f"the conversation has {count:,} messages, {len(calls):,} calls, {size:,} "
                f"characters, and {self.max_len} tokens fit",
                code="context_length_exceeded",
            )

    def _room(self, tokens: list[int], request: Request) -> int:
        """Return how many tokens the turn may have."""
        room = self.max_len - len(tokens)
        if room < 1:
            raise RequestError(
                f"the conversation has {len(tokens)} tokens, and {self.max_len} fit",
                code="context_length_exceeded",
            )
        return min(room, self.max_tokens, request.max_tokens or self.max_tokens)

    def _unknown(
        self, rendered: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[Reason, ...]:
        return self.renderer.unknown.find(rendered, messages, tools, self.turns)

    def _facts_about(
        self, completion: Completion, versions: tuple[int, int] | None
    ) -> tuple[Reason, ...]:
        facts = []
        if self.renderer.unknown.has_sampled(completion.token_ids.tolist()):
            facts.append(Reason.UNKNOWN_TOKENS)
        if not _has_values(completion):
            facts.append(Reason.NO_VALUES)
        if self.expects_routes and completion.routing is None:
            facts.append(Reason.NO_ROUTES)
        low, high = versions or (0, math.inf)
        if any(not low <= version <= high for version in completion.version.tolist()):
            facts.append(Reason.UNKNOWN_VERSION)
        return tuple(facts)

    def _family_of(self, plan: Plan, key: bytes, asked: int) -> tuple[Root, list[Turn]]:
        """Return the root of a planned turn, made if it is new, and the turns beside it."""
        if plan.parent is not None:
            return plan.parent.root, plan.parent.children
        root = next((root for root in self.roots if root.key == key), None)
        if root is None:
            left = plan.left.root if plan.left else None
            root = Root(key, plan.request, plan.tokens, plan.break_, left, asked)
            self.roots.append(root)
        return root, root.children

    def _path_for(self, plan: Plan, siblings: Sequence[Turn]) -> Trajectory:
        """Return a path of exactly the plan's tokens, to append the turn to.

        A turn goes on with its parent's path if that ends there. A turn that is sampled again takes
        the path of the one before, unless that was continued.
        """
        parent = plan.parent
        if parent is not None and len(parent.path.tokens) == parent.length:
            parent.path.append_observation(plan.tail)
            return parent.path
        for older in siblings:
            owns = len(older.path.tokens) == older.length
            if owns and not older.children:
                path = older.path
                if parent is not None and path is not parent.path:
                    continue
                path.truncate(older.start)
                older.path = path.rewrite_history(path.tokens)
                _append(older.path, older.completion)
                return path
        if parent is not None:
            return parent.path.rewrite_history(plan.tokens)
        if plan.left is not None:
            return plan.left.path.rewrite_history(plan.tokens)
        return Trajectory(plan.tokens, duplicate_routes=self.duplicate_routes)


def _key_of(plan: Plan) -> bytes:
    """Return a digest of a request and its tokens: one meaning may be rendered in several ways."""
    tokens = array("q", plan.tokens).tobytes()
    return hashlib.blake2b(plan.key + tokens, digest_size=16).digest()


def _append(path: Trajectory, completion: Completion) -> None:
    """Append a turn; one without log-probabilities is observed."""
    if _has_values(completion):
        path.append_completion(completion)
    else:
        path.append_observation(completion.token_ids.tolist())


def _has_values(completion: Completion) -> bool:
    logp = completion.logp
    if len(logp) != len(completion.token_ids):
        return False
    return bool((logp.isfinite() & (logp <= MAX_LOGP)).all())


def _facts_of(request: Request, max_tokens: int) -> tuple[Reason, ...]:
    facts = []
    if request.sampling:
        facts.append(Reason.SAMPLING_OVERRIDDEN)
    if (request.max_tokens or 0) > max_tokens:
        facts.append(Reason.LENGTH_CAPPED)
    return tuple(facts)


def _check_order(request: Request) -> None:
    if not any(message.role != "system" for message in request.messages):
        raise RequestError("messages: there is none to answer; send at least one of the user")
    if request.messages[-1].role == "assistant":
        raise RequestError(
            "messages: the last one is the assistant's; a turn that the client began is not "
            "continued, end with another role"
        )
