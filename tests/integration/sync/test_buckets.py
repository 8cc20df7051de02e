"""Buckets of a weight sync: their size, and that the next is gathered while one is sent."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from onepolicy.sync import broadcast as module
from onepolicy.sync.broadcast import Receiver, Sender
from support.waiting import LIMIT_S, wait_until


def send(weights, take=dict, **settings):
    """Send to one receiver. Return what `take` makes of the arriving tensors."""

    def receive(invitation):
        with Receiver(invitation, 1, version=1) as arriving:
            return take(arriving)

    sender = Sender(receivers=1, timeout_s=LIMIT_S, **settings)
    with ThreadPoolExecutor(1) as pool, sender:
        received = pool.submit(receive, sender.invitation)
        sender.send(weights, 1)
        return received.result()


def tensors(count):
    return {f"t{i}": torch.full((256,), float(i)) for i in range(count)}


def test_the_size_of_a_bucket_is_the_senders(monkeypatch):
    started, start = [], module.start_broadcast
    monkeypatch.setattr(module, "start_broadcast", lambda *a: started.append(1) or start(*a))
    for size, buckets in ((1024, 8), (2048, 4), (2**20, 1)):
        started.clear()
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


def test_the_next_bucket_arrives_while_the_last_is_loaded(monkeypatch):
    """A receiver that has taken only the first tensor holds the whole second bucket."""
    begun, start, main = [], module.start_broadcast, threading.current_thread()

    def noting(group, data):
        work = start(group, data)
        if threading.current_thread() is not main:
            begun.append((work, data))
        return work

    def take(arriving):
        first = [next(arriving)]
        work, flat = begun[1]
        wait_until(work.is_completed, LIMIT_S)
        return dict(first) | {"second": flat.clone().view(torch.float32)} | dict(arriving)

    monkeypatch.setattr(module, "start_broadcast", noting)
    arrived = send(tensors(3).items(), take, bucket_bytes=1024)
    assert torch.equal(arrived["second"], tensors(3)["t1"])
    assert torch.equal(arrived["t2"], tensors(3)["t2"])
