"""Weights from one process to others: they arrive as they were sent, or both sides get an error."""

import gc
import json
import multiprocessing
import os
import signal
import socket
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from onepolicy.config import TrainingError
from onepolicy.sync import broadcast as module
from onepolicy.sync.broadcast import Receiver, Sender
from onepolicy.sync.group import join_store
from onepolicy.sync.signed_store import Invitation, SignedStore
from support.waiting import LIMIT_S, wait_until


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(module, "BUCKET_BYTES", 4096)


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = {"a": (3, 5), "b": (0,), "big": (300, 40), "c": (), "d": (7,)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in made.items()}
    weights["half"] = torch.randn(5, 3, generator=generator).bfloat16()
    weights["strided"] = torch.randn(6, 4, generator=generator).t()
    weights["bytes"] = torch.arange(5, dtype=torch.uint8)
    return weights


def update(weights, *, receivers=1, sent=3, promised=3, take=dict, timeout_s=LIMIT_S):
    """Return the result of the sender and of every receiver: a value or an exception."""

    def receive(invitation, rank):
        with Receiver(invitation, rank, version=promised) as arriving:
            return take(arriving)

    def ended(work, *args):
        try:
            return work(*args)
        except (TrainingError, OSError) as error:
            return error

    source = weights.items() if isinstance(weights, dict) else weights
    sender = Sender(receivers=receivers, timeout_s=timeout_s)
    with sender, ThreadPoolExecutor(1 + receivers) as pool:
        sending = pool.submit(ended, sender.send, source, sent)
        got = [pool.submit(ended, receive, sender.invitation, 1 + i) for i in range(receivers)]
        return sending.result(), [each.result() for each in got]


def failed(error, words):
    """Check that an end was left with this error."""
    with pytest.raises(TrainingError, match=words):
        raise error


def test_every_byte_dtype_and_shape_arrives_at_all(monkeypatch, subtests):
    for bucket_bytes in (1, 2000, 2**20):
        monkeypatch.setattr(module, "BUCKET_BYTES", bucket_bytes)
        weights = tensors()
        sender, copies = update(weights, receivers=2)
        with subtests.test(bucket_bytes=bucket_bytes):
            assert sender is None
            for copy in copies:
                assert list(copy) == list(weights)
                for name, tensor in weights.items():
                    assert copy[name].dtype == tensor.dtype
                    assert torch.equal(copy[name], tensor), name
                    copy[name].zero_()  # the engine's own
            assert weights["a"].any()
    assert update({})[1] == [{}]


def flipped(tensor):
    tensor.view(torch.uint8)[17, 3] ^= 1
    return tensor


ALTERED = [
    ("big", flipped, "the bytes of 'big' are not those that were sent"),
    ("c", lambda tensor: None, "1 tensors are missing, first 'c'"),
    ("half", torch.zeros_like, "the bytes of 'half'"),
    (
        "half",
        lambda tensor: tensor.view(torch.float16),
        r"'half' is float16 \[5, 3\], sent was bfloat16 \[5, 3\]",
    ),
]


def test_altered_data_is_named_on_both_sides(monkeypatch, subtests):
    original = module.unflatten_bucket
    for name, change, problem in ALTERED:

        def altered(*args, name=name, change=change):
            bucket = original(*args)
            if name in bucket:
                bucket[name] = change(bucket[name])
            return {name: tensor for name, tensor in bucket.items() if tensor is not None}

        monkeypatch.setattr(module, "unflatten_bucket", altered)
        sender, (receiver,) = update(tensors())
        with subtests.test(problem=problem):
            failed(receiver, f"version 3: .*{problem}")
            failed(sender, f"receiver 1 failed: .*{problem}")


def test_a_tensor_that_is_sent_twice_is_named():
    sender, (receiver,) = update([*tensors().items(), ("a", torch.zeros(2))])
    for error in (sender, receiver):
        failed(error, "'a' came twice")


def test_weights_of_another_version_are_refused():
    for sent in (2, 4):
        sender, (receiver,) = update(tensors(), sent=sent, promised=3)
        for error in (sender, receiver):
            failed(error, f"weights of version {sent} came instead of version 3")


def test_a_failing_source_ends_the_receivers():
    def weights():
        yield "a", torch.ones(2)
        raise TrainingError("the learner lost a rank")

    sender, receivers = update(weights(), receivers=2)
    failed(sender, r"^the learner lost a rank")
    for error in receivers:
        failed(error, "the other side failed: TrainingError: the learner lost a rank")


def test_an_engine_that_fails_or_stops_early_is_an_error_at_the_sender():
    def fails(arriving):
        next(arriving)
        raise OSError("no memory left")

    sender, (receiver,) = update(tensors(), take=fails)
    assert isinstance(receiver, OSError)
    failed(sender, r"receiver 1 failed: OSError: no memory left|receiver is gone")
    sender, (receiver,) = update(tensors(), take=lambda arriving: next(arriving))
    for error in (sender, receiver):
        failed(error, "did not take all tensors")


def test_an_absent_receiver_is_named_in_time():
    sender, _ = update(tensors(), receivers=0)
    assert sender is None
    late = pytest.raises(TrainingError, match=r"receiver 1 took more than 0.5 s to join")
    with Sender(receivers=2, timeout_s=0.5) as sending, late:
        sending.send(tensors().items(), 1)
    with Sender(receivers=1, timeout_s=LIMIT_S) as sending, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sending.send, tensors().items(), 1)
        sending.cancel()
        with pytest.raises(TrainingError, match="given up"):
            waiting.result(LIMIT_S)


