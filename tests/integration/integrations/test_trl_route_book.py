"""Routes find their samples by tokens, with tools, truncation and equal samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import onepolicy as op
from onepolicy.config import UsageError
from onepolicy.integrations.core.advantages import turns_of
from onepolicy.integrations.trl.route_book import RouteBook
from onepolicy.types import RoutingTrace
from support.replay_models import build


@pytest.fixture(scope="module")
def routers():
    return op.bind_routers(build("deepseek_v3"))


@pytest.fixture
def book(routers):
    return RouteBook(routers, "vllm-0.31")


def payload(routers, rows, first=0):
    """Return rows whose K experts begin with `first`, `first` + 1, .."""
    starts = (first + np.arange(rows)) % routers.num_experts
    experts = (starts[:, None] + np.arange(routers.top_k)) % routers.num_experts
    return np.repeat(experts[:, None], len(routers.layers), 1).astype(np.int16)


def firsts(trace: RoutingTrace):
    """Return each row's first expert, None where it has no route."""
    pairs = zip(trace.ids[:, 0, 0].tolist(), trace.valid.tolist(), strict=True)
    return [first if valid else None for first, valid in pairs]


def test_each_sample_gets_the_rows_of_its_own_path(routers, book):
    book.add([1, 2], [3, 4], routes=payload(routers, 3))
    book.add([1, 2], [5], routes=payload(routers, 2, first=1))
    one, other = book.traces([[1, 2], [1, 2]], [[5], [3, 4]])
    assert firsts(one) == [1, 2]
    assert firsts(other) == [0, 1, 2]


def test_the_last_call_of_a_tool_loop_covers_the_path(routers, book):
    book.add([1, 2], [3], routes=payload(routers, 2))
    book.add([1, 2, 3, 70, 71], [4, 5], routes=payload(routers, 6, first=1))
    (trace,) = book.traces([[1, 2]], [[3, 70, 71, 4, 5]])
    assert firsts(trace) == [1, 2, 3, 4, 5, 6]


def test_a_completion_that_was_cut_and_one_that_went_on(routers, book):
    book.add([1, 2], [3, 4, 5], routes=payload(routers, 4))
    cut, longer = book.traces([[1, 2], [1, 2]], [[3], [3, 4, 5, 70, 71]])
    assert firsts(cut) == [0, 1]
    assert firsts(longer) == [0, 1, 2, 3, None, None]  # a tool's reply was never fed


def test_another_samples_path_is_no_route(routers, book):
    book.add([1, 2], [3, 4], routes=payload(routers, 3))
    book.add([1, 2], [7, 8])
    assert book.traces([[1, 2]], [[7, 8]]) == [None]


def test_equal_samples_take_equal_paths_in_order(routers, book):
    for first in (0, 1):
        book.add([1], [2], routes=payload(routers, 1, first=first))
    found = book.traces([[1]] * 3, [[2]] * 3)
    assert [firsts(trace) for trace in found] == [[0], [1], [0]]


def test_log_probabilities_need_every_sample():
    book = RouteBook(None, "vllm")
    book.add([1], [2, 3], logp=[-1.0, None])
    assert book.logps([[1]], [[2, 3]]) == [[-1.0, None]]
    assert book.logps([[1]], [[2]]) == [[-1.0]]
    assert book.logps([[1], [4]], [[2, 3], [5]]) is None


def test_a_payload_of_another_model(routers):
    book = RouteBook(routers, "vllm")
    book.add([1], [2], routes=np.zeros((1, routers.depth + 3, routers.top_k), np.int16))
    with pytest.raises(UsageError):
        book.traces([[1]], [[2]])


def test_turns_are_runs_of_sampled_tokens():
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 0], [1, 0, 1, 1, 0, 0, 0]]).bool()
    assert turns_of(mask)[mask].tolist() == [0, 0, 1, 0, 1, 1]
    assert turns_of(mask).min() == 0
