"""Whole runs under Ray: those that equal the local loop, and those whose processes are killed.

With on-policy numerics a completion does not depend on the rest of the batch. Every such run equals
the local one to the bit, also with several replicas and after a kill that repeats requests.
"""

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from onepolicy.cli import main
from onepolicy.launch.ray.actor_engine import ActorEngine
from onepolicy.train import checkpoint
from support import ray_runs
from support.metrics import rows, timeless
from support.own_processes import end_with_parent
from support.ray_runs import RAY, kill_in_the_middle, repeated, start_noting, when_several_run

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.process, pytest.mark.timeout(1200)]
EXACT = ["numerics=on-policy", "model.dtype=float32", "train.device=cpu"]
OVERRIDES = ["steps=3", "checkpoint.every=3", "train.device=cpu"]


@pytest.fixture
def processes(monkeypatch):
    return start_noting(monkeypatch)


@pytest.fixture
def two_nodes():
    with ray_runs.two_nodes() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def exact(recipe, tmp_path_factory):
    """Run the recipe locally with on-policy numerics."""
    out = tmp_path_factory.mktemp("exact") / "local"
    assert main(["train", str(recipe), f"out={out}", *OVERRIDES, *EXACT]) == 0
    return out


def assert_same_run(found, expected):
    assert [timeless(row) for row in rows(found)] == [timeless(row) for row in rows(expected)]
    assert (found / "samples.jsonl").read_bytes() == (expected / "samples.jsonl").read_bytes()
    assert_same_weights(found, expected)


