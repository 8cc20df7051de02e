"""Trajectories against a plain list of tokens that each remember everything: thousands of random
edit sequences."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onepolicy.envs.multiturn.trajectory import SOURCES, Trajectory
from onepolicy.types import Completion, RouteSpan, RoutingTrace, Sample
from support.examples import examples

EXPERTS, LAYERS, TOP_K, VOCABULARY = 32, (1, 3), 2, 3


@dataclass
class Token:
    """The plain model's token: nothing is ever computed from its position."""

    id: int
    turn: int = -1
    logp: float = math.nan
    version: int = -1
    route: tuple[int, ...] | None = None  # [L * K]
    route_version: int = 0
    source: str = ""
    refused: bool = False  # a row came, of newer weights than the token after it


class Plain:
    """The list-of-rows model."""

    def __init__(self, prompt: list[int], policy: str) -> None:
        self.policy = policy
        self.path = [Token(i) for i in prompt]
        self.open = False  # the last turn was aborted and can go on
        self.turns = 0

    def append_observation(self, ids: list[int]) -> None:
        self.path += [Token(i) for i in ids]
        self.open = self.open and not ids

    def append_completion(self, made: Completion) -> None:
        before = self.path
        turn = self.turns - 1 if self.open else self.turns
        self.turns = turn + 1
        fresh = zip(made.token_ids.tolist(), made.logp.tolist(), made.version.tolist(), strict=True)
        self.path += [Token(i, turn, logp, version) for i, logp, version in fresh]
        self.open = made.finish == "aborted"
        trace = made.routing
        for row in range(len(trace)) if trace is not None else ():
            span = next(s for s in trace.spans if s.start <= row < s.start + s.length)
            token = self.path[made.first_slot + row]
            after = before[made.first_slot + row + 1 :][:1]
            if not trace.valid[row] or not self.replaces(token, span.version):
                continue
            newer = any(t.turn >= 0 and span.version > t.version for t in after)
            if newer and self.policy == "as-sampled":
                token.refused = True
            else:
                token.route = tuple(trace.ids[row].flatten().tolist())
                token.route_version, token.source = span.version, span.source

    def replaces(self, token: Token, version: int) -> bool:
        if token.route is None or self.policy == "as-cached":
            return True
        return self.policy == "newest" and version > token.route_version

    def truncate(self, length: int) -> None:
        self.path, self.open = self.path[:length], False
        self.path[-1].refused = False
        self.turns = max(t.turn for t in self.path) + 1

    def rewrite_history(self, ids: list[int]) -> None:
        """Return the path as a new history: no token of it was sampled in this history. Routes of
        the shared start are still those of its tokens."""
        fresh, same = [], True
        for i, token in enumerate(ids):
            same = same and i < len(self.path) and self.path[i].id == token
            old = self.path[i] if same else Token(token)
            kept = dataclasses.replace(old, turn=-1, logp=math.nan, version=-1, refused=False)
            fresh.append(kept)
        self.path, self.open = fresh, False

    def check(self, got: Sample) -> None:
        last = max(i for i, t in enumerate(self.path) if t.turn >= 0)
        path = self.path[: last + 1]
        assert got.tokens.tolist() == [t.id for t in path]
        assert got.turn.tolist() == [t.turn for t in path[1:]]
        assert got.version.tolist() == [t.version for t in path[1:]]
        assert got.trainable.tolist() == [t.turn >= 0 for t in path[1:]]
        for slot, token in enumerate(path[1:]):
            logp = float(got.logp_rollout[slot])
            assert logp == token.logp or (math.isnan(logp) and math.isnan(token.logp))
        if got.routing is None:
            assert all(t.route is None for t in path)
            return
        named: dict[int, RouteSpan] = {}
        for span in got.routing.spans:
            named |= dict.fromkeys(range(span.start, span.start + span.length), span)
        for row, token in enumerate(path[:-1]):
            assert bool(got.routing.valid[row]) == (token.route is not None)
            if token.route is None:
                assert row not in named
            else:
                assert tuple(got.routing.ids[row].flatten().tolist()) == token.route
                found = named[row].version, named[row].source
                assert found == (token.route_version, token.source)


