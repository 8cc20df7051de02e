"""Parts of a sharded learner that need no second process: division of samples, messages, channels,
settings."""

import contextlib
import dataclasses
import socket
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onepolicy.config import TrainingError, UsageError, resolve
from onepolicy.launch.launcher import apply_torchrun_ranks
from onepolicy.train.sharded import channel
from onepolicy.train.sharded.channel import (
    TOKEN_BYTES,
    Channel,
    FailureCause,
    RankListener,
    RankLost,
    connect_to_driver,
    decode_address,
    encode_address,
)
from onepolicy.train.sharded.divide import assign_micro_batches, divide_batch
from onepolicy.train.sharded.rank_group import RankGroup, error_message
from onepolicy.train.sharded.wire import Message, batch_from_message, batch_message
from support.token_batches import batch_with
from support.waiting import LIMIT_S


def test_dealt_by_hand():
    """85 slots in micro-batches of at most 30: three would do, so two rounds of two ranks, about 21
    each."""
    lengths = [8, 13, 5, 22, 10, 7, 16, 4]
    dealt = assign_micro_batches(batch_with(lengths), 30, 2)
    slots = [[sum(lengths[s] for s in chosen) for chosen in rank] for rank in dealt]
    assert slots == [[22, 20], [22, 21]]
    assert assign_micro_batches(batch_with([5]), 30, 3) == [[[0]], [[]], [[]]]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 60), st.integers(1, 5))
def test_every_sample_is_dealt_once_within_the_budget(lengths, budget, ranks):
    dealt = assign_micro_batches(batch_with(lengths), budget, ranks)
    assert len(dealt) == ranks
    assert len({len(rounds) for rounds in dealt}) == 1
    chosen = [part for rounds in dealt for part in rounds]
    assert sorted(s for part in chosen for s in part) == list(range(len(lengths)))
    assert all(len(part) < 2 or sum(lengths[s] for s in part) <= budget for part in chosen)


def test_an_idle_rank_gets_a_sample_that_counts_for_nothing():
    batch = batch_with([5, 3])
    first, second, third = divide_batch(batch, 100, 3)
    assert (first.samples, second.samples, third.samples) == ([0], [1], [])
    assert third.rounds == [[0]]
    idle = third.batch
    assert idle.num_slots == 3
    for mine in (idle.trainable, idle.keep, idle.loss_weight, idle.routing.valid, idle.routing.ids):
        assert not mine.any()
    assert torch.equal(second.batch.routing.ids, batch.routing.ids[5:])


def test_a_batch_travels_unchanged():
    batch = batch_with([5, 3, 9])
    message = Message.decode(
        batch_message({"do": "score", "rounds": [[0], [1, 2]]}, batch).encode()
    )
    assert message.header["rounds"] == [[0], [1, 2]]
    found = batch_from_message(message)
    for field in dataclasses.fields(batch):
        expected, value = getattr(batch, field.name), getattr(found, field.name)
        if isinstance(expected, torch.Tensor):
            assert torch.equal(expected, value), field.name
            assert expected.dtype == value.dtype
    assert torch.equal(found.routing.ids, batch.routing.ids)
    assert (found.routing.layers, found.routing.num_experts) == ((1, 3), 300)


def test_views_of_one_storage_travel():
    whole = torch.arange(6.0)
    found = Message.decode(Message({}, {"a": whole[:3], "b": whole[1:]}).encode())
    assert torch.equal(found.tensors["b"], whole[1:])


@pytest.mark.parametrize("data", [b"", b"\x80\x04", b"\xff" * 64, Message({}).encode()[:-1]])
def test_bytes_that_are_no_message_are_refused(data):
    with pytest.raises(TrainingError, match="no message"):
        Message.decode(data)


@pytest.fixture
def pair():
    ours, theirs = socket.create_server(("127.0.0.1", 0)), None
    theirs = socket.create_connection(ours.getsockname())
    channels = Channel(ours.accept()[0], "rank 1"), Channel(theirs, "the driver")
    yield channels
    for each in (*channels, ours):
        each.close()


def test_silence_and_death_are_distinguished_and_named(pair):
    driver, rank = pair
    with pytest.raises(RankLost, match=r"rank 1 has sent nothing for 0.1 s") as silent:
        driver.receive(0.1)
    assert silent.value.cause == FailureCause.SILENT
    rank.connection.sendall((100).to_bytes(8, "little") + b"half")
    with pytest.raises(RankLost, match="sent nothing"):
        driver.receive(0.1)
    rank.close()
    with pytest.raises(RankLost, match="rank 1 has ended") as gone:
        driver.receive(LIMIT_S)
    assert gone.value.cause == FailureCause.DISCONNECTED


def test_a_peer_that_takes_nothing_is_named(pair):
    with pytest.raises(RankLost, match=r"rank 1 took nothing for 0.2 s"):
        pair[0].send(Message({}, {"x": torch.zeros(2**24)}), 0.2)


