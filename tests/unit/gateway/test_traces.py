"""Rows of an episode's dump, counted by hand."""

import errno
import json
import os
import shutil

import pytest
import torch

from onepolicy.gateway import traces
from onepolicy.gateway.traces import TraceWriter, dump_rows
from onepolicy.record.read import read_dump
from onepolicy.support.trace import SupportTrace
from onepolicy.types import RoutingTrace
from support.gateway_app import session_of
from support.token_batches import batch_with


def scored_batch():
    """Return two samples: 5 6, then 7 8 sampled; 5, then 9 sampled."""
    batch = batch_with([3, 1])
    ids = torch.arange(4 * 2, dtype=torch.uint8).reshape(4, 1, 2)
    valid = torch.tensor([True, True, False, True])
    return batch.replace(
        input_ids=torch.tensor([5, 6, 7, 5]),
        target_ids=torch.tensor([6, 7, 8, 9]),
        trainable=torch.tensor([False, True, True, True]),
        version=torch.tensor([-1, 3, 3, 4], dtype=torch.int32),
        turn=torch.tensor([-1, 0, 0, 0], dtype=torch.int32),
        logp_rollout=torch.tensor([0.0, -1.0, -2.0, -3.0]),
        logp_old=torch.tensor([-9.0, -1.5, -2.5, -3.5]),
        entropy=torch.tensor([0.5, 0.25, 0.125, 1.0]),
        routing=RoutingTrace(ids, valid, (0,), 8),
        routing_native=RoutingTrace(ids, torch.ones(4, dtype=torch.bool), (0,), 8),
    )


def test_rows_hold_whole_paths():
    scored = scored_batch()
    native = scored.replace(logp_old=scored.logp_old - 1)
    one, other = dump_rows(scored, native, step=7, reward=0.5)
    assert one == {
        "tokens": [5, 6, 7, 8],
        "mask": [False, False, True, True],
        "logp_rollout": [0.0, 0.0, -1.0, -2.0],
        "logp_trainer": [0.0, -9.0, -1.5, -2.5],
        "logp_native": [0.0, -10.0, -2.5, -3.5],
        "entropy": [0.0, 0.5, 0.25, 0.125],
        "version": [-1, -1, 3, 3],
        "turn": [-1, -1, 0, 0],
        "step": 7,
        "reward": 0.5,
        "routes_rollout": [-1, -1, 0, 1, 2, 3, -1, -1],
        "routes_trainer": [-1, -1, 0, 1, 2, 3, 4, 5],
        "route_layers": 1,
        "route_top_k": 2,
    }
    assert (other["tokens"], other["mask"]) == ([5, 9], [False, True])
    assert other["routes_rollout"] == [-1, -1, 6, 7]  # of the first sampled token


def test_rows_hold_the_sets_that_tokens_were_drawn_from():
    support = SupportTrace(
        torch.tensor([3, 7, 8, 9, 11], dtype=torch.int32), torch.tensor([0, 0, 2, 3, 5])
    )
    scored = scored_batch().replace(
        support=support, logp_vocabulary=torch.tensor([0.0, -1.75, -2.75, -3.75])
    )
    one, other = dump_rows(scored, None, step=0, reward=0.5)
    assert (one["support_ids"], one["support_counts"]) == ([3, 7, 8], [0, 0, 2, 1])
    assert (other["support_ids"], other["support_counts"]) == ([9, 11], [0, 2])
    assert one["logp_vocabulary"] == [0.0, 0.0, -1.75, -2.75]


def test_every_episode_has_a_line(tmp_path):
    writer = TraceWriter(tmp_path / "out")
    empty = session_of("x").history
    writer.write("a", empty, scored=scored_batch(), reward=0.5)
    writer.write("b", empty, scored=None, reward=None, note="not ended")
    lines = (tmp_path / "out" / "episodes.jsonl").read_text().splitlines()
    one, other = map(json.loads, lines)
    assert (one["episode"], one["samples"], one["reward"]) == ("a", 2, 0.5)
    assert (other["reward"], other["note"], other["step"]) == (None, "not ended", 1)
    assert [file.name for file in (tmp_path / "out" / "dump").iterdir()] == ["step_00000_0.parquet"]


def left_in(folder):
    """Return what a reader of the folder sees: steps of its dump, and names of its lines."""
    files = sorted((folder / "dump").glob("*.parquet"))
    steps = [int(file.name.split("_")[1]) for file in files]
    lines = (folder / "episodes.jsonl").read_text().splitlines()
    return steps, [json.loads(line)["episode"] for line in lines]


def test_a_killed_gateway_leaves_no_episode_without_its_line(tmp_path, monkeypatch):
    """The folder is copied at each point between two writes, which is what a kill leaves."""
    writer, empty = TraceWriter(tmp_path / "out"), session_of("x").history
    writer.write("a", empty, scored=scored_batch(), reward=0.5)
    copies = []

    def copied_after(name):
        original = getattr(traces, name)

        def call(*given):
            original(*given)
            copies.append(tmp_path / name)
            shutil.copytree(tmp_path / "out", copies[-1])

        monkeypatch.setattr(traces, name, call)

    copied_after("write_parquet")
    copied_after("_append")
    writer.write("b", empty, scored=scored_batch(), reward=0.5)
    assert [left_in(copy) for copy in copies] == [([0], ["a"]), ([0], ["a", "b"])]
    assert left_in(tmp_path / "out") == ([0, 1], ["a", "b"])
    for copy in copies:
        (block,) = read_dump(copy / "dump", {})
        assert set(block.columns["step"].tolist()) == {0}
    assert len(list((tmp_path / "out" / "dump").iterdir())) == 2


def full(*given):
    raise OSError(errno.ENOSPC, "No space left on device")


def half_a_line(file, line, append=traces._append):
    append(file, line[:9])
    full()


@pytest.mark.parametrize(
    ("place", "fault"),
    [(traces, ("_append", half_a_line)), (os, ("replace", full))],
    ids=["its line", "its file"],
)
def test_an_episode_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch, place, fault):
    """Its step is that of the next one, which must not get its file, nor half of its line."""
    writer, empty = TraceWriter(tmp_path / "out"), session_of("x").history
    with monkeypatch.context() as patch:
        patch.setattr(place, *fault)
        with pytest.raises(OSError, match="No space left"):
            writer.write("a", empty, scored=scored_batch(), reward=0.5)
    assert not list((tmp_path / "out" / "dump").iterdir())
    line = writer.write("b", empty, scored=None, reward=0.5)
    assert (line["step"], line["samples"]) == (0, 0)
    assert left_in(tmp_path / "out") == ([], ["b"])
