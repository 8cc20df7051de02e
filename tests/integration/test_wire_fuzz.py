"""Messages between our processes, altered: each is read, or gives an error of ours that names it.
It never gives another error."""

import copy
import json
import random

import pytest
import torch.distributed as dist

from onepolicy.config import TrainingError
from onepolicy.launch.ranks import RankSettings
from onepolicy.sync.broadcast import BucketHeader, EndHeader
from onepolicy.sync.buckets import meta_tensors
from onepolicy.sync.messages import validate_message
from onepolicy.sync.signed_store import Invitation, SignedStore
from onepolicy.train.sharded.wire import Message, batch_message
from support.token_batches import batch_with

FAST, SLOW = 5_000, 30_000  # altered messages of each reader
ODD = [None, True, False, 0, -1, 2**70, 1.5, float("nan"), "", "x", "\ud800", "header"]
ODD += [[], [[]], {}, {"x": 1}, [1, 2, 3], "9" * 300]


BATCH = batch_message({"do": "score"}, batch_with([5, 3])).encode()


class Store:
    """A store with the writes of a stranger or of the other side."""

    def __init__(self, data=b""):
        self.data = data

    def set(self, _, text):
        self.data = text.encode()

    def get(self, _):
        return self.data


def board(store):
    found = SignedStore(dist.HashStore(), b"key", 1.0)
    found.store = store
    return found


def signed(value):
    """Return the board's copy of a message that a holder of the key has written."""
    store = Store()
    writing = board(store)
    store.data = writing._sign("name", value) + value
    return store.data


def headed(data):
    """Return a reader's message as (header, function that makes bytes of another header)."""
    message = Message.decode(data)

    def encode(header):
        if not isinstance(header, dict):
            header = {}
        return Message(header, message.tensors).encode()

    return message.header, encode


def in_json(value):
    return value, lambda altered: json.dumps(altered).encode()


READERS = {
    "message": (Message.decode, *headed(BATCH)),
    "ranks' settings": (
        lambda data: validate_message(RankSettings, json.loads(data), "it"),
        *in_json({"limit": 1800.0, "device": "cpu", "release": "1.0"}),
    ),
    "invitation": (
        lambda data: Invitation.decode(data.decode(errors="replace")),
        *in_json(json.loads(Invitation("h", 1, "ab", 2, "gloo", 1.0).encode())),
    ),
    "stranger in the store": (
        lambda data: board(Store(data))._read_message("name"),
        {"version": 1},
        lambda value: signed(json.dumps(value).encode()),
    ),
    "peer in the store": (
        lambda data: board(Store(signed(data)))._read_message("name"),
        *in_json({"version": 1, "tensors": {}}),
    ),
    "bucket": (
        lambda data: bucket(json.loads(data)),
        *in_json({"version": 1, "tensors": {"a": ["float32", [2, 3], 5], "b": ["int8", [], -1]}}),
    ),
    "end": (
        lambda data: validate_message(BucketHeader | EndHeader, json.loads(data), "it"),
        *in_json({"version": 1, "end": 3}),
    ),
}
AS_JSON = {"bucket", "end", "ranks' settings"}
"""Readers whose messages are decoded first: bytes that are no JSON are refused before (`peer in the
store`, `message`)."""


def bucket(header):
    validate_message(BucketHeader | EndHeader, header, "it")
    if "tensors" in header:
        meta_tensors(header["tensors"])


def altered_bytes(data, number):
    """Return the bytes with a few of them changed, left out, doubled or put in; the same for the
    same number."""
    chance = random.Random(number)
    found = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(found) + 1)
        length = chance.choice([1, 1, 1, 2, 8, 64])
        match chance.randrange(5):
            case 0:
                found[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                del found[place : place + length]
            case 2:
                found[place:place] = found[place : place + length]
            case 3:
                found[place:place] = chance.randbytes(length)
            case 4:
                del found[place:]
    return bytes(found)


def altered_value(value, number):
    """Return the JSON with one or two of its nodes replaced, left out, doubled or renamed."""
    chance = random.Random(number)
    value = copy.deepcopy(value)
    for _ in range(chance.randint(1, 2)):
        places = list(nodes(value))
        if not places:
            return chance.choice(ODD)
        parent, key = chance.choice(places)
        match chance.randrange(4):
            case 0 | 1:
                parent[key] = copy.deepcopy(chance.choice(ODD))
            case 2:
                del parent[key]
            case 3 if isinstance(parent, dict):
                parent[chance.choice(["x", "error", "trace", "3", "-1", "۳"])] = parent.pop(key)
            case 3:
                parent.append(copy.deepcopy(parent[key]))
    return value


def nodes(value):
    """Return (parent, key) of every node below this one."""
    keys = ()
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = range(len(value))
    for key in keys:
        yield value, key
        yield from nodes(value[key])


def refused(name, numbers):
    """Return how many altered messages were refused. Any error but TrainingError fails with the
    message's number."""
    read, value, encode = READERS[name]
    whole = encode(value)
    read(whole)
    count = 0
    for number in numbers:
        in_bytes = number % 2 and name not in AS_JSON
        data = altered_bytes(whole, number) if in_bytes else encode(altered_value(value, number))
        try:
            read(data)
        except TrainingError:
            count += 1
        except Exception as error:
            pytest.fail(f"{name}, number {number}: {type(error).__name__}: {error}")
    return count


@pytest.mark.full
@pytest.mark.parametrize("name", READERS)
def test_altered_messages_are_read_or_refused(name):
    assert refused(name, range(FAST)) > FAST // 5


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_many_altered_messages_are_read_or_refused(name):
    assert refused(name, range(FAST, FAST + SLOW)) > SLOW // 5


def test_a_message_of_another_type_names_its_first_wrong_field():
    words = r"^the answer is malformed: 1: Input should be a valid integer$"
    with pytest.raises(TrainingError, match=words):
        validate_message(tuple[int, int], [1, "x"], "the answer")


def test_a_strangers_writes_into_the_store_are_refused():
    accented = "é".encode()
    strange = [b"", b"\xff" * 80, b"0" * 64 + b"{}", b"\xc3" * 10, accented * 64]
    for data in [*strange, signed(b"{}")[:-1]]:
        with pytest.raises(TrainingError, match="not from this run"):
            board(Store(data))._read_message("name")
