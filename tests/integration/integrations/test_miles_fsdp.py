"""Routing replay on miles' FSDP backend, through queues filled and staged as miles does.

Contract: miles 31f1ca9 (August 2026), whose module cannot be installed; the classes here have its
names, signatures and stages (tests/support/contracts.json). With the path of a checkout in
MILES_CHECKOUT the same tests run with miles' own manager.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import onepolicy as op
from onepolicy.config import UsageError
from onepolicy.integrations import miles
from onepolicy.integrations.core.on_import import after_import
from onepolicy.integrations.miles.fsdp import QueuedReplay, extend
from onepolicy.replay.checks import RoutingError
from support.contracts import value_of
from support.planted_routes import one_row_changed, one_row_late
from support.replay_models import build, tokens

capability = pytest.mark.capability


class Queue:
    """A queue of one layer, with the names of miles' Replay."""

    def __init__(self, stream_idx=None):
        self.stream_idx = stream_idx
        self.ids, self.taken = [], 0

    def record(self, top_indices):
        self.ids.append(top_indices.clone())

    def pop_forward(self):
        self.taken += 1
        return self.ids[self.taken - 1]


class Manager:
    """The part of miles' manager that our hooks use."""

    def __init__(self):
        self.replays, self.enabled, self.stage = [], True, value_of("miles", "stage of others")

    def create_replay(self, stream_idx=None):
        self.replays.append(Queue(stream_idx))
        return self.replays[-1]

    def clear_all_forward(self):
        for queue in self.replays:
            queue.taken = 0


@pytest.fixture
def manager(monkeypatch):
    checkout = os.environ.get("MILES_CHECKOUT")
    if not checkout:
        return Manager()
    monkeypatch.syspath_prepend(checkout)
    base = importlib.import_module("miles.utils.replay_base")
    empty_like = torch.empty_like
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")

    def unpinned(x, pin_memory=False, **given):
        return empty_like(x, **given)

    monkeypatch.setattr(torch, "empty_like", unpinned)
    made = base.RoutingReplayManager()
    made.enabled = True
    return made


def fill(manager, trace, missing=()):
    """Fill the queues as miles does from a rollout, -1 where there is no route."""
    for queue in manager.replays:
        ids = trace.ids[:, trace.layers.index(queue.stream_idx)].int()
        ids[list(missing)] = -1
        queue.record(ids)


def score(model, batch):
    return model(batch, attention_mask=torch.ones_like(batch)).logits


@pytest.fixture
def batch():
    return tokens(rows=2, length=9)


def routes_of(model, batch):
    routers = op.bind_routers(model)
    with routers.record() as tape, torch.no_grad():
        score(model, batch)
    return tape.trace()


class stage:
    """miles' context manager of the same name."""

    def __init__(self, manager, name):
        self.manager, self.name = manager, name

    def __enter__(self):
        self.before, self.manager.stage = self.manager.stage, self.name

    def __exit__(self, *_):
        self.manager.stage = self.before


@capability("miles", "R3", how="contract")
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe"])
def test_families_replay_what_the_queues_hold(family, manager, batch):
    trainer = build(family)
    changed = one_row_changed(routes_of(trainer, batch))
    with op.bind_routers(trainer).replay(changed, check=False), torch.no_grad():
        expected = score(trainer, batch)
    assert QueuedReplay(trainer, manager).layers == len(changed.layers)
    assert [queue.stream_idx for queue in manager.replays] == list(changed.layers)
    fill(manager, changed)
    with stage(manager, "replay_forward"), torch.no_grad():
        assert score(trainer, batch).equal(expected)