def test_the_first_failed_rank_is_named():
    """Rank 1 reports that a collective failed. Rank 2 is gone without a message and is the
    reason."""
    server = socket.create_server(("127.0.0.1", 0))
    ends = [socket.create_connection(server.getsockname()) for _ in range(2)]
    rank_group = RankGroup(
        {r: Channel(server.accept()[0], f"rank {r}") for r in (1, 2)}, limit=LIMIT_S
    )
    first, second = (Channel(end, "driver") for end in ends)
    first.send(error_message(RuntimeError("connection closed by peer")), LIMIT_S)
    second.close()
    try:
        with pytest.raises(RankLost, match=r"rank 2 has ended$") as lost:
            rank_group.recv()
        assert lost.value.cause == FailureCause.DISCONNECTED
    finally:
        rank_group.close()
        first.close()
        server.close()


def test_a_rank_reports_its_own_kind_of_error(pair):
    rank_group = RankGroup({1: pair[0]}, limit=LIMIT_S)
    try:
        pair[1].send(error_message(UsageError("model.path: gone")), LIMIT_S)
        with pytest.raises(UsageError, match=r"rank 1: model.path: gone"):
            rank_group.recv()
    finally:
        rank_group.close()


def test_who_does_not_know_the_token_is_hung_up_on(monkeypatch):
    monkeypatch.setattr(channel, "GREETING_S", LIMIT_S)
    listener = RankListener("127.0.0.1")
    address, token = decode_address(encode_address(listener.address, listener.token))
    found = {}
    waiting = threading.Thread(
        target=lambda: found.update(listener.accept(2, LIMIT_S, lambda: None))
    )
    waiting.start()
    stranger = socket.create_connection(address)
    stranger.sendall(b"0" * TOKEN_BYTES)
    assert stranger.recv(1) == b""
    ours = connect_to_driver(address, token, 1, LIMIT_S)
    waiting.join()
    assert list(found) == [1]
    assert "rank 1 (process" in found[1].peer
    for each in (stranger, ours, found[1], listener):
        each.close()


def test_a_slow_stranger_is_hung_up_on(monkeypatch):
    """A byte now and then is not enough: the whole greeting has one limit, and the ranks still get
    in."""
    monkeypatch.setattr(channel, "GREETING_S", 0.3)
    listener = RankListener("127.0.0.1")
    stranger, stop, hung_up = (
        socket.create_connection(listener.address),
        threading.Event(),
        threading.Event(),
    )

    def dawdle():
        try:
            while not stop.wait(0.01):
                stranger.sendall(b"0" if not hung_up.is_set() else b"")
        except OSError:
            hung_up.set()

    dawdling = threading.Thread(target=dawdle)
    monkeypatch.setattr(channel, "TOKEN_BYTES", 2**20)  # it could go on for hours
    dawdling.start()
    accepting = threading.Thread(
        target=lambda: suppressed(listener.accept, 2, 60.0, stop_when(hung_up))
    )
    accepting.start()
    assert hung_up.wait(60)
    stop.set()
    dawdling.join()
    accepting.join()
    for each in (stranger, listener):
        each.close()


class Stopped(Exception):
    from onepolicy.launch.launcher import apply_torchrun_ranks


def suppressed(call, *args):
    with contextlib.suppress(Stopped):
        call(*args)


def stop_when(event):
    def alive():
        if event.is_set():
            raise Stopped

    return alive


@pytest.mark.parametrize("strangers", [20, 200])
def test_silent_strangers_cost_the_ranks_nothing(strangers, monkeypatch):
    """They came first, and this test never lets them end."""
    monkeypatch.setattr(channel, "GREETING_S", 1e9)
    monkeypatch.setattr(channel.Channel, "read", None)  # nothing is waited for
    listener = RankListener("127.0.0.1")
    silent = [socket.create_connection(listener.address) for _ in range(strangers)]
    for each in silent[::2]:
        each.sendall(listener.token[:5])
    ours = [connect_to_driver(listener.address, listener.token, rank, 60.0) for rank in (2, 1)]
    more = [socket.create_connection(listener.address) for _ in range(strangers)]
    looks = []
    found = listener.accept(3, 60.0, lambda: looks.append(None))
    assert sorted(found) == [1, 2]
    assert "rank 2 (process" in found[2].peer
    assert len(looks) < 20 + strangers  # of one a connection at worst, not of one a time limit
    for each in (*silent, *more, *ours, *found.values(), listener):
        each.close()


def test_the_number_of_waiting_strangers_is_bounded():
    listener = RankListener("127.0.0.1")
    silent = [socket.create_connection(listener.address) for _ in range(channel.MAX_PENDING + 5)]
    most = []

    def look():
        pending = sum(is_open(each) for each in silent)
        most.append(pending)
        if len(most) > 2 and pending <= channel.MAX_PENDING:
            raise Stopped

    suppressed(listener.accept, 2, 60.0, look)
    assert most[-1] == channel.MAX_PENDING
    for each in (*silent, listener):
        each.close()


