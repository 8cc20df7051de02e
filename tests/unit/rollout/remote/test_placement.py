"""Which server a request goes to: its prefix's, levelled by load."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepolicy.rollout.remote.fleet import Placement
from onepolicy.rollout.remote.servers import SLACK

SERVERS = ("http://a:1", "http://b:1", "http://c:1")
IDLE = dict.fromkeys(SERVERS, 0)


def test_siblings_and_later_turns_share_a_server():
    placement = Placement(SLACK)
    prompts = [[i, i + 1, i + 2] for i in range(200)]
    chosen = [placement.choose(prompt, 3, IDLE) for prompt in prompts]
    assert chosen == [placement.choose(prompt, 3, IDLE) for prompt in prompts]
    counts = Counter(chosen)
    assert all(40 < counts[server] < 95 for server in SERVERS)


def test_a_later_turn_goes_where_its_own_path_was_sampled():
    """Two siblings went to different servers, because one had too much to do."""
    placement = Placement(SLACK)
    placement.note([1, 2, 3, 10], 3, "http://a:1")
    placement.note([1, 2, 3, 20], 3, "http://b:1")
    busy = {"http://a:1": 90, "http://b:1": 90, "http://c:1": 0}
    assert placement.choose([1, 2, 3, 10, 7], 3, busy) == "http://a:1"
    assert placement.choose([1, 2, 3, 20, 7], 3, busy) == "http://b:1"
    assert placement.choose([1, 2, 3, 30, 7], 3, busy) == "http://c:1"  # sampled nowhere
    placement.note([1, 2, 3, 10, 7, 8], 3, "http://c:1")
    assert placement.choose([1, 2, 3, 10, 7, 8, 9], 3, busy) == "http://c:1"  # the longest path
    gone = {"http://b:1": 0, "http://c:1": 9}
    assert placement.choose([1, 2, 3, 10, 7], 3, gone) in gone
    placement.forget()
    assert placement.choose([1, 2, 3, 20, 7], 3, busy) == "http://c:1"


@given(st.lists(st.integers(0, 5), min_size=1, max_size=200))
def test_no_server_has_much_more_than_its_share(prompts):
    placement, loads = Placement(SLACK), Counter(IDLE)
    for number, prompt in enumerate(prompts, 1):
        loads[placement.choose([prompt], 1, loads)] += 1
        assert max(loads.values()) <= -(-number * 5 // (4 * len(SERVERS)))


@pytest.mark.parametrize("slack", [SLACK, math.inf])
def test_a_lost_server_moves_its_own_episodes_only(slack):
    placement = Placement(slack)
    left = dict.fromkeys(SERVERS[1:], 0)
    for i in range(50):
        before = placement.choose([i], 1, IDLE)
        assert before == SERVERS[0] or placement.choose([i], 1, left) == before


def test_without_a_limit_only_the_prompt_decides():
    placement, busy = Placement(math.inf), dict(zip(SERVERS, (0, 50, 9), strict=True))
    for i in range(20):
        assert placement.choose([i], 1, busy) == placement.choose([i], 1, IDLE)
