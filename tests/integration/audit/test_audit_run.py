"""`onepolicy audit` of real runs: a fault planted in the engine of a small policy is named, a clean
run is cleared."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch

from onepolicy.audit.run import audit
from onepolicy.build import components
from onepolicy.build.measure import build_measure_components, measure_config
from onepolicy.cli import main
from onepolicy.measure.measure import _load_engine_model, score_rollouts
from onepolicy.record.export import write_step
from onepolicy.run import train as run_train
from onepolicy.sync.push import push_weights
from support.planted_engine import SETTINGS, Planted

EVERY_STEP = (
    "log.counterfactual_every=1",
    "eval.every=0",
    "steps=2",
    "rollout.prompts_per_step=8",
    "objective.entropy_coef=0",
)


@pytest.fixture
def audited(train, monkeypatch):
    """Return audited("a.b=c", late=1, ...), which runs `audit RUN` on a run whose engine has this
    fault."""
    build = components.build_components

    def run(*overrides, **fault):
        def planted(*args, **more):
            parts, tokenizer = build(*args, **more)
            return dataclasses.replace(parts, engine=Planted(parts.engine, **fault)), tokenizer

        monkeypatch.setattr(run_train, "build_components", planted)
        return audit(train(None, *EVERY_STEP, *overrides), {})

    return run


@pytest.mark.full
def test_a_clean_run_is_not_accused(audited, capsys):
    found = audited()
    assert found.verdict.action == "nothing", found.verdict.text()
    assert (sorted(found.accumulated.steps), found.accumulated.rows) == ([1, 2], 2 * 8 * 4)
    assert 0 <= found.accumulated.routes.routers < 0.1
    assert found.not_checked == (
        "an update the engine did not take: no column logp_previous",
        "an adapter the engine does not apply: no column logp_base",
        "onset of divergence: fewer than 5 steps",
    )
    assert main(["audit", str(found.accumulated.path)]) == 0
    assert "Nothing to do" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("seed", range(1, 6))
def test_no_clean_run_is_accused(audited, seed, dtype):
    found = audited(f"seed={seed}", f"rollout.engine.dtype={dtype}", "steps=4", "optim.lr=3e-3")
    assert found.verdict.action != "bug", found.verdict.text()


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "causes"),
    [
        pytest.param({"temperature": 1.4}, ("temperature",), marks=pytest.mark.slow),
        pytest.param({"late": 1}, ("routes",), marks=pytest.mark.slow),
        ({"late": 1, "temperature": 2.0}, ("temperature", "routes")),
    ],
)
def test_a_planted_fault_is_named(audited, fault, causes):
    found = audited("replay.min_agreement=0", "rollout.engine.dtype=float32", **fault)
    assert (found.verdict.action, found.verdict.causes) == ("bug", causes), found.verdict.text()
    if "late" in fault:
        assert "one row late" in found.verdict.text()


def rows_of(batch, **more):
    """Return a scored batch as the columns of our schema."""
    columns = {
        "tokens": batch.target_ids,
        "mask": batch.trainable,
        "logp_rollout": batch.logp_rollout,
        "logp_trainer": batch.logp_old,
        "entropy": batch.entropy,
        "version": batch.version,
        **more,
    }
    return [
        {name: values[batch.segment == i].tolist() for name, values in columns.items()}
        for i in range(batch.num_samples)
    ]


@pytest.mark.full
@pytest.mark.parametrize(
    ("temperature", "causes"),
    [pytest.param(1.0, {"stale"}, marks=pytest.mark.slow), (1.4, {"stale", "temperature"})],
)
def test_a_stale_checkpoint_is_named(train, tmp_path, temperature, causes):
    """First half of the samples come from the checkpoint of an earlier step of a real run, then all
    of them, undeclared."""
    run = train(None, *EVERY_STEP, "optim.lr=3e-3", "steps=4")
    older, newer = (run / "checkpoints" / f"step_{step:05d}" for step in (2, 4))
    config = measure_config(
        {}, [f"model.path={newer}", *SETTINGS, "rollout.engine.dtype=float32"], None
    )
    parts, _ = build_measure_components(config)
    parts = dataclasses.replace(parts, engine=Planted(parts.engine, temperature=temperature))

    async def sampled():
        await parts.engine.load_weights(_load_engine_model(str(older)).state_dict().items(), 1)
        stale = (await score_rollouts(parts)).native
        await push_weights(parts.scorer, *parts.samplers)
        return stale, (await score_rollouts(parts)).native

    stale, fresh = asyncio.run(sampled())
    stale, fresh = (
        b.replace(version=torch.full_like(b.version, v)) for b, v in ((stale, 1), (fresh, 2))
    )
    write_step(tmp_path / "mixed", 0, rows_of(stale) + rows_of(fresh))
    assert set(audit(tmp_path / "mixed", {}).verdict.causes) == causes
    parts.scorer.model.load_state_dict(_load_engine_model(str(older)).state_dict())
    previous = parts.scorer.score(stale, replay=False).logp_old
    write_step(tmp_path / "undeclared", 0, rows_of(stale, logp_previous=previous))
    assert set(audit(tmp_path / "undeclared", {}).verdict.causes) == causes