def is_open(connection):
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True


@pytest.mark.parametrize(
    "about",
    [
        {},
        {"rank": "1", "pid": 1, "host": "h"},
        {"rank": 1, "pid": None, "host": "h"},
        {"rank": 1.0, "pid": 1, "host": "h"},
        {"rank": 0, "pid": 1, "host": "h"},
        {"rank": 2, "pid": 1, "host": "h"},
        {"rank": True, "pid": 1, "host": "h"},
        {"rank": -1, "pid": 1, "host": "h"},
    ],
)
def test_a_malformed_message_of_a_rank_is_our_error(about):
    listener = RankListener("127.0.0.1")
    stranger = socket.create_connection(listener.address)
    data = Message(about).encode()
    stranger.sendall(listener.token + len(data).to_bytes(8, "little") + data)
    with pytest.raises(TrainingError, match="greet"):
        listener.accept(2, 60.0, lambda: None)
    for each in (stranger, listener):
        each.close()


def test_a_rank_that_comes_twice_or_announces_too_much_is_our_error(pair):
    listener = RankListener("127.0.0.1")
    ours = [connect_to_driver(listener.address, listener.token, 1, 5.0) for _ in range(2)]
    with pytest.raises(TrainingError, match="a second rank 1"):
        listener.accept(3, 60.0, lambda: None)
    huge = socket.create_connection(listener.address)
    huge.sendall(listener.token + b"\xff" * 8)
    with pytest.raises(TrainingError, match="greets with"):
        listener.accept(3, 60.0, lambda: None)
    pair[1].connection.sendall(b"\xff" * 8)
    with pytest.raises(TrainingError, match="rank 1 announces a message of"):
        pair[0].receive(5.0)
    for each in (*ours, huge, listener):
        each.close()


@pytest.mark.parametrize(
    ("host", "resolved", "listens"),
    [
        ("node-1", "127.0.1.1", "0.0.0.0"),
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("node-1", "127.0.0.2", "0.0.0.0"),
    ],
)
def test_a_driver_whose_name_is_a_loopback_address_advertises_the_name(
    host, resolved, listens, monkeypatch
):
    """Other machines resolve the name for themselves, so the driver sends them the name."""
    monkeypatch.setattr(channel.socket, "gethostbyname", lambda name: resolved)
    listener = RankListener(host)
    assert listener.socket.getsockname()[0] == listens
    assert decode_address(encode_address(listener.address, listener.token))[0][0] == host
    listener.close()


def test_a_rank_that_does_not_come_is_named():
    listener = RankListener("127.0.0.1")
    with pytest.raises(RankLost, match=r"rank 1 did not come within 0.1 s"):
        listener.accept(2, 0.1, lambda: None)
    listener.close()


BASE = {"out": "x", "steps": 1, "model": {"path": "m"}, "task": {"kind": "chain"}}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ["train.fsdp_param_dtype=bfloat16"],
            "train.fsdp_param_dtype: bfloat16 needs train.ranks",
        ),
        (["train.ranks=2", "train.device=cuda:1"], "train.device: cuda:1 is one device"),
        (["train.ranks=2", "model.dtype=bfloat16"], "set train.fsdp_param_dtype = bfloat16"),
        (["train.ranks=2", "rollout.engine.kind=vllm"], "use vllm-server or hf"),
        (["train.ranks=2", "numerics=on-policy"], "train.ranks: invariant operators"),
        (
            ["train.ranks=2", "train.fsdp_param_dtype=bfloat16", "train.autocast=bfloat16"],
            "train.autocast: bfloat16, but train.fsdp_param_dtype = bfloat16",
        ),
    ],
)
def test_contradictions_are_refused(settings, words):
    with pytest.raises(UsageError, match=words):
        resolve(BASE, settings)


def test_torchrun_sets_the_number_of_ranks(monkeypatch):

    plain, set_to_three = resolve(BASE), resolve(BASE, ["train.ranks=3"])
    assert apply_torchrun_ranks(plain).train.ranks == 0
    assert apply_torchrun_ranks(set_to_three, 1, resuming=True).train.ranks == 1
    assert (
        apply_torchrun_ranks(
            resolve(BASE, ["train.ranks=3", "train.rank_timeout=9"]), 0, resuming=True
        ).train.ranks
        == 0
    )
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert apply_torchrun_ranks(plain).train.ranks == 2
    assert apply_torchrun_ranks(set_to_three, resuming=True).train.ranks == 2
    with pytest.raises(UsageError, match="torchrun started 2 processes"):
        apply_torchrun_ranks(set_to_three)
