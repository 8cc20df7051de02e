"""Parts of a sharded learner that need no second process: division of samples, messages,
settings."""

import dataclasses
import json
import os
import sys

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from onepolicy.config import TrainingError, UsageError, resolve
from onepolicy.launch import ranks as launch_ranks
from onepolicy.launch.launcher import apply_torchrun_ranks
from onepolicy.launch.ranks import LaunchedRanks, RankInfo, _await_ranks, launched_ranks
from onepolicy.train.sharded.divide import assign_micro_batches, divide_batch
from onepolicy.train.sharded.ranks import RankLost, Ranks, error_key, process_key
from onepolicy.train.sharded.wire import Message, batch_from_message, batch_message
from support.token_batches import batch_with


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


@pytest.mark.parametrize(
    ("waited", "error", "words"),
    [
        (0.1, None, "rank 2 (process 7 on h) has ended; `--resume` continues"),
        (59.9, None, "rank 2 (process 7 on h) has been silent for 60 s (train.rank_timeout); `-"),
        (0.1, "model.path: gone", "rank 2 (process 7 on h): model.path: gone"),
    ],
)
def test_a_lost_rank_is_named_with_the_reason(waited, error, words):
    store = dist.HashStore()
    store.set(process_key(2), "process 7 on h")
    if error is not None:
        store.set(error_key(2), error)
    ranks = object.__new__(Ranks)
    ranks._store, ranks._awaited, ranks.limit = store, 2, 60.0
    assert ranks._describe_loss(waited).startswith(words)


def test_a_rank_that_does_not_come_is_named():
    store = dist.HashStore()
    launched = LaunchedRanks(RankInfo(0, 3, 0), store)
    store.set(process_key(1), "process 7 on h")
    with pytest.raises(RankLost, match=r"rank 2 did not come within 0.01 s \(train.rank_timeout\)"):
        _await_ranks(launched, 0.01)
    store.set(process_key(2), "process 8 on h")
    _await_ranks(launched, 0.01)


def test_ranks_need_somebody_who_starts_them(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match="only `onepolicy train` and torchrun start ranks"):
        launched_ranks(resolve(BASE, ["train.ranks=2"]))


def test_a_changed_message_is_refused():
    data = bytearray(batch_message({"do": "score"}, batch_with([5, 3])).encode())
    data[-9] ^= 1  # in the last tensor, where the message stays readable
    with pytest.raises(TrainingError, match="changed on the way"):
        Message.decode(bytes(data))


def test_a_rank_of_another_release_says_so(monkeypatch, capsys):
    store = dist.HashStore()
    settings = {"limit": 1.0, "device": "cpu", "release": "0.0.0"}
    store.set(launch_ranks.SETTINGS_KEY, json.dumps(settings))
    monkeypatch.setattr(launch_ranks, "GRACE_S", 0)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        launch_ranks.run_rank(RankInfo(1, 2, 1), store)
    assert ended.value.code == 2
    assert "is installed here, but rank 0 runs 0.0.0; install the same" in capsys.readouterr().err