@capability("miles", "R3", how="contract")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_scoring_and_training_take_the_rollouts_routes(manager, batch, checkpointing):
    """The routes are the model's own but for one row, so the logits of that row tell."""
    trainer = build("mixtral")
    changed = one_row_changed(routes_of(trainer, batch))
    with torch.no_grad():
        native = score(trainer, batch)
    with op.bind_routers(trainer).replay(changed, check=False), torch.no_grad():
        expected = score(trainer, batch)
    assert not expected.equal(native)

    if checkpointing:
        trainer.gradient_checkpointing_enable({"use_reentrant": False})
    QueuedReplay(trainer, manager)
    fill(manager, changed)
    with stage(manager, "fallthrough"), torch.no_grad():
        assert score(trainer, batch).equal(native)
    with stage(manager, "replay_forward"), torch.no_grad():
        assert score(trainer, batch).equal(expected)
    manager.clear_all_forward()
    with stage(manager, "replay_backward"):
        with stage(manager, "replay_forward"):
            logits = score(trainer, batch)
        assert logits.equal(expected)
        logits.square().mean().backward()
    gradient = trainer.get_input_embeddings().weight.grad.clone()

    trainer.zero_grad()
    with stage(manager, "fallthrough"):
        with op.bind_routers(trainer).replay(changed, check=False):
            logits = score(trainer, batch)
        logits.square().mean().backward()
    assert gradient.equal(trainer.get_input_embeddings().weight.grad)


def test_rows_without_a_route_are_native(manager, batch):
    """miles fills them with -1 and would replay the experts 0 .. K-1."""
    trainer = build("mixtral")
    trace = routes_of(trainer, batch)
    with torch.no_grad():
        native = score(trainer, batch)
    QueuedReplay(trainer, manager)
    fill(manager, trace, missing=(0, 8, 17))
    with stage(manager, "replay_forward"), torch.no_grad():
        assert score(trainer, batch).equal(native)


def test_recording_fills_the_queues(manager, batch):
    trainer = build("mixtral")
    trace = routes_of(trainer, batch)
    QueuedReplay(trainer, manager)
    with stage(manager, "record"), torch.no_grad():
        score(trainer, batch)
    taken = torch.stack([queue.pop_forward() for queue in manager.replays], 1)
    assert taken.equal(trace.ids.to(taken.dtype))


@capability("miles", "detector", how="contract")
def test_routes_one_row_late_stop_the_first_scoring(manager, batch):
    trainer = build("mixtral")
    trace = routes_of(trainer, batch)
    late = one_row_late(trace)
    QueuedReplay(trainer, manager)
    fill(manager, late)
    stopped = pytest.raises(RoutingError, match="row")
    with stopped, stage(manager, "replay_forward"), torch.no_grad():
        score(trainer, batch)
    manager.clear_all_forward()
    with stopped, stage(manager, "replay_forward"), torch.no_grad():
        try:  # as a trainer that tries a forward again
            raise MemoryError
        except MemoryError:
            score(trainer, batch)


def test_a_forward_outside_miles_stages_is_an_error(manager, batch):
    trainer = build("mixtral")
    QueuedReplay(trainer, manager)
    with pytest.raises(RoutingError, match="replay_backward"), stage(manager, "replay_backward"):
        score(trainer, batch)


def test_a_router_loss_is_refused(manager):
    with pytest.raises(UsageError, match="output_router_logits"):
        QueuedReplay(build("mixtral", output_router_logits=True), manager)


def test_install_leaves_miles_own_families_to_miles(manager):
    own = []

    def theirs(model, hf_config):
        own.append(hf_config.model_type)
        return 0

    module = SimpleNamespace(
        install=theirs,
        routing_replay_manager=manager,
        resolve_routing_replay_adapter=lambda config: config.model_type == "qwen3_moe" or None,
    )
    extend(module)
    known, unknown = build("qwen3_moe"), build("mixtral")
    assert module.install(known, known.config) == 0
    assert module.install(unknown, unknown.config) == unknown.config.num_hidden_layers
    manager.enabled = False
    assert module.install(unknown, unknown.config) == 0
    assert own == ["qwen3_moe", "mixtral"]


def test_the_setup_waits_for_miles_module(tmp_path, monkeypatch):
    package = tmp_path / "waited_for"
    package.mkdir()
    (package / "__init__.py").write_text("ran = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    after_import("waited_for", seen.append)
    assert seen == []
    module = importlib.import_module("waited_for")
    assert isinstance(module, ModuleType)
    assert seen == [module]
    assert module.__loader__.__class__.__module__.startswith(("importlib", "_frozen_importlib"))
    after_import("waited_for", seen.append)
    assert seen == [module, module]
    miles.setup()
    assert miles.REPLAY_MODULE not in sys.modules
