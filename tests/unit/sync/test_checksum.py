"""The checksum of weights: the changes that it detects, and that it does not depend on the
computation."""

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onepolicy.config import TrainingError
from onepolicy.sync import checksum as module
from onepolicy.sync.checksum import LEVELS, WIDTH, ChecksumAccumulator, describe_difference


def by_hand(data: bytes, key: bytes) -> int:
    """Compute the checksum in Python's integers, row by row."""
    stream = hashlib.shake_128(b"onepolicy weights" + key).digest(8 * LEVELS * WIDTH)
    table = [
        int.from_bytes(stream[i : i + 8], "little", signed=True) for i in range(0, len(stream), 8)
    ]
    data += bytes(-len(data) % 4)
    words = [int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, len(data), 4)]
    for level in range(LEVELS):
        row = table[level * WIDTH : (level + 1) * WIDTH]
        starts = range(0, max(len(words), 1), WIDTH)
        words = [
            sum(w * c for w, c in zip(words[s : s + WIDTH], row, strict=False)) % 2**64
            for s in starts
        ]
        if len(words) == 1:
            break
    return (words[0] + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("count", [0, 1, 5, 4 * WIDTH, 4 * WIDTH + 3, 40 * WIDTH + 1])
def test_equals_the_sum_computed_by_hand(count):
    data = torch.randint(
        0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count)
    )
    assert int(ChecksumAccumulator(b"k").checksum_of(data)) == by_hand(bytes(data.tolist()), b"k")


def test_every_dtype_stride_and_chunk_size(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    floats = torch.randn(3 * WIDTH + 7, 5, generator=generator)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool):
        tensor = (floats * 100).to(dtype)
        whole = int(ChecksumAccumulator().checksum_of(tensor))
        assert whole == by_hand(bytes(tensor.view(-1).view(torch.uint8).tolist()), b"")
        assert int(ChecksumAccumulator().checksum_of(tensor.t().contiguous().t())) == whole
        shifted = torch.cat([tensor.view(-1)[:1], tensor.view(-1)])[1:].view(tensor.shape)
        assert int(ChecksumAccumulator().checksum_of(shifted)) == whole
    monkeypatch.setitem(module.CHUNK, "cpu", 2 * WIDTH)
    assert int(ChecksumAccumulator().checksum_of(tensor)) == whole


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_flipped_bit_and_two_exchanged_values_change_it(data):
    count = data.draw(st.sampled_from([2, 7, WIDTH + 3]))
    tensor = torch.arange(count, dtype=torch.float32).neg()
    before = int(ChecksumAccumulator().checksum_of(tensor))
    place, bit = data.draw(st.integers(0, 4 * count - 1)), data.draw(st.integers(0, 7))
    flipped = tensor.clone()
    flipped.view(torch.uint8)[place] ^= 1 << bit
    assert int(ChecksumAccumulator().checksum_of(flipped)) != before
    i, j = data.draw(st.permutations(range(count)))[:2] if count < 10 else (1, WIDTH + 1)
    tensor[[i, j]] = tensor[[j, i]]
    assert int(ChecksumAccumulator().checksum_of(tensor)) != before


def test_two_flipped_signs_do_not_cancel():
    """Their words change by 2^31 each. Products of odd numbers modulo 2^64 would cancel for 64-bit
    words."""
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(64, generator=generator)
    before = ChecksumAccumulator().checksum_of(tensor)
    for i in range(64):
        for j in range(i):
            other = tensor.clone()
            other[[i, j]] *= -1
            assert not torch.equal(ChecksumAccumulator().checksum_of(other), before)


def test_the_key_and_every_name_count():
    tensor, half = torch.ones(3), torch.ones(3, dtype=torch.bfloat16)
    assert not torch.equal(
        ChecksumAccumulator(b"1").checksum_of(tensor), ChecksumAccumulator(b"2").checksum_of(tensor)
    )
    sums = ChecksumAccumulator()
    assert [name for name, _ in sums.add_each([("a", tensor), ("b", half)])] == ["a", "b"]
    found = sums.pop_all()
    assert found == {
        "a": ["float32", [3], int(sums.checksum_of(tensor))],
        "b": ["bfloat16", [3], int(sums.checksum_of(half))],
    }
    assert describe_difference(found, dict(found)) is None
    assert describe_difference(found, {"a": found["a"]}) == "1 tensors are missing, first 'b'"
    assert describe_difference({"a": found["a"]}, found) == "1 tensors were never sent, first 'b'"
    assert "is float32 [4], sent was float32 [3]" in describe_difference(
        found, found | {"a": ["float32", [4], 0]}
    )
    assert "the bytes of 'a'" in describe_difference(found, found | {"a": ["float32", [3], 0]})
    with pytest.raises(TrainingError, match="'a' came twice"):
        sums.add("a", tensor)
