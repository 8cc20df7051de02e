"""SkyRL's FSDP policy worker, replaying what its batches carry.

Contract: methods and PackedTensor of SkyRL 0.4.0 (tests/support/contracts.json), whose worker
needs a GPU. The worker here calls a model of transformers as SkyRL's wrapper does.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import onepolicy as op
from onepolicy.config import UsageError
from onepolicy.integrations.skyrl import replaying
from onepolicy.replay.checks import RoutingError
from support.contracts import value_of
from support.planted_routes import one_row_changed, one_row_late
from support.replay_models import build, tokens

capability = pytest.mark.capability


class Worker:
    """SkyRL's worker, with a model in the place of its wrapper's."""

    def __init__(self, model):
        self.inner = model

    def init_model(self, model_path, num_training_steps=None):
        self.inner.config.output_router_logits = True  # as SkyRL's wrapper does for every MoE model
        self.model = SimpleNamespace(model=self.inner, sequence_parallel_size=1)

    def _forward_micro_batch(self, micro_batch):
        with torch.no_grad():
            return self.score(micro_batch["sequences"], micro_batch["attention_mask"])

    def _forward_backward_micro(self, experience, microbatch_weight, loss_fn=None):
        logits = self.score(experience.sequences, experience.attention_mask)
        (logits.square().mean() * microbatch_weight).backward()
        return logits.detach()

    def score(self, sequences, mask):
        positions = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 1)
        return self.model.model(sequences, attention_mask=mask, position_ids=positions).logits


def packed(traces, depth):
    """Return SkyRL's PackedTensor: all decoder layers, and 0 .. K-1 for the last token."""
    rows = []
    for trace in traces:
        ids = torch.arange(trace.top_k).expand(len(trace) + 1, depth, -1).clone()
        ids[:-1, list(trace.layers)] = trace.ids.long()
        rows.append(ids.to(torch.int16))
    ends = torch.tensor([len(part) for part in rows]).cumsum(0)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
    return SimpleNamespace(values=torch.cat(rows), cu_seqlens=bounds)


@pytest.fixture
def case():
    """Return a worker, a left-padded batch, and both samples' own routes of all but the last
    token."""
    model = build("mixtral")
    sequences = tokens(rows=2, length=12)
    mask = torch.ones_like(sequences)
    mask[1, :4] = 0
    worker = replaying(Worker)(model)
    worker.init_model("path")
    with op.bind_routers(model).record() as tape, torch.no_grad():
        worker.score(sequences, mask)
    own = [trace.rows(0, len(trace) - 1) for trace in op.unpad_routes(tape.trace(), mask)]
    return worker, {"sequences": sequences, "attention_mask": mask}, own


def unreplayed(worker, batch):
    with torch.no_grad():
        return worker.score(batch["sequences"], batch["attention_mask"])


def with_routes(batch, traces, model, captured=None):
    """Return the batch with SkyRL's fields of routes, of which `captured` per sample are real."""
    mask = batch["attention_mask"].bool()
    lengths = mask.sum(1, keepdim=True)
    if captured is None:
        captured = (lengths - 1)[:, 0]
    place = mask.long().cumsum(1) - 1
    return batch | {
        "rollout_expert_indices": packed(traces, model.config.num_hidden_layers),
        "router_padding_mask": ~mask | (place >= torch.as_tensor(captured)[:, None]),
    }


def test_skyrl_names_them_so():
    assert value_of("SkyRL", "scoring micro-batch") == ["self", "micro_batch"]
    training = value_of("SkyRL", "training micro-batch")
    assert training[:3] == ["self", "experience", "microbatch_weight"]
    assert {"rollout_expert_indices", "router_padding_mask"} <= set(value_of("SkyRL", "experience"))
    assert value_of("SkyRL", "routes of a batch") == ["self", "values", "cu_seqlens"]


@capability("SkyRL", "R3", how="contract")
def test_scoring_and_training_replay(case):
    worker, batch, own = case
    native = unreplayed(worker, batch)
    routed = with_routes(batch, own, worker.inner)
    kept = batch["attention_mask"].bool()
    assert worker._forward_micro_batch(routed)[kept].equal(native[kept])

    routers = worker.onepolicy_replay.routers
    whole = [one_row_changed(trace) for trace in own]
    padded = op.pad_routes(
        [op.RoutingTrace.concat([t, missing(t)]) for t in whole], batch["attention_mask"]
    )
    with routers.replay(padded, check=False), torch.no_grad():
        expected = worker.score(batch["sequences"], batch["attention_mask"])
    experience = SimpleNamespace(**with_routes(batch, whole, worker.inner))
    found = worker._forward_backward_micro(experience, 0.5)
    assert found[kept].equal(expected[kept])
    assert not found[kept].equal(native[kept])


