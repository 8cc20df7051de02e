"""A stream of weights for several readers: made once, bounded, and failing for all."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from onepolicy.rollout.remote.client import EngineLost
from onepolicy.rollout.remote.shared_stream import SharedStream
from support.waiting import LIMIT_S


def shared(source, readers, size=lambda item: 1, **limits):
    return SharedStream(source, readers, size=size, **limits)


def read_all(stream, readers):
    with ThreadPoolExecutor(readers) as pool:
        found = [pool.submit(lambda n=n: list(stream.read(n))) for n in range(readers)]
        return [each.result(LIMIT_S) for each in found]


def counted(made, count):
    for item in range(count):
        made.append(item)
        yield item


@pytest.mark.parametrize("ahead", [1, 3, 100])
def test_every_reader_gets_all_items_and_each_is_made_once(ahead):
    made = []
    assert (
        read_all(shared(counted(made, 50), 3, ahead=ahead, limit=LIMIT_S), 3)
        == [list(range(50))] * 3
    )
    assert made == list(range(50))


def test_a_fast_reader_waits_for_the_slowest():
    made = []
    stream = shared(counted(made, 9), 2, ahead=4, limit=LIMIT_S)
    fast, slow = stream.read(0), stream.read(1)
    assert [next(fast) for _ in range(4)] == [0, 1, 2, 3]
    fifth = ThreadPoolExecutor(1).submit(next, fast)
    assert not fifth.done()
    assert made == [0, 1, 2, 3]
    assert next(slow) == 0
    assert fifth.result(LIMIT_S) == 4


def test_large_items_are_bounded_by_their_size():
    """The fused experts of a few layers would fill rank 0's GPU."""
    made = []
    stream = shared(counted(made, 9), 2, size=lambda item: 5, ahead=8, limit=LIMIT_S)
    fast, slow = stream.read(0), stream.read(1)
    assert [next(fast), next(fast)] == [0, 1]
    third = ThreadPoolExecutor(1).submit(next, fast)
    assert not third.done()
    assert made == [0, 1]
    assert next(slow) == 0
    assert third.result(LIMIT_S) == 2


def test_a_closed_reader_keeps_nobody_waiting():
    stream = shared(iter(range(9)), 3, ahead=2, limit=LIMIT_S)
    left = stream.read(1)
    next(left)
    left.close()
    stream.close(2)  # never began
    assert list(stream.read(0)) == list(range(9))


def test_a_reader_that_stands_still_is_left_behind():
    """The others have all items before their servers give up; it hears that it was lost."""
    made = []
    stream = shared(counted(made, 99), 3, ahead=4, limit=2)
    hung = stream.read(0)
    assert [next(hung), next(hung)] == [0, 1]
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(lambda n=n: list(stream.read(n))) for n in (1, 2)]
        assert [each.result(LIMIT_S) for each in others] == [list(range(99))] * 2
    assert made == list(range(99))
    with pytest.raises(EngineLost, match=r"took no weights for 2 s"):
        next(hung)


def test_a_slow_source_leaves_no_reader_behind():
    """Readers wait for it together."""

    def source():
        for item in range(3):
            time.sleep(0.3)
            yield item

    stream = shared(source(), 2, ahead=9, limit=0.1)
    assert read_all(stream, 2) == [[0, 1, 2]] * 2


def test_an_error_of_the_source_reaches_every_reader():
    def source():
        yield 1
        raise ValueError("a rank is gone")

    stream, errors, together = (
        shared(source(), 2, ahead=9, limit=LIMIT_S),
        [],
        threading.Barrier(2),
    )

    def read(number):
        together.wait(LIMIT_S)
        with pytest.raises(ValueError, match="a rank is gone"):
            list(stream.read(number))
        errors.append(number)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(read, range(2)))
    assert sorted(errors) == [0, 1]
