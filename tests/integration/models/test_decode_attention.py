"""Decode attention over a KV cache against softmax(q k) v of every token by itself, as tables of
rows and as matmuls."""

from itertools import product

import torch
from torch import nn

from onepolicy.models import decode_attention
from onepolicy.models.decode_attention import KVCacheStep, kv_cache_attention
from onepolicy.models.embedding_bag_matmul import weighted_rows

SLOTS, GROUPS, SHARED, WIDTH, VALUE, LENGTH = 4, 2, 3, 8, 5, 192


def alone(q, key, value, scale, window, sinks):
    """Compute attention of one token: q [heads, D], key [S, G, D], value [S, G, Dv] -> [heads,
    Dv]."""
    out = []
    for head, vector in enumerate(q):
        keys, values = (x[-window:, head // SHARED].double() for x in (key, value))
        weight = (keys @ vector.double() * scale).exp()
        sink = 0 if sinks is None else sinks[head].double().exp()
        out.append(weight @ values / (weight.sum() + sink))
    return torch.stack(out).float()


def check_same_as_alone(lengths, window, sinks):
    torch.manual_seed(0)
    keys = torch.randn(SLOTS, GROUPS, WIDTH, LENGTH)
    values = torch.randn(SLOTS, GROUPS, LENGTH, VALUE)
    rows, sizes = torch.tensor(list(lengths)), torch.tensor(list(lengths.values()))
    last, longest = int(rows.max()) + 1, int(sizes.max())
    even = bool((sizes == sizes[0]).all())
    place = None if len(rows) == last else rows
    step = KVCacheStep(rows, sizes - 1, longest, slice(0, last), place, equal_lengths=even)
    query = torch.randn(1, GROUPS * SHARED, len(rows), WIDTH)
    s_aux = torch.randn(GROUPS * SHARED) if sinks else None
    key, value = keys[:last, :, :, :longest].transpose(2, 3), values[:last, :, :longest]
    options = {"kv_cache_step": step, "scaling": 0.3, "sliding_window": window, "s_aux": s_aux}
    out, _ = kv_cache_attention(nn.Module(), query, key, value, None, **options)
    for i, (row, size) in enumerate(lengths.items()):
        seen = keys[row, :, :, :size].permute(2, 0, 1), values[row, :, :size].transpose(0, 1)
        expected = alone(query[0, :, i], *seen, 0.3, window or LENGTH, s_aux)
        torch.testing.assert_close(out[0, i], expected, atol=1e-5, rtol=1e-4)


def test_same_as_alone(monkeypatch, subtests):
    batches = {0: 3, 1: 70, 3: 130}, {0: 1, 1: 64, 2: 65, 3: 7}, {1: 129, 2: 129}
    for shared in (8, 0):  # tables, matmuls
        monkeypatch.setattr(decode_attention, "MAX_HEADS_PER_KEY", shared)
        for lengths, window, sinks in product(batches, (None, 5, 66), (False, True)):
            with subtests.test(shared=shared, lengths=lengths, window=window, sinks=sinks):
                check_same_as_alone(lengths, window, sinks)


def test_one_sequence_of_one_key_head():
    """Several query heads share the only bag, and expanding it gives a view that has no flat
    index."""
    torch.manual_seed(0)
    keys, values = torch.randn(1, 1, WIDTH, 64), torch.randn(1, 1, 64, VALUE)
    query, one = torch.randn(1, SHARED, 1, WIDTH), slice(0, 1)
    step = KVCacheStep(torch.tensor([0]), torch.tensor([6]), 7, one, None, equal_lengths=True)
    key, value = keys[:, :, :, :7].transpose(2, 3), values[:, :, :7]
    assert decode_attention.reads_as_table(query[0].transpose(0, 1), key, step)
    options = {"kv_cache_step": step, "scaling": 0.3}
    out, _ = kv_cache_attention(nn.Module(), query, key, value, None, **options)
    expected = alone(query[0, :, 0], key[0].transpose(0, 1), value[0].transpose(0, 1), 0.3, 7, None)
    torch.testing.assert_close(out[0, 0], expected, atol=1e-5, rtol=1e-4)


def test_only_whole_blocks_of_the_cache_are_read_as_a_table():
    def taken(keys, **step):
        view = keys.transpose(2, 3)[:, :, :10]
        rows, places = torch.arange(2), torch.full((2,), 9)
        where = KVCacheStep(rows, places, 10, **{"view": slice(0, 2), **step})
        return decode_attention.reads_as_table(torch.zeros(2, 4, 8), view, where)

    assert taken(torch.zeros(2, 2, 8, 128))
    assert not taken(torch.zeros(2, 2, 8, 100))
    assert not taken(torch.zeros(2, 2, 8, 128, dtype=torch.bfloat16))
    assert not taken(torch.zeros(2, 2, 128, 8).transpose(2, 3))  # not the layout of the KV cache
    assert not taken(torch.zeros(2, 2, 8, 128), view=torch.tensor([1, 0]))  # gathered
    assert not taken(torch.zeros(2, 2, 8, 128), queries=torch.zeros(2, 1, dtype=torch.int64))


def test_weighted_rows():
    table = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])
    index = torch.tensor([[0, 2], [1, 1]], dtype=torch.int32)
    weight = torch.tensor([[1.0, 2.0], [0.5, -1.0]])
    assert weighted_rows(table, index, weight).tolist() == [[7.0, 70.0], [-1.0, -10.0]]
