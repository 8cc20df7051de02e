"""The checksum of weights: the changes that it detects, and that it does not depend on the
computation."""

import hashlib
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onepolicy.config import TrainingError
from onepolicy.models import checksum as module
from onepolicy.models.checksum import LEVELS, WIDTH, ChecksumAccumulator, describe_difference


def by_hand(data: bytes, key: bytes) -> int:
    """Compute the checksum in Python's integers, row by row."""
    stream = hashlib.shake_128(b"onepolicy weights" + key).digest(8 * LEVELS * WIDTH)
    data += bytes(-len(data) % 4)

    def numbers(text, size):
        parts = (text[i : i + size] for i in range(0, len(text), size))
        return [int.from_bytes(part, "little", signed=True) for part in parts]

    table, words = numbers(stream, 8), numbers(data, 4)
    for level in range(LEVELS):
        row = table[level * WIDTH : (level + 1) * WIDTH]
        rows = [words[s : s + WIDTH] for s in range(0, max(len(words), 1), WIDTH)]
        words = [sum(w * c for w, c in zip(part, row, strict=False)) % 2**64 for part in rows]
        if len(words) == 1:
            break
    return (words[0] + 2**63) % 2**64 - 2**63


def checksum(tensor: torch.Tensor, key: bytes = b"") -> int:
    return int(ChecksumAccumulator(key).checksum_of(tensor))


def test_equals_the_sum_computed_by_hand(subtests):
    for count in (0, 1, 5, 4 * WIDTH, 4 * WIDTH + 3, 40 * WIDTH + 1):
        generator = torch.Generator().manual_seed(count)
        data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
        with subtests.test(count=count):
            assert checksum(data, b"k") == by_hand(bytes(data.tolist()), b"k")


def test_every_dtype_stride_and_chunk_size(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    floats = torch.randn(3 * WIDTH + 7, 5, generator=generator)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool):
        tensor = (floats * 100).to(dtype)
        whole = checksum(tensor)
        assert whole == by_hand(bytes(tensor.view(-1).view(torch.uint8).tolist()), b"")
        assert checksum(tensor.t().contiguous().t()) == whole
        shifted = torch.cat([tensor.view(-1)[:1], tensor.view(-1)])[1:].view(tensor.shape)
        assert checksum(shifted) == whole
    monkeypatch.setitem(module.CHUNK, "cpu", 2 * WIDTH)
    assert checksum(tensor) == whole


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_flipped_bit_and_two_exchanged_values_change_it(data):
    count = data.draw(st.sampled_from([2, 7, WIDTH + 3]))
    tensor = torch.arange(count, dtype=torch.float32).neg()
    before = checksum(tensor)
    place, bit = data.draw(st.integers(0, 4 * count - 1)), data.draw(st.integers(0, 7))
    flipped = tensor.clone()
    flipped.view(torch.uint8)[place] ^= 1 << bit
    assert checksum(flipped) != before
    i, j = data.draw(st.permutations(range(count)))[:2] if count < 10 else (1, WIDTH + 1)
    tensor[[i, j]] = tensor[[j, i]]
    assert checksum(tensor) != before


def test_two_flipped_signs_do_not_cancel():
    """Their words change by 2^31 each. Products of odd numbers modulo 2^64 would cancel for 64-bit
    words."""
    tensor = torch.randn(24, generator=torch.Generator().manual_seed(0))
    before = checksum(tensor)
    for pair in combinations(range(24), 2):
        other = tensor.clone()
        other[list(pair)] *= -1
        assert checksum(other) != before


def test_the_key_and_every_name_count():
    tensor, half = torch.ones(3), torch.ones(3, dtype=torch.bfloat16)
    assert checksum(tensor, b"1") != checksum(tensor, b"2")
    sums = ChecksumAccumulator()
    assert [name for name, _ in sums.add_each([("a", tensor), ("b", half)])] == ["a", "b"]
    found = sums.pop_all()
    a, b = ["float32", [3], checksum(tensor)], ["bfloat16", [3], checksum(half)]
    assert found == {"a": a, "b": b}
    assert describe_difference(found, dict(found)) is None
    assert describe_difference(found, {"a": found["a"]}) == "1 tensors are missing, first 'b'"
    assert describe_difference({"a": found["a"]}, found) == "1 tensors were never sent, first 'b'"
    longer, other = ({"a": ["float32", [count], 0]} for count in (4, 3))
    words = "is float32 [4], sent was float32 [3]"
    assert words in describe_difference(found, found | longer)
    assert "the bytes of 'a'" in describe_difference(found, found | other)
    with pytest.raises(TrainingError, match="'a' came twice"):
        sums.add("a", tensor)
