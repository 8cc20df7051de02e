"""Buckets of a weight sync: their size, and that the next is gathered while one is sent."""

import threading

import pytest
import torch

from onepolicy.sync import broadcast as module
from onepolicy.sync.broadcast import Receiver, Sender
from support.waiting import LIMIT_S, wait_until


def send(weights, **settings):
    """Send to one receiver. Return its tensors."""
    arrived = {}
    sender = Sender(receivers=1, timeout_s=LIMIT_S, **settings)

    def receive():
        with Receiver(sender.invitation, 1, version=1) as arriving:
            arrived.update(arriving)

    thread = threading.Thread(target=receive)
    thread.start()
    with sender:
        sender.send(weights, 1)
    thread.join()
    return arrived


def tensors(count):
    return {f"t{i}": torch.full((256,), float(i)) for i in range(count)}


@pytest.mark.parametrize(("size", "buckets"), [(1024, 8), (2048, 4), (2**20, 1)])
def test_the_size_of_a_bucket_is_the_senders(size, buckets, monkeypatch):
    started, start = [], module.start_broadcast
    monkeypatch.setattr(module, "start_broadcast", lambda *a: started.append(1) or start(*a))
    arrived = send(tensors(8).items(), bucket_bytes=size)
    assert all(torch.equal(arrived[name], tensor) for name, tensor in tensors(8).items())
    assert len(started) == 2 * buckets  # on either side


def test_the_next_bucket_is_gathered_before_the_last_has_arrived(monkeypatch):
    events, start, wait = [], module.start_broadcast, module.wait_for_broadcast
    main = threading.current_thread()

    def noted(name, call):
        def noting(*arguments):
            if threading.current_thread() is main:
                events.append(name)
            return call(*arguments)

        return noting

    def gathered():
        for name, tensor in tensors(3).items():
            events.append("gather")
            yield name, tensor

    monkeypatch.setattr(module, "start_broadcast", noted("start", start))
    monkeypatch.setattr(module, "wait_for_broadcast", noted("wait", wait))
    send(gathered(), bucket_bytes=1024)
    between = " ".join(events).split("start", 2)[1]
    assert between.split() == ["gather", "wait"]  # the last bucket's first tensor comes before it


def test_the_next_bucket_arrives_while_the_last_is_loaded():
    """A receiver that has taken nothing of the first bucket yet holds the whole second one."""
    sender = Sender(receivers=1, timeout_s=LIMIT_S, bucket_bytes=1024)
    arrived = {}

    def receive():
        with Receiver(sender.invitation, 1, version=1) as arriving:
            arrived.update([next(arriving)])
            work, flat = arriving._in_flight
            wait_until(work.is_completed, LIMIT_S)
            arrived["second"] = flat.clone().view(torch.float32)
            arrived.update(arriving)

    thread = threading.Thread(target=receive)
    thread.start()
    with sender:
        sender.send(tensors(3).items(), 1)
    thread.join()
    assert torch.equal(arrived["second"], tensors(3)["t1"])
    assert torch.equal(arrived["t2"], tensors(3)["t2"])
