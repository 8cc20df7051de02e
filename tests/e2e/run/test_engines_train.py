"""Short runs with R3 on the embedded engine and on vLLM, both in bfloat16 under a float32 trainer.

On both engines the reward rises and replay lowers the mismatch, in answers of one turn and in
episodes with a tool. Minutes; `make test-all`.
"""

import statistics

import pytest

from onepolicy.cli import main
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.rollout.vllm.engine import VLLMEngine
from support.metrics import rows

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(7200)]
SETTINGS = ["log.counterfactual_every=1", "eval.every=0", "log.report=false"]
SETTINGS += ["log.tensorboard=false"]
SMALL = ["rollout.engine.kv_cache_gib=0.25", "rollout.engine.block_size=32"]
ENGINES = [("hf", []), ("vllm", SMALL)]


def trained(recipe, out, kind, *settings):
    """Return the rows of the run's metrics."""
    engine = [f"out={out}", f"rollout.engine.kind={kind}", "rollout.engine.dtype=bfloat16"]
    assert main(["train", f"recipes/{recipe}.toml", *engine, *SETTINGS, *settings]) == 0
    return rows(out)


def ends(steps, name):
    """Return means of the first and of the last 5 steps. Rows without a tool call lack the tool's
    metric."""
    values = [row.get(name, 0.0) for row in steps]
    return statistics.mean(values[:5]), statistics.mean(values[-5:])


def check_mismatch(steps):
    replayed, native = (
        [row[f"{prefix}mismatch/k3"] for row in steps] for prefix in ("", "counterfactual/")
    )
    lower = sum(a < b for a, b in zip(replayed, native, strict=True))
    with_replay, without = map(statistics.mean, (replayed, native))
    print(f"k3 {with_replay:.1e} replayed, {without:.1e} not; lower in {lower} steps")
    assert with_replay < without
    assert lower > len(steps) / 2


def test_a_recurrent_hybrid_learns(tmp_path):
    """recipes/hybrid.toml, as docs/hybrids.md tells."""
    policy = tmp_path / "policy"
    assert main(["make-policy", "--out", str(policy), "recurrent=3"]) == 0
    steps = trained("hybrid", tmp_path / "run", "hf", "steps=25", f"model.path={policy}")
    assert len(steps) == 25
    first, last = ends(steps, "train/reward")
    assert last > first + 0.05
    check_mismatch(steps)


@pytest.mark.parametrize(("kind", "more"), ENGINES)
def test_reward_rises_and_replay_lowers_k3(kind, more, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["make-policy"]) == 0
    steps = trained("quickstart", tmp_path / "run", kind, "steps=25", *more)
    assert len(steps) == 25
    first, last = ends(steps, "train/reward")
    print(f"{kind}: reward {first:.2f} to {last:.2f}; ", end="")
    assert last > first + 0.05
    check_mismatch(steps)


@pytest.mark.parametrize(("kind", "more"), ENGINES)
def test_reward_and_tool_use_rise_in_episodes(kind, more, products_policy, tmp_path, monkeypatch):
    """With prefix caching, every path transfers only rows that are new, and none is missing."""
    asked_from = []
    engine = HFEngine if kind == "hf" else VLLMEngine
    generate = engine.generate

    async def counted(self, prompt_ids, sampling, *, seed):
        done = await generate(self, prompt_ids, sampling, seed=seed)
        slots = len(prompt_ids) + len(done.token_ids) - 1
        assert len(done.routing) == slots - sampling.routes_from
        asked_from.append(sampling.routes_from)
        return done

    monkeypatch.setattr(engine, "generate", counted)
    settings = [f"model.path={products_policy}", "steps=15", *more]
    steps = trained("agent_products", tmp_path / "run", kind, *settings)
    assert len(steps) == 15
    (poor, rich), (few, many) = ends(steps, "train/reward"), ends(steps, "tools/calculator")
    print(f"{kind}: reward {poor:.2f} to {rich:.2f}, calls {few:.2f} to {many:.2f}; ", end="")
    assert rich > poor + 0.15
    assert many > few + 0.15
    check_mismatch(steps)
    assert all(row["replay/native_rows"] == row["replay/missing_samples"] == 0 for row in steps)
    assert any(first > 0 for first in asked_from)
