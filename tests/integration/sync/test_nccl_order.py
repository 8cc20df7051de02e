"""The order of calls with NCCL, tried with a group that blocks as NCCL does. No GPU, no NCCL."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from onepolicy.config import TrainingError
from onepolicy.sync import broadcast as module
from onepolicy.sync.broadcast import Receiver, ReceiverLost, Sender
from onepolicy.sync.group import join_store, wait_for_broadcast
from onepolicy.sync.signed_store import SignedStore
from support.waiting import LIMIT_S

BLOCKED_S = 5.0


def tensors():
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 5), "empty": (0,), "large": (300, 40), "scalar": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class BlockingGroup:
    """A process group among threads, whose first collective blocks until every rank calls one.

    Later broadcasts block in `wait` only, as NCCL's work on a GPU does.
    """

    def __init__(self, all_called, arrived):
        self.all_called, self.arrived, self.connected = all_called, arrived, False

    def broadcast(self, data, options):
        if not self.connected:
            try:
                self.all_called.wait(BLOCKED_S)
            except threading.BrokenBarrierError:
                raise RuntimeError("a rank called no collective") from None
            self.connected = True
        return Work(self, data[0])


class Work:
    def __init__(self, group, data):
        self.group, self.data = group, data

    def wait(self, timeout):
        self.group.exchange(self.data)


class SendingEnd(BlockingGroup):
    def exchange(self, data):
        self.arrived.value = data.clone()
        self.all_called.wait(BLOCKED_S)  # the value is there
        self.all_called.wait(BLOCKED_S)  # everybody has it


class ReceivingEnd(BlockingGroup):
    def exchange(self, data):
        self.all_called.wait(BLOCKED_S)
        data.copy_(self.arrived.value)
        self.all_called.wait(BLOCKED_S)


class Box:
    value = None


@pytest.fixture
def blocking_groups(monkeypatch):
    """Return a list that becomes the (rank, size) of each group made."""
    monkeypatch.setattr(module, "BUCKET_BYTES", 4096)
    barrier, box, made = threading.Barrier(3), Box(), []

    def make(store, rank, size, **settings):
        made.append((rank, size))
        assert settings["backend"] == "nccl"
        return (ReceivingEnd if rank else SendingEnd)(barrier, box)

    monkeypatch.setattr(module, "make_process_group", make)
    return made


@contextmanager
def receiving(sender, ranks):
    """Receive with these ranks meanwhile. Yield {rank: its tensors, or the text of its error}."""
    found = {}

    def receive(rank):
        try:
            with Receiver(sender.invitation, rank, version=3) as arriving:
                found[rank] = dict(arriving)
        except TrainingError as error:
            found[rank] = str(error)

    with ThreadPoolExecutor(len(ranks)) as pool:
        for rank in ranks:
            pool.submit(receive, rank)
        yield found


def test_both_sides_connect_before_either_waits_for_the_other(blocking_groups):
    weights = tensors()
    sender = Sender(receivers=2, backend="nccl", timeout_s=LIMIT_S)
    with receiving(sender, [1, 2]) as arrived, sender:
        sender.send(weights.items(), 3)
    assert set(blocking_groups) == {(0, 3), (1, 3), (2, 3)}
    assert arrived.keys() == {1, 2}
    for copy in arrived.values():
        assert list(copy) == list(weights)
        assert all(torch.equal(copy[name], weights[name]) for name in weights)


def test_a_sender_that_fails_first_ends_the_receivers_wait_for_a_connection(blocking_groups):
    def broken():
        raise TrainingError("no weights today")
        yield

    sender = Sender(receivers=1, backend="nccl", timeout_s=LIMIT_S)
    stopped = pytest.raises(TrainingError, match="no weights today")
    with receiving(sender, [1]) as found, sender, stopped:
        sender.send(broken(), 3)
    assert "no weights today" in found[1]


class DeafGroup:
    """A process group whose first collective never returns, as NCCL's without the other ranks."""

    def broadcast(self, data, options):
        threading.Event().wait()


def deaf_update(monkeypatch, receivers, come):
    """Return the errors of the sender and of the receivers that come."""
    monkeypatch.setattr(module, "make_process_group", lambda *_, **__: DeafGroup())
    sender = Sender(receivers=receivers, backend="nccl", timeout_s=0.5)
    for rank in set(range(1, 1 + receivers)) - set(come):  # these join, and then nothing
        store = join_store(sender.settings.host, sender.settings.port, LIMIT_S)
        key = bytes.fromhex(sender.settings.key)
        SignedStore(store, key, LIMIT_S).put_message(f"here/{rank}", True)
    with receiving(sender, come) as problems, sender, pytest.raises(ReceiverLost) as lost:
        sender.send(tensors().items(), 3)
    return str(lost.value), problems


def test_a_connection_that_nobody_makes_ends_with_the_limit(monkeypatch):
    problem, problems = deaf_update(monkeypatch, 2, [1, 2])
    assert "each receiver tried" in problem
    assert "no connection within 0.5 s" in problem
    for text in problems.values():
        assert "cannot join the sender of the weights" in text


def test_the_receiver_that_does_not_connect_is_named(monkeypatch):
    problem, problems = deaf_update(monkeypatch, 2, [1])
    assert "(receiver 2 did not try)" in problem
    assert problems.keys() == {1}


class SlowWork:
    def wait(self, timeout):
        raise RuntimeError(f"nothing after {timeout.total_seconds():g} s")


def test_every_wait_for_a_broadcast_has_the_limit():
    """NCCL's wait without one returns at once, and the device is never done."""
    with pytest.raises(RuntimeError, match=r"nothing after 7 s"):
        wait_for_broadcast(SlowWork(), torch.device("cpu"), 7.0)
