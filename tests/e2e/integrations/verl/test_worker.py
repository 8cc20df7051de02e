"""verl's TrainingWorker with our engine, on gloo: the rollout's routes in scoring and update."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types

import pytest
import torch

from support.paths import ROOT
from support.verl.gap import LAYOUTS, advantages, k3

capability = pytest.mark.capability
pytestmark = pytest.mark.verl
FAMILIES = ["mixtral", "olmoe", "qwen2_moe", "gpt_oss", "deepseek_v3", "glm4_moe"]


@pytest.fixture(scope="module")
def verl():
    """Return the helpers that import verl."""
    from support.verl import worker

    return worker


@pytest.fixture(scope="module")
def model(verl, tmp_path_factory):
    return verl.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def rollout(verl, model):
    return verl.sample(model)


@pytest.fixture
def fresh(verl, model):
    """Return a worker that a test may train, or break."""
    return lambda **settings: verl.make_worker(model, **settings)


def test_verl_chooses_our_engine_by_its_vendor(fresh):
    from onepolicy.integrations.verl.engine import ReplayingFSDPEngine

    assert type(fresh().engine) is ReplayingFSDPEngine


def gap_closed(verl, worker, rollout):
    """Return the worker's scores with replay, whose k3 is far below that without."""
    native = k3(verl.score(worker, rollout.batch(routed_experts=None)), rollout)
    worker.engine.expects_routes = None
    replayed = verl.score(worker, rollout.batch())
    assert k3(replayed, rollout) < native / 3
    return replayed


@capability("verl", "measured", how="live")
@pytest.mark.smoke
def test_a_step_is_replayed_and_its_metrics_come_as_sums(verl, fresh, rollout):
    from onepolicy.integrations.verl.metrics import finish_update_metrics

    worker = fresh()
    old = gap_closed(verl, worker, rollout)
    reported = verl.update(worker, rollout.batch(), old, advantages(rollout))
    metrics = {f"actor/{name.removeprefix('actor/')}": v[0] for name, v in reported.items()}
    assert metrics["actor/ppo_kl"] == 0.0
    assert metrics["actor/grad_norm"] > 0.1
    slots = int(rollout.tensors["attention_mask"].sum()) - len(rollout.logp)
    assert metrics["actor/onepolicy/replay_slots"] == slots
    finish_update_metrics(metrics)
    assert 0 < metrics["routing/routers"] <= metrics["routing/tokens"] < 0.5
    assert 0.5 < metrics["routing/agreement"] < 1
    assert metrics["replay/native_rows"] == 0
    assert metrics["replay/missing_samples"] == 0
    assert not [name for name in metrics if "onepolicy/" in name]


@capability("verl", "R3", how="live")
def test_all_layouts_close_the_gap_and_train_alike(verl, fresh, rollout, subtests):
    """The same gradient, and a ratio of exactly 1 in the update."""
    reference = None
    for layout, settings in LAYOUTS.items():
        with subtests.test(layout=layout):
            worker = fresh(**settings)
            scores = gap_closed(verl, worker, rollout)
            metrics = verl.update(worker, rollout.batch(), scores, advantages(rollout))
            assert metrics["actor/ppo_kl"] == [0.0]
            norm = metrics["grad_norm"][0]
            if reference is None:
                reference = scores, norm
            assert norm == pytest.approx(reference[1], rel=1e-4)
            torch.testing.assert_close(scores, reference[0], rtol=1e-4, atol=1e-4)