class Engine:
    """An engine that makes up completions of a path. Every forward has routes of its own, so a row
    that moved would show."""

    def __init__(self, data: st.DataObject) -> None:
        self.draw, self.version, self.forwards = data.draw, 0, 0

    def complete(self, path: Trajectory) -> Completion:
        self.forwards += 1
        if self.draw(st.integers(0, 3)) == 0:
            self.version += 1
        new = self.draw(st.integers(1, 3))
        fed = len(path.tokens) + new - 1
        first = self.draw(st.sampled_from([0, path.first_missing_route]))
        ids = self.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=new, max_size=new))
        return Completion(
            torch.tensor(ids).int(),
            -torch.arange(1.0, new + 1) / self.forwards,
            torch.full((new,), self.version, dtype=torch.int32),
            self.draw(st.sampled_from(["stop", "length", "aborted"])),
            self.trace(first, fed, len(path.tokens)) if self.draw(st.integers(0, 7)) else None,
            first,
        )

    def trace(self, first: int, fed: int, prompt: int) -> RoutingTrace:
        rows = torch.arange(first, fed)[:, None, None]
        ids = (rows * 7 + self.forwards * 3 + torch.arange(4).view(2, 2)) % EXPERTS
        cached = self.draw(st.integers(first, max(first, prompt - 1)))
        parts = (("cache", first, cached), ("prefill", cached, prompt), ("decode", prompt, fed))
        spans = tuple(
            RouteSpan(a - first, b - a, s, self.version - (s == "cache" and self.version > 0))
            for s, a, b in parts
            if b > a
        )
        valid = torch.ones(fed - first, dtype=torch.bool)
        if self.draw(st.integers(0, 4)) == 0 and len(valid):
            valid[self.draw(st.integers(0, len(valid) - 1))] = False
        return RoutingTrace(ids.to(torch.uint8), valid, LAYERS, EXPERTS, spans)


IDS = st.lists(st.integers(0, VOCABULARY - 1), max_size=4)
EDITS = st.sampled_from(["turn", "turn", "observe", "truncate", "fork", "rewrite"])
POLICIES = ("as-sampled", "as-cached", "newest")


@given(data=st.data())
@examples(150)
def test_random_edits_against_a_list_of_rows(data: st.DataObject) -> None:
    compare(data)


@pytest.mark.slow
@given(data=st.data())
@examples(4000)
def test_thousands_of_random_edits(data: st.DataObject) -> None:
    compare(data)


def compare(data: st.DataObject) -> None:
    """Make the same edits under every policy. The policies have routes for the same rows, so an
    engine's completion of one path is one of all."""
    prompt, engine = [0, *data.draw(IDS)], Engine(data)
    paths = [Trajectory(prompt, duplicate_routes=policy) for policy in POLICIES]
    plains = [Plain(prompt, policy) for policy in POLICIES]
    for _ in range(data.draw(st.integers(1, 14))):
        length = len(plains[0].path)
        match data.draw(EDITS):
            case "turn":
                made = engine.complete(paths[0])
                for each in paths + plains:
                    each.append_completion(made)
            case "observe":
                ids = data.draw(IDS)
                for each in paths + plains:
                    each.append_observation(ids)
            case "truncate":
                kept = data.draw(st.integers(1, length))
                for each in paths + plains:
                    each.truncate(kept)
            case "fork":  # the branch must leave the trunk alone, whatever it does
                made = engine.complete(paths[0].fork())
                for path in paths:
                    branch = path.fork()
                    branch.append_completion(made)
                    branch.truncate(1)
            case "rewrite":
                kept = data.draw(st.integers(1, length))
                ids = paths[0].tokens[:kept] + data.draw(IDS)
                paths = [path.rewrite_history(ids) for path in paths]
                for plain in plains:
                    plain.rewrite_history(ids)
        for path, plain in zip(paths, plains, strict=True):
            check(path, plain)


def check(path: Trajectory, plain: Plain) -> None:
    assert path.tokens == [t.id for t in plain.path]
    assert path.turns == plain.turns
    missing = (i for i, t in enumerate(plain.path) if t.route is None and not t.refused)
    assert path.first_missing_route == min(next(missing, len(plain.path)), len(plain.path) - 1)
    assert path.sampled_tokens == sum(t.turn >= 0 for t in plain.path)
    if path.sampled_tokens:
        plain.check(path.to_sample(reward=0.0, temperature=1.0))


def completion(ids, *, rows, first, expert, version, prompt, cached=0, finish="stop", **top):
    """Return a completion whose routing rows, from slot `first` on, all name one expert."""
    parts = (
        ("cache", first, cached),
        ("prefill", max(first, cached), prompt),
        ("decode", prompt, first + rows),
    )
    spans = tuple(RouteSpan(a - first, b - a, s, version) for s, a, b in parts if b > a)
    routes = torch.full((rows, 1, 1), expert, dtype=torch.uint8)
    trace = RoutingTrace(routes, torch.ones(rows, dtype=torch.bool), (0,), 8, spans)
    ids = torch.tensor(ids, dtype=torch.int32)
    versions = torch.full_like(ids, version)
    return Completion(ids, torch.full((len(ids),), -0.5), versions, finish, trace, first, **top)


