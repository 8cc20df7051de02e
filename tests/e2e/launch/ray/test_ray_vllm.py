"""vLLM in the replicas of Ray: every token is sampled from the learner's weights. After the last
sync each replica answers as an engine that has just loaded the checkpoint."""

import asyncio
import logging

import pytest
import torch

from onepolicy.cli import main
from onepolicy.config import ModelConfig, VLLMEngineConfig
from onepolicy.launch.ray.replicas import Replicas
from onepolicy.models.load import read_config
from onepolicy.rollout.vllm.engine import VLLMEngine
from onepolicy.train import checkpoint
from onepolicy.types import Sampling
from support.metrics import rows
from support.ray_runs import RAY, kill_in_the_middle, repeated, start_noting
from support.small_policy import SMALL, make_small_policy
from support.small_recipe import write_recipe
from support.vllm_engines import rules_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.process,
    pytest.mark.timeout(1800),
]
STEPS, MAX_LEN = 3, 128
ENGINE = VLLMEngineConfig(dtype="float32", max_num_seqs=8, kv_cache_gib=0.125, block_size=32)
NAMES = ("kind", "dtype", "kv_cache_gib", "block_size")
SETTINGS = [f"rollout.engine.{name}={getattr(ENGINE, name)}" for name in NAMES]
# two starts of vLLM on a busy machine
SETTINGS += ["cluster.start_timeout=900", "cluster.restart_timeout=900", "train.device=cpu"]
PROMPTS = torch.randint(2, 20, (4, 24), generator=torch.Generator().manual_seed(0)).tolist()


async def answers_of(engine):
    """Ask one prompt at a time, with nothing cached."""
    await engine.reset_cache()
    sampling = Sampling(1.0, 12)
    return [await engine.generate(each, sampling, seed=i) for i, each in enumerate(PROMPTS)]


@pytest.fixture
def answers(monkeypatch):
    """Collect version -> replica's name -> its answers once it had the weights."""
    found, load = {}, Replicas.load_weights

    async def load_and_ask(self, weights, version):
        await load(self, weights, version)
        found[version] = {each.name: await answers_of(each.engine) for each in self._members}

    monkeypatch.setattr(Replicas, "load_weights", load_and_ask)
    return found


@pytest.mark.parametrize("killed", [False, True])
def test_replicas_sample_from_the_learners_weights(
    killed, recipe, answers, tmp_path, monkeypatch, caplog
):
    out = tmp_path / "run"
    own = [f"steps={STEPS}", "eval.every=0", "cluster.replicas=2"]
    processes = start_noting(monkeypatch)
    done = kill_in_the_middle(monkeypatch, processes, "replica 0", version=1) if killed else []
    with caplog.at_level(logging.WARNING):
        assert main(["train", str(recipe), f"out={out}", *own, *RAY, *SETTINGS]) == 0
    assert bool(done) == killed == ("replica 0 is back after" in caplog.text) == (repeated(out) > 0)
    for row in rows(out):
        # float32 on both sides; weights of another step are 1e-5 and more away
        assert row["mismatch/k3"] < 1e-6
        assert row["replay/missing_samples"] == row["replay/native_rows"] == 0
    assert list(answers) == list(range(STEPS + 1))
    assert_as_fresh(answers, checkpoint.latest_checkpoint(out))


def test_replicas_of_two_devices(answers, tmp_path, monkeypatch, caplog):
    """One of them is killed, with both of its processes, and comes back with its weights."""
    wide = make_small_policy(tmp_path / "wide", SMALL.model_copy(update={"expert_size": 64}))
    recipe = write_recipe(wide, "steps = 3", "train = { threads = 1 }", "eval = { every = 0 }")
    processes = start_noting(monkeypatch)
    done = kill_in_the_middle(monkeypatch, processes, "replica 0", version=1)
    settings = [*RAY, *SETTINGS, "cluster.replicas=2", "cluster.cpus_per_replica=2"]
    settings += ["rollout.engine.tensor_parallel_size=2", "log.report=false"]
    out = tmp_path / "run"
    with caplog.at_level(logging.WARNING):
        assert main(["train", str(recipe), f"out={out}", *settings]) == 0
    assert done
    assert "replica 0 is back after" in caplog.text
    assert all(row["mismatch/k3"] < 1e-6 for row in rows(out))
    assert list(answers) == list(range(STEPS + 1))
    fresh = asyncio.run(answers_of(fresh_engine(checkpoint.latest_checkpoint(out))))
    for version, of_replicas in answers.items():
        for found in of_replicas.values():
            (first, expected) = (each[0].logp for each in (found, fresh))
            near = torch.allclose(first, expected, rtol=0, atol=1e-5)
            assert near == (version == STEPS)


def fresh_engine(folder):
    hf = read_config(model := ModelConfig(path=str(folder)))
    return VLLMEngine(model, hf, ENGINE, route_spec=rules_of(hf), max_len=MAX_LEN, cpu=True)


def assert_as_fresh(answers, folder):
    fresh = asyncio.run(answers_of(fresh_engine(folder)))
    assert len({float(of["replica 0"][0].logp.sum()) for of in answers.values()}) == STEPS + 1
    for version, of_replicas in answers.items():
        assert len(of_replicas) == 2
        for found in of_replicas.values():
            assert all((each.version == version).all() for each in found)
            for ours, theirs in zip(found, fresh, strict=True):
                assert torch.equal(ours.logp, theirs.logp) == (version == STEPS)
                if version == STEPS:
                    assert torch.equal(ours.token_ids, theirs.token_ids)
                    assert torch.equal(ours.routing.ids, theirs.routing.ids)