@pytest.mark.process
def test_two_ranks_are_one(verl, fresh, model, rollout, tmp_path):
    """The gradient of both ranks' samples, and sums that average to the same shares."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
    command = [sys.executable, "-W", "ignore", "-m", "support.verl.ranks"]
    ranks = [
        subprocess.Popen([*command, str(rank), model, tmp_path], env=environment)
        for rank in range(2)
    ]
    assert [rank.wait(600) for rank in ranks] == [0, 0]
    found = json.loads((tmp_path / "0.json").read_text())
    worker = fresh()
    old = verl.score(worker, rollout.batch())
    expected = verl.update(worker, rollout.batch(), old, advantages(rollout))
    assert found["actor/ppo_kl"] == 0.0
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"][0], rel=1e-4)
    for name in ("differing", "agreeing", "differing_slots", "valid"):
        share = found[f"onepolicy/replay_{name}"] / found["onepolicy/replay_routers"]
        alone = expected[f"onepolicy/replay_{name}"][0] / expected["onepolicy/replay_routers"][0]
        assert share == pytest.approx(alone)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families(verl, tmp_path, family):
    """Padded: on a CPU, transformers packs no attention with sliding windows (gpt-oss)."""
    model = verl.save_family(tmp_path / family, family)
    rollout, worker = verl.sample(model), verl.make_worker(model, packed=False, checkpointing=True)
    native = k3(verl.score(worker, rollout.batch(routed_experts=None)), rollout)
    worker.engine.expects_routes = None
    old = verl.score(worker, rollout.batch())
    assert k3(old, rollout) < native
    metrics = verl.update(worker, rollout.batch(), old, advantages(rollout))
    assert metrics["actor/ppo_kl"] == [0.0]


def test_an_update_without_replay_is_another_policy(verl, fresh, rollout):
    worker = fresh()
    old = verl.score(worker, rollout.batch())
    worker.engine.expects_routes = False
    batch = rollout.batch(routed_experts=None)
    metrics = verl.update(worker, batch, old, advantages(rollout))
    assert metrics["actor/ppo_kl"][0] != 0.0


SPOILED = [
    (lambda routes: routes.roll(1, dims=1), RuntimeError, "one row late"),
    (lambda routes: routes.roll(3, dims=0), RuntimeError, "another sample"),  # of the same length
    (torch.zeros_like, RuntimeError, "the rollout returned no routes"),
    (lambda routes: routes[:, :, :1], ValueError, "routes have 1 layers"),
    (lambda routes: routes + 8, ValueError, r"an expert outside 0\.\.15"),
    (lambda routes: routes[..., :1], ValueError, "1 experts per token, but the model routes each"),
]


@capability("verl", "detector", how="live")
def test_spoiled_routes_stop_the_first_scoring(verl, fresh, rollout, subtests):
    for spoil, error, said in SPOILED:
        batch = rollout.batch(routed_experts=spoil(rollout.tensors["routed_experts"]))
        with subtests.test(said=said), pytest.raises(error, match=said):
            verl.score(fresh(), batch)


def set_up(worker, *, routes=True, correction=None):
    """Set a worker up as the trainer does before the first step, and return its report."""
    from onepolicy.integrations.verl import workers

    settings = workers.WorkerSettings(routes=routes, native_routes=False, correction=correction)
    return workers.set_up(types.SimpleNamespace(actor=worker), settings)


def test_a_dropped_field_is_named(verl, fresh, rollout, subtests):
    def announced(worker):
        assert set_up(worker).is_ours

    def scored(worker):
        verl.score(worker, rollout.batch())

    for before in (announced, scored):
        worker = fresh()
        before(worker)
        with subtests.test(before.__name__), pytest.raises(RuntimeError, match="no field routed"):
            verl.score(worker, rollout.batch(routed_experts=None))


def test_a_compiled_model_replays(verl, fresh, rollout):
    """Replay acts inside the routers, so it does not matter that the model was compiled before."""
    expected = verl.score(fresh(), rollout.batch())
    worker = fresh()
    worker.engine.module.compile(backend="eager")
    verl.score(worker, rollout.batch(routed_experts=None))  # traced without replay
    worker.engine.expects_routes = None
    torch.testing.assert_close(verl.score(worker, rollout.batch()), expected, rtol=1e-4, atol=1e-4)


def test_a_batch_without_routes_is_verls_own(verl, fresh, rollout):
    """R2 and dense runs: nothing is replayed, nothing is reported."""
    worker = fresh()
    old = verl.score(worker, rollout.batch(routed_experts=None))
    batch = rollout.batch(routed_experts=None)
    metrics = verl.update(worker, batch, old, advantages(rollout))
    assert worker.engine.expects_routes is False
    assert not [name for name in metrics if name.startswith("onepolicy/")]


def test_synthetic_samples_are_routed_natively(verl, fresh, rollout):
    """verl fills a batch up with samples of zero routes and an empty mask."""
    routes = rollout.tensors["routed_experts"].clone()
    mask = rollout.tensors["response_mask"].clone()
    routes[2:], mask[2:] = 0, 0
    worker = fresh()
    old = verl.score(worker, rollout.batch(routed_experts=routes, response_mask=mask))
    batch = rollout.batch(routed_experts=routes, response_mask=mask)
    metrics = verl.update(worker, batch, old, advantages(rollout))
    tokens = rollout.tensors["attention_mask"].sum(1)
    assert metrics["onepolicy/replay_samples"] == [2.0]
    assert metrics["onepolicy/replay_missing"] == [0.0]
    assert metrics["onepolicy/replay_rows"] == [float((tokens[:2] - 1).sum())]


def test_rows_after_the_last_turn_are_routed_natively(verl, fresh, rollout):
    routes = rollout.tensors["routed_experts"].clone()
    routes[:, -4:] = 0
    metrics = verl.update(
        fresh(), rollout.batch(routed_experts=routes), rollout.logp, advantages(rollout)
    )
    assert 0 < metrics["onepolicy/replay_valid"][0] < metrics["onepolicy/replay_rows"][0]


@pytest.mark.smoke
def test_a_router_loss_is_named_before_the_first_step_and_refused(verl, tmp_path, rollout):
    from onepolicy.config import UsageError
    from onepolicy.integrations.core.preflight import Preflight
    from onepolicy.integrations.verl.preflight import check_workers

    worker = verl.make_worker(verl.save_model(tmp_path / "aux", output_router_logits=True))
    report, found = Preflight("verl"), set_up(worker)
    assert found.is_ours
    assert found.routers is None
    check_workers(report, [found], routes=True)
    with pytest.raises(UsageError, match=r"can be replayed.*output_router_logits=True"):
        report.finish()
    with pytest.raises(UsageError, match="output_router_logits=True"):
        verl.score(worker, rollout.batch())


@pytest.mark.smoke
def test_the_reference_routes_itself(verl, model, rollout):
    """With LoRA the reference is the actor without its adapters, scored from the same batch."""
    worker = verl.make_worker(model, lora_rank=4, lora_alpha=8, target_modules=["q_proj"])
    reference = verl.score(worker, rollout.batch(), no_lora_adapter=True)
    native = verl.score(worker, rollout.batch(routed_experts=None), no_lora_adapter=True)
    assert torch.equal(reference, native)
    replayed = verl.score(worker, rollout.batch())
    assert not torch.equal(reference, replayed)
    assert k3(replayed, rollout) < k3(reference, rollout)


def test_scoring_returns_the_routers_own_choice_for_dumps(verl, fresh, rollout):
    from onepolicy.integrations.verl.routes import NATIVE_ROUTES

    own = {}
    for packed in (True, False):
        worker = fresh(packed=packed)
        worker.engine.keeps_native = True
        batch = rollout.batch()
        own[packed] = verl.scored(worker, batch)[NATIVE_ROUTES]
    lengths = rollout.tensors["attention_mask"].sum(1)
    assert own[True].offsets().diff().tolist() == lengths.tolist()
    for packed, padded in zip(own[True].unbind(), own[False].unbind(), strict=True):
        assert torch.equal(packed, padded)
        assert packed.min() >= 0


@capability("verl", "live corrections", how="live")
@pytest.mark.smoke
def test_live_corrections_in_the_loss(verl, fresh, rollout):
    """pg-tis: the gradient of -min(rho, 2) A log p, with the denominator of verl's token mean."""
    from onepolicy.correct.presets import preset
    from onepolicy.integrations.verl import policy_loss

    worker = fresh(loss_mode="onepolicy")
    try:
        set_up(worker, routes=False, correction=preset("pg-tis"))
        adv = advantages(rollout)
        metrics = verl.update(worker, rollout.batch(), rollout.logp, adv)
    finally:
        policy_loss.configure(None)
    logp = verl.score(fresh(), rollout.batch())
    rho = (logp - rollout.logp).exp().clamp(max=2)
    expected = -(rho * adv * logp)[rollout.mask].mean()
    assert metrics["actor/pg_loss"][0] == pytest.approx(expected.item(), rel=1e-4)
    found = k3(logp, rollout)
    live = {name.removeprefix("onepolicy/live_"): value for name, value in metrics.items()}
    assert live["k3"][0] / live["compared"][0] == pytest.approx(found, rel=1e-4)