def filled(trace, first):
    """Return the trace with SkyRL's filler from row `first` on."""
    ids = trace.ids.clone()
    ids[first:] = torch.arange(trace.top_k).to(ids.dtype)
    return op.RoutingTrace(ids, trace.valid, trace.layers, trace.num_experts)


def test_a_filled_suffix_is_routed_by_the_model(case):
    """As the reply of a last tool, and an end token that SkyRL appends."""
    worker, batch, own = case
    native = unreplayed(worker, batch)
    traces = [filled(own[0], 7), own[1]]
    routed = with_routes(batch, traces, worker.inner, captured=[7, 7])
    kept = batch["attention_mask"].bool()
    assert worker._forward_micro_batch(routed)[kept].equal(native[kept])
    experience = SimpleNamespace(**routed)
    assert worker._forward_backward_micro(experience, 0.5)[kept].equal(native[kept])


@pytest.mark.parametrize("filler", [[1], [0, 1]])
def test_samples_that_only_fill_up_are_routed_by_the_model(case, filler):
    """SkyRL appends copies of sample 0 until the batch divides by the ranks."""
    worker, batch, own = case
    native = unreplayed(worker, batch)
    traces, captured = list(own), [11, 7]
    for sample in filler:
        traces[sample], captured[sample] = filled(own[sample], 0), 0
    routed = with_routes(batch, traces, worker.inner, captured)
    kept = batch["attention_mask"].bool()
    assert worker._forward_micro_batch(routed)[kept].equal(native[kept])
    assert worker._forward_backward_micro(SimpleNamespace(**routed), 0.5)[kept].equal(native[kept])


def test_a_micro_batch_that_only_fills_up(case):
    """With max_tokens_per_microbatch SkyRL gives all ranks as many; one token of it is fed."""
    worker, batch, own = case
    row = {name: value[:1].clone() for name, value in batch.items()}
    row["attention_mask"][:, 1:] = 0
    native = unreplayed(worker, row)
    routed = with_routes(row, [own[0].rows(0, 0)], worker.inner, captured=[0])
    assert worker._forward_micro_batch(routed)[:, 0].equal(native[:, 0])
    worker._forward_backward_micro(SimpleNamespace(**routed), 0.0)


def missing(trace):
    """Return one row that the model routes itself."""
    return op.RoutingTrace(
        trace.ids[:1] * 0, torch.zeros(1, dtype=torch.bool), trace.layers, trace.num_experts
    )


@capability("SkyRL", "detector", how="contract")
def test_routes_one_row_late_stop_the_first_scoring(case):
    worker, batch, own = case
    late = [one_row_late(trace) for trace in own]
    with pytest.raises(RoutingError, match="one row late"):
        worker._forward_micro_batch(with_routes(batch, late, worker.inner))


def test_routes_of_other_samples_are_named(case):
    worker, batch, own = case
    with pytest.raises(UsageError, match="other samples"):
        worker._forward_micro_batch(with_routes(batch, own[::-1], worker.inner))


def test_nothing_is_silently_left_out(case):
    worker, batch, _ = case
    for call, given in (
        (worker._forward_micro_batch, batch),
        (lambda each: worker._forward_backward_micro(each, 1.0), batch_without_routes(batch)),
    ):
        with pytest.raises(UsageError, match="enable_return_routed_experts=true"):
            call(given)
    other = type("Renamed", (), {"_forward_micro_batch": None})
    with pytest.raises(UsageError, match="Renamed has no _forward_backward_micro"):
        replaying(other)


def batch_without_routes(batch):
    return SimpleNamespace(**batch, rollout_expert_indices=None)


def test_sequence_parallelism_is_refused():
    class Sliced(Worker):
        def init_model(self, *args):
            super().init_model(*args)
            self.model.sequence_parallel_size = 2

    with pytest.raises(UsageError, match="sequence_parallel_size=1"):
        replaying(Sliced)(build("mixtral")).init_model("path")
