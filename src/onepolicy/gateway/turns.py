"""The tree of an episode: conversations, and the turns that were served in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from onepolicy.envs.multiturn.trajectory import Trajectory
from onepolicy.gateway.messages import Message, Request
from onepolicy.types import Completion, FinishReason


class Reason(StrEnum):
    """A reason why a conversation is not continued from its ids, or a fact about a turn."""

    # a new root: the client changed the history
    RETOKENISED = "retokenised"  # a served turn came back as the same text, whose ids are others
    THOUGHTS_DROPPED = "thoughts dropped"  # also a fact: sent back without, continued from our ids
    SYSTEM_CHANGED = "system changed"
    TOOLS_CHANGED = "tools changed"
    COMPACTION = "compaction"  # earlier messages left out, shortened or summed up
    TRUNCATED_TURN = "truncated turn"  # a served turn came back cut
    UNKNOWN_ASSISTANT = "unknown assistant message"  # that nobody served
    # facts about a turn
    RETRY_SIBLING = "retry sibling"  # another turn was sampled after the same tokens
    SAMPLING_OVERRIDDEN = "sampling overridden"  # the client asked for other settings, in vain
    LENGTH_CAPPED = "length capped"  # the client asked for more tokens than there may be
    UNKNOWN_CHARACTERS = "unknown characters"  # the tokenizer lacks some that the program sent
    UNKNOWN_TOKENS = "unknown tokens of the policy"  # it lacks some of this turn or earlier ones
    NO_VALUES = "no values"  # its tokens have no log-probabilities: they are not trained on
    NO_ROUTES = "no routes"
    UNKNOWN_VERSION = "weights changed without version"


@dataclass(frozen=True, slots=True)
class Break:
    """The place where a conversation leaves the ids of an earlier one.

    token: first token that differs. ours, sent: its id there and here; None past the end.
    """

    reason: Reason
    token: int
    ours: int | None
    sent: int | None


@dataclass(eq=False)
class Root:
    """A conversation from its first prompt on.

    key: of its first turns. break_: how it leaves another one, `left`; None for one that leaves
    none. `left` is also None if no turn of the episode is in its history. asked: the place of its
    first request among all.
    """

    key: bytes
    request: Request
    prompt: list[int]
    break_: Break | None
    left: Root | None
    asked: int
    children: list[Turn] = field(default_factory=list)

    @property
    def origin(self) -> Root:
        """The conversation that this one was before its client changed it, by compaction say."""
        root = self
        while root.left is not None:
            root = root.left
        return root

    @property
    def is_single_call(self) -> bool:
        """True if it is one question without tools and history, and its turn was never continued.

        Programs ask so for a title.
        """
        continued = any(turn.children for turn in self.children)
        return not (continued or self.request.tools or self.request.last_assistant)


@dataclass(eq=False)
class Turn:
    """A turn that was served."""

    number: int  # in the episode, by the end of its sampling
    asked: int  # the place of its request among all
    key: bytes  # digest of the request, and of the tokens that it was sampled after
    request: Request
    message: Message  # as it was served
    root: Root
    parent: Turn | None  # the turn that this one continues; None: the root's prompt
    path: Trajectory
    start: int  # number of the path's tokens before the turn
    length: int  # and to its end
    finish: FinishReason
    completion: Completion
    facts: tuple[Reason, ...] = ()
    stop: str | None = None  # the client's stop text that ended it, which it leaves out
    children: list[Turn] = field(default_factory=list)

    @property
    def siblings(self) -> list[Turn]:
        """All turns that were sampled after the same tokens, this one included."""
        family = self.root.children
        if self.parent is not None:
            family = self.parent.children
        return [turn for turn in family if turn.key == self.key]

    @property
    def is_abandoned(self) -> bool:
        """True if the client asked again and did not go on from this turn."""
        if self.children:
            return False
        return any(
            bool(turn.children) or turn.asked > self.asked
            for turn in self.siblings
            if turn is not self
        )

    @property
    def chain(self) -> list[Turn]:
        """The turns of the conversation from its root on, this one the last."""
        turns = [self]
        while turns[-1].parent is not None:
            turns.append(turns[-1].parent)
        return turns[::-1]

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The messages up to this turn, in the client's words and ours."""
        return (*self.request.messages, self.message)
