"""Rows of an episode's dump, counted by hand."""

import json

import torch

from onepolicy.gateway.traces import TraceWriter, dump_rows
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
        "routes_rollout": [0, 1, 2, 3, -1, -1, -1, -1],
        "routes_trainer": [0, 1, 2, 3, 4, 5, -1, -1],
        "route_layers": 1,
        "route_top_k": 2,
    }
    assert (other["tokens"], other["mask"]) == ([5, 9], [False, True])
    assert other["routes_rollout"] == [6, 7, -1, -1]


def test_rows_hold_the_supports_of_their_tokens():
    support = SupportTrace.from_sets([[], [7, 8], [8], [9, 4, 2]])
    values = torch.tensor([-9.0, -4.0, -5.0, -6.0])
    batch = scored_batch().replace(support=support, logp_vocabulary=values)
    one, other = dump_rows(batch, None, step=0, reward=0.0)
    assert (one["support_ids"], one["support_counts"]) == ([7, 8, 8], [0, 0, 2, 1])
    assert (other["support_ids"], other["support_counts"]) == ([2, 4, 9], [0, 3])
    assert one["logp_vocabulary"] == [0.0, -9.0, -4.0, -5.0]


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