def killed(pipe):
    with Receiver(pipe.recv(), 1, version=1) as arriving:
        next(arriving)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.process
def test_a_killed_receiver_is_an_error_at_once():
    forks = multiprocessing.get_context("fork")  # which have all imports already
    mine, theirs = forks.Pipe()
    child = forks.Process(target=killed, args=(theirs,), daemon=True)
    child.start()
    with Sender(receivers=1, timeout_s=LIMIT_S) as sender:
        mine.send(sender.invitation)
        ending = threading.Thread(target=lambda: (child.join(), sender.cancel()), daemon=True)
        ending.start()
        with pytest.raises(TrainingError, match=r"gone|given up"):
            sender.send(((str(i), torch.ones(100_000)) for i in range(100)), 1)
    ending.join()


def update_without_rank_2():
    """Return the errors of a sender and of receiver 1. Receiver 2 dies while they connect to it."""

    def receive(invitation):
        with Receiver(invitation, 1, version=1) as arriving:
            dict(arriving)

    def failed_soon(end):
        return str(end.exception(LIMIT_S))

    with Sender(receivers=2, timeout_s=LIMIT_S) as sender, ThreadPoolExecutor(2) as pool:
        secret = sender.settings
        store = join_store(secret.host, secret.port, LIMIT_S)
        SignedStore(store, bytes.fromhex(secret.key), LIMIT_S).put_message("here/2", True)
        sending = pool.submit(sender.send, tensors().items(), 1)
        receiving = pool.submit(receive, sender.invitation)
        yield  # until both connect
        sender.cancel()  # its caller has found that receiver 2 is gone
        yield failed_soon(sending), failed_soon(receiving)


def test_a_receiver_that_dies_while_the_others_connect_ends_the_update(monkeypatch):
    """gloo's own wait for the missing rank ends with the time limit only."""
    make, connecting = module.make_process_group, []

    def make_noted(*args, **settings):
        connecting.append(threading.current_thread())
        return make(*args, **settings)

    monkeypatch.setattr(module, "make_process_group", make_noted)
    steps = update_without_rank_2()
    next(steps)
    wait_until(lambda: len(connecting) == 2)
    problems = next(steps)
    assert all("given up, because a receiver will not come" in each for each in problems), problems
    steps.close()
    gc.collect()  # with the sender's store, the threads that still connect to rank 2 end
    wait_until(lambda: not any(thread.is_alive() for thread in connecting))


def test_nothing_is_sent_before_all_receivers_are_connected(monkeypatch):
    """A receiver that still connects to another would take no bytes."""
    make, prepare = module.make_process_group, Sender._prepare
    prepared, too_early = threading.Event(), []

    def make_slowly(store, rank, size, **settings):
        group = make(store, rank, size, **settings)
        if rank == 2:
            too_early.append(prepared.wait(0.5))
        return group

    def prepare_noted(*args):
        prepared.set()
        return prepare(*args)

    monkeypatch.setattr(module, "make_process_group", make_slowly)
    monkeypatch.setattr(Sender, "_prepare", prepare_noted)
    sender, _ = update(tensors(), receivers=2)
    assert sender is None
    assert prepared.is_set()
    assert too_early == [False]


def test_the_error_of_a_lost_receiver_closes_its_connections(monkeypatch):
    """The others wait in the group until its connections close, and the error is kept until they
    have ended."""
    sent = []

    class Work:
        def wait(self, limit):
            raise RuntimeError("connection reset")

    def start(group, data):
        sent.append(weakref.ref(work := Work()))
        return work

    monkeypatch.setattr(module, "start_broadcast", start)
    monkeypatch.setattr(Sender, "_make_group", lambda _: object())
    with Sender(receivers=1, host="127.0.0.1", timeout_s=LIMIT_S) as sender:
        lost = "a receiver is gone or too slow: connection reset"
        with pytest.raises(TrainingError, match=lost) as kept:
            sender.send([("a", torch.ones(1))], 3)
        assert sent[0]() is None, kept


def test_an_update_cannot_be_altered_without_the_key():
    """A stranger finds the store and writes the message that the receiver waits for."""
    refused = threading.Event()

    def weights(secret):
        stranger = SignedStore(join_store(secret.host, secret.port, LIMIT_S), b"guess", LIMIT_S)
        stranger.put_message("bucket/0", {"version": 3, "end": 0})
        refused.wait(LIMIT_S)
        yield "a", torch.ones(2)

    with Sender(receivers=1, timeout_s=LIMIT_S) as sender, ThreadPoolExecutor(1) as pool:
        secret = Invitation.decode(sender.invitation)
        assert len(bytes.fromhex(secret.key)) == 32
        sending = pool.submit(sender.send, weights(secret), 3)
        arriving = Receiver(sender.invitation, 1, version=3)
        with pytest.raises(TrainingError, match="not from this run"), arriving:
            dict(arriving)
        refused.set()
        with pytest.raises(TrainingError, match=r"receiver 1 failed: .* not from this run"):
            sending.result()


def test_the_store_listens_on_the_loopback_only():
    with Sender(receivers=1) as sender:
        port = json.loads(sender.invitation)["port"]
        # fails if the store listens on every address
        socket.create_server(("127.0.0.2", port)).close()
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port))