def test_an_update_in_the_middle_of_a_turn() -> None:
    """Prompt 5 6, two tokens of version 3, abort, update, then the rest under version 4 after a new
    prefill."""
    for policy, experts, versions in (
        ("as-sampled", [1, 1, 1, 2, 2], [3, 3, 3, 4, 4]),
        ("as-cached", [2] * 5, [4] * 5),
        ("newest", [2] * 5, [4] * 5),
    ):
        path = Trajectory([5, 6], duplicate_routes=policy)
        old = {"rows": 3, "first": 0, "expert": 1, "version": 3, "prompt": 2}
        path.append_completion(completion([7, 0], **old, finish="aborted"))
        assert path.first_missing_route == 3
        path.append_completion(completion([1, 2], rows=5, first=0, expert=2, version=4, prompt=4))
        sample = path.to_sample(reward=1.0, temperature=1.0)
        assert path.turns == 1
        assert sample.turn.tolist() == [-1, 0, 0, 0, 0]
        assert sample.version.tolist() == [-1, 3, 3, 4, 4]
        assert sample.routing.ids.flatten().tolist() == experts, policy
        named = [s.version for s in sample.routing.spans for _ in range(s.length)]
        assert named == versions, policy


def test_a_row_of_newer_weights_stays_out_for_a_token_that_older_ones_sampled() -> None:
    """An engine left out the row that token 8 was sampled with: its weights had changed, and it had
    prefilled anew. The next turn brings that of the newer weights, and none is asked for again."""
    for policy, valid, known in (
        ("as-sampled", [True, False, True, True, True], 5),
        ("as-cached", [True] * 5, 5),
        ("newest", [True] * 5, 5),
    ):
        path = Trajectory([5, 6], duplicate_routes=policy)
        first = completion([7, 8], rows=3, first=0, expert=1, version=3, prompt=2)
        holes = torch.tensor([True, False, True])
        routing = dataclasses.replace(first.routing, valid=holes)
        path.append_completion(dataclasses.replace(first, routing=routing))
        path.append_observation([4])
        assert path.first_missing_route == 1
        path.append_completion(completion([9], rows=4, first=1, expert=2, version=4, prompt=5))
        path.append_observation([4])
        assert path.first_missing_route == known, policy
        sample = path.to_sample(reward=0.0, temperature=1.0)
        assert sample.routing.valid.tolist() == valid, policy


def test_newest_keeps_its_row_against_an_older_cache() -> None:
    """A prefix-cache hit may bring rows of older weights: newest ignores them, as-cached takes
    them."""
    for policy, expert in (("as-sampled", 1), ("newest", 1), ("as-cached", 2)):
        path = Trajectory([5, 6], duplicate_routes=policy)
        path.append_completion(completion([7], rows=2, first=0, expert=1, version=9, prompt=2))
        path.append_observation([4])
        old = {"rows": 4, "first": 0, "expert": 2, "version": 2, "prompt": 4, "cached": 3}
        path.append_completion(completion([0], **old))
        rows = path.to_sample(reward=0.0, temperature=1.0).routing.ids.flatten().tolist()
        assert rows == [expert, expert, 2, 2], policy


def test_only_new_rows_travel() -> None:
    """Every turn asks from the first unknown token on: the last sampled one, whose route the next
    prefill brings."""
    path = Trajectory([1, 2, 3])
    moved = 0
    for turn in range(5):
        first, length = path.first_missing_route, len(path.tokens)
        wanted = 0 if turn == 0 else length - 2  # the turn's last token, then one observed
        assert first == wanted
        rows = length + 2 - 1 - first
        made = {"rows": rows, "first": first, "expert": 3, "version": 1, "prompt": length}
        path.append_completion(completion([1, 2], **made))
        moved += rows
        path.append_observation([4])
    sample = path.to_sample(reward=0.0, temperature=1.0)
    assert moved == len(sample.trainable)
    assert sample.routing.valid.all()


def test_top_log_probabilities_follow_their_tokens() -> None:
    path = Trajectory([1, 2])
    top_ids = torch.tensor([[3, 0], [4, 1]], dtype=torch.int32)
    top_logp = torch.tensor([[-0.1, -3.0], [-0.2, -2.0]])
    how = {"expert": 1, "version": 1, "top_ids": top_ids, "top_logp": top_logp}
    path.append_completion(completion([3, 4], rows=3, first=0, prompt=2, **how))
    path.append_observation([0])
    how |= {"top_ids": top_ids[:1], "top_logp": top_logp[:1]}
    path.append_completion(completion([5], rows=2, first=3, prompt=5, **how))
    sample = path.to_sample(reward=0.0, temperature=1.0)
    assert sample.top_ids.tolist() == [[0, 0], [3, 0], [4, 1], [0, 0], [3, 0]]
    assert torch.isnan(sample.top_logp_rollout[[0, 3]]).all()
    assert torch.equal(sample.top_logp_rollout[[1, 2, 4]], top_logp[[0, 1, 0]])
    path.truncate(3)
    path.append_observation([0])  # where a token with log-probabilities was
    path.append_completion(completion([5], rows=4, first=0, prompt=4, **how))
    sample = path.to_sample(reward=0.0, temperature=1.0)
    assert sample.top_ids.tolist() == [[0, 0], [3, 0], [0, 0], [3, 0]]


def test_sources_are_those_of_a_span() -> None:
    assert set(SOURCES) == {"decode", "prefill", "cache", "reprefill"}
