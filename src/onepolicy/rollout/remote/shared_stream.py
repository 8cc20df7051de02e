"""One stream of weights for several readers, each in a thread of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Generic, TypeVar

from onepolicy.rollout.remote.client import EngineLost

T = TypeVar("T")


class SharedStream(Generic[T]):
    """A stream whose items are made once, and given to every reader in their order.

    The learner gathers a tensor of all ranks when the first reader asks for it. A reader that is
    ahead of the slowest one by items of `ahead` in all, by their `size`, waits for it, at most
    `limit` seconds: then the stream goes on without that one. A reader that stops early must be
    closed, so that no other waits for it.
    """

    def __init__(
        self,
        source: Iterable[T],
        readers: int,
        *,
        ahead: int,
        size: Callable[[T], int],
        limit: float,
    ) -> None:
        self._source, self._size = iter(source), size
        self._ahead, self._limit = ahead, limit
        self._items: deque[T] = deque()  # from the slowest reader's next item on
        self._first = 0  # number of the first of them
        self._next = dict.fromkeys(range(readers), 0)  # open reader -> number of its next item
        self._end: int | None = None
        self._failure: BaseException | None = None
        self._making = False
        self._changed = threading.Condition()

    def read(self, reader: int) -> Iterator[T]:
        """Yield all items.

        Raises the source's error in every reader, and EngineLost in one that was too slow.
        """
        try:
            while True:
                found = self._take(reader)
                if found is None:
                    return
                yield found[0]
        finally:
            self.close(reader)

    def close(self, reader: int) -> None:
        """Let no other reader wait for this one."""
        with self._changed:
            self._next.pop(reader, None)
            self._drop_read()
            self._changed.notify_all()

    def _take(self, reader: int) -> tuple[T] | None:
        """Return the reader's next item, None at the end."""
        with self._changed:
            if reader not in self._next:
                raise EngineLost(
                    f"rollout.engine.url: a server took no weights for {self._limit:g} s (half of "
                    "rollout.engine.timeout_s), and the others did not wait longer"
                )
            number = self._next[reader]
            while not self._has(number):
                if self._failure is not None:
                    raise self._failure
                if number == self._end:
                    return None
                if self._making:
                    self._changed.wait()
                elif self._has_room():
                    self._make()
                elif not self._changed.wait_for(partial(self._goes_on, number), self._limit):
                    self._leave_slowest()
            item = self._items[number - self._first]
            self._next[reader] = number + 1
            self._drop_read()
            return (item,)

    def _has(self, number: int) -> bool:
        return number < self._first + len(self._items)

    def _goes_on(self, number: int) -> bool:
        """Return whether this item is there, or the slowest reader has made room for it."""
        return self._has(number) or self._has_room()

    def _has_room(self) -> bool:
        """Return whether another item may be made. One may be larger than all of the room."""
        return sum(map(self._size, self._items)) < self._ahead

    def _leave_slowest(self) -> None:
        """Go on without the readers that have not taken the first item."""
        slowest = min(self._next.values())
        self._next = {reader: n for reader, n in self._next.items() if n > slowest}
        self._drop_read()

    def _make(self) -> None:
        """Make one item, without the lock: others may read meanwhile."""
        self._making = True
        self._changed.release()
        failure: BaseException | None = None
        made: list[T] = []
        try:
            made.append(next(self._source))
        except StopIteration:
            pass
        except BaseException as error:
            failure = error
        finally:
            self._changed.acquire()
        self._making, self._failure = False, failure
        if not made and failure is None:
            self._end = self._first + len(self._items)
        self._items.extend(made)
        self._changed.notify_all()

    def _drop_read(self) -> None:
        """Forget the items that every open reader has read."""
        slowest = min(self._next.values(), default=self._first + len(self._items))
        while self._items and self._first < slowest:
            self._items.popleft()
            self._first += 1
        self._changed.notify_all()
