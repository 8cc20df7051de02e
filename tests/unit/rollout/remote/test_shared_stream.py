"""A stream of weights for several readers: made once, bounded, and failing for all."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from onepolicy.rollout.remote.shared_stream import SharedStream
from support.waiting import LIMIT_S


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
    assert read_all(SharedStream(counted(made, 50), 3, ahead=ahead), 3) == [list(range(50))] * 3
    assert made == list(range(50))


def test_a_fast_reader_waits_for_the_slowest():
    made = []
    stream = SharedStream(counted(made, 9), 2, ahead=4)
    fast, slow = stream.read(0), stream.read(1)
    assert [next(fast) for _ in range(4)] == [0, 1, 2, 3]
    fifth = ThreadPoolExecutor(1).submit(next, fast)
    assert not fifth.done()
    assert made == [0, 1, 2, 3]
    assert next(slow) == 0
    assert fifth.result(LIMIT_S) == 4


def test_a_closed_reader_keeps_nobody_waiting():
    stream = SharedStream(iter(range(9)), 3, ahead=2)
    left = stream.read(1)
    next(left)
    left.close()
    stream.close(2)  # never began
    assert list(stream.read(0)) == list(range(9))


def test_an_error_of_the_source_reaches_every_reader():
    def source():
        yield 1
        raise ValueError("a rank is gone")

    stream, errors, together = SharedStream(source(), 2, ahead=9), [], threading.Barrier(2)

    def read(number):
        together.wait(LIMIT_S)
        with pytest.raises(ValueError, match="a rank is gone"):
            list(stream.read(number))
        errors.append(number)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(read, range(2)))
    assert sorted(errors) == [0, 1]