def assert_same_weights(found, expected):
    ours, theirs = (weights_of(checkpoint.latest_checkpoint(run)) for run in (found, expected))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def weights_of(folder):
    files = folder.glob("model*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def problems(run):
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    return [(line["step"], line["problem"]) for line in lines]


def of_quant(run):
    """Return the entry of run.json on quantised weights."""
    return json.loads((run / "run.json").read_text()).get("quant")


def without_faults(row):
    faults = ("rollout/replica_restarts", "rollout/requests_repeated")
    return {name: value for name, value in timeless(row).items() if name not in faults}


@pytest.mark.parametrize("quant", ["off", "int8"])
def test_one_replica_is_the_local_loop_to_the_bit(quant, train, recipe, tmp_path):
    """The command line starts a Ray of this machine only and prints nothing of it."""
    settings = [*OVERRIDES, f"rollout.quant={quant}"]
    local, out = train("local", *settings), tmp_path / "ray"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-m", "onepolicy", "train", recipe, f"out={out}", *settings, *RAY]
    how = {"capture_output": True, "text": True, "preexec_fn": end_with_parent}
    done = subprocess.run(command, env=environment, timeout=600, **how)
    assert done.returncode == 0, done.stderr
    assert_same_run(out, local)
    foreign = [line for line in done.stderr.splitlines() if not line.startswith("onepolicy: ")]
    assert foreign == []
    assert re.search(r"^replica 0 +\d+ +127\.0\.0\.1 ", done.stdout, re.MULTILINE)
    assert json.loads((out / "config.json").read_text())["cluster"]["replicas"] == 1
    assert of_quant(out) == of_quant(local)
    assert ("bytes in the engine" in done.stdout) == (quant == "int8") == bool(of_quant(out))


def test_two_replicas_on_two_nodes_are_the_local_loop(train, two_nodes, processes, exact):
    spread = ["cluster.replicas=2", "cluster.placement=spread"]
    address = f"cluster.address={two_nodes.address}"
    out = train("ray", *OVERRIDES, *EXACT, *RAY, *spread, address)
    assert_same_run(out, exact)
    assert processes["replica 0"].node != processes["replica 1"].node
    assert len({where.pid for where in processes.values()}) == 3


def test_replicas_and_ranks_on_two_nodes(train, two_nodes, processes):
    """Requests that meet in a batch decide last bits. Problems, seeds and statistics are the
    same."""
    local = train("local", *OVERRIDES, "train.ranks=2", "optim.lr=1e-5")
    ranks = ["train.ranks=2", "cluster.replicas=2", "cluster.placement=spread"]
    ranks += [f"cluster.address={two_nodes.address}"]
    out = train("ray", *OVERRIDES, *RAY, *ranks, "optim.lr=1e-5")
    assert len({where.node for where in processes.values()}) == 2
    for ours, theirs in zip(rows(out), rows(local), strict=True):
        for name in ("train/reward", "train/response_length", "eval/greedy"):
            assert ours.get(name) == theirs.get(name), name
        for name in {"train/loss", "train/grad_norm", "train/entropy"} & theirs.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name


def test_adapters_on_ranks_reach_a_replica(train, two_nodes):
    """The replica cannot be read, so log-probabilities say that it holds the adapter."""
    lora = ["train.lora.rank=4", "optim.lr=5e-3", "rollout.engine.dtype=float32", "eval.every=0"]
    cluster = [f"cluster.address={two_nodes.address}", "cluster.replicas=1", "train.ranks=2"]
    out = train("lora", *OVERRIDES, *RAY, *lora, *cluster)
    delivered = [row["adapter/delivered"] for row in rows(out) if "adapter/delivered" in row]
    assert delivered == pytest.approx([1] * 3, abs=1e-2)
    assert (checkpoint.latest_checkpoint(out) / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("killed", [False, True])
def test_sampling_ahead_on_two_replicas(killed, train, processes, monkeypatch):
    """No token is older than allowed, also in requests that are repeated after a replica was
    killed. Every step has its problems once."""
    done = kill_in_the_middle(monkeypatch, processes, "replica 0", version=2) if killed else []
    settings = ["steps=6", "rollout.max_staleness=2", "eval.every=3", "train.device=cpu"]
    settings += ["optim.lr=1e-4"]  # two steps of it leave the routes much as they were
    out = train("ray", *settings, *RAY, "cluster.replicas=2")
    assert bool(done) == killed == (repeated(out) > 0)
    steps = [row for row in rows(out) if "staleness/max" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    for row in steps:
        assert 0 <= row["staleness/max"] <= min(2, row["step"] - 1)
        tokens = sum(v for k, v in row.items() if k.startswith("staleness/tokens@"))
        assert tokens == row["correction/slots"]
        assert row["replay/missing_samples"] == row["replay/native_rows"] == 0
    assert max(row["staleness/max"] for row in steps) >= 1
    assert problems(out) == problems(train("one", "steps=6", "eval.every=0"))


def test_a_replica_killed_in_the_middle_of_a_batch(train, processes, exact, monkeypatch, caplog):
    """The replica comes back with the current weights, its requests are repeated, and the run
    equals an undisturbed one."""
    killed = kill_in_the_middle(monkeypatch, processes, "replica 0", version=1)
    with caplog.at_level(logging.WARNING):
        out = train("ray", *OVERRIDES, *EXACT, *RAY, "cluster.replicas=2")
    assert killed
    assert list(map(without_faults, rows(out))) == list(map(without_faults, rows(exact)))
    assert_same_weights(out, exact)
    assert repeated(out) > 0
    print(re.search(r"replica 0 is back after .*", caplog.text)[0])


def test_a_replica_killed_during_a_weight_sync(train, processes, exact, monkeypatch, caplog):
    """The others are not held up, and the killed one gets the weights when it is back."""
    load, killed = ActorEngine.load, []

    async def load_and_kill(engine, weights, version):
        loading = asyncio.ensure_future(load(engine, weights, version))
        if version == 2 and engine.name == "replica 0" and not killed:
            await asyncio.sleep(0)  # it is sent
            killed.append(True)
            os.kill(processes["replica 0"].pid, signal.SIGKILL)
        await loading

    monkeypatch.setattr(ActorEngine, "load", load_and_kill)
    with caplog.at_level(logging.WARNING):
        out = train("ray", *OVERRIDES, *EXACT, *RAY, "cluster.replicas=3")
    assert killed
    assert list(map(without_faults, rows(out))) == list(map(without_faults, rows(exact)))
    assert_same_weights(out, exact)
    assert "replica 0 is back after" in caplog.text


def test_other_replicas_take_over_without_restarts_left(
    train, processes, exact, monkeypatch, caplog
):
    killed = kill_in_the_middle(monkeypatch, processes, "replica 0", version=1)
    out = train("ray", *OVERRIDES, *EXACT, *RAY, "cluster.replicas=2", "cluster.restarts=0")
    assert killed
    assert list(map(without_faults, rows(out))) == list(map(without_faults, rows(exact)))
    assert_same_weights(out, exact)
    assert repeated(out) > 0
    assert "replica 0 is gone for good" in caplog.text
    assert "1 engines that are left" in caplog.text


def test_losing_the_last_replica_ends_the_run_and_it_resumes(
    recipe, processes, exact, monkeypatch, tmp_path, capsys
):
    out = tmp_path / "ray"
    with monkeypatch.context() as patch:
        kill_in_the_middle(patch, processes, "replica 0", version=1)
        settings = [*OVERRIDES, *EXACT, *RAY, "checkpoint.every=1", "cluster.restarts=0"]
        assert main(["train", str(recipe), f"out={out}", *settings]) == 1
    assert "none of the engines is left" in capsys.readouterr().err
    assert len(rows(out)) == 2  # the first evaluation and one step
    assert main(["train", "--resume", str(out), "cluster.replicas=2"]) == 0
    assert_same_run(out, exact)


def test_a_removed_node_takes_its_replica_along(
    train, two_nodes, processes, exact, monkeypatch, caplog
):
    """No other node has resources for the replica, so it is lost after cluster.restart_timeout. The
    other replica continues."""
    (other,) = two_nodes.worker_nodes

    def remove(engine):
        there = processes[engine.name].node == other.node_id
        if there:
            two_nodes.remove_node(other, allow_graceful=False)
        return there

    done = when_several_run(monkeypatch, 1, remove)
    settings = ["cluster.replicas=2", "cluster.cpus_per_replica=2", "cluster.restart_timeout=20"]
    out = train("ray", *OVERRIDES, *EXACT, *RAY, *settings, f"cluster.address={two_nodes.address}")
    assert done
    assert_same_weights(out, exact)
    assert f"{done[0]} did not come back within 20 s" in caplog.text


def test_no_resources_and_an_absent_ray_are_reported(recipe, two_nodes, tmp_path, capsys):
    out, address = tmp_path / "x", f"cluster.address={two_nodes.address}"
    command = ["train", str(recipe), f"out={out}", "cluster.kind=ray", "train.device=cpu"]
    assert main([*command, address, "cluster.cpus_per_replica=3", "cluster.start_timeout=3"]) == 75
    errors = capsys.readouterr().err
    assert "found no room within 3 s" in errors
    assert "1 x 3 CPU, 0 GPU: replicas" in errors
    assert errors.count("2 CPU, 0 GPU: node") == 2
    assert main([*command, "cluster.address=127.0.0.1:1"]) == 75
    assert "cluster.address: no Ray at 127.0.0.1:1" in capsys.readouterr().err
    assert not out.exists()
