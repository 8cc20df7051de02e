"""Whole runs under Ray: what equals the local loop, and what becomes of a run when its processes are killed.

On-policy numerics makes a completion independent of what else is in the batch, so there every run equals the local one
to the bit: with several replicas, and after a kill that had requests repeated.
"""

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from conftest import rows, timeless
from safetensors.torch import load_file

from onepolicy.cluster import start

start.prepare(own=True)
ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

from onepolicy.cli import main  # noqa: E402
from onepolicy.cluster import hosts  # noqa: E402
from onepolicy.cluster.engine import RemoteEngine  # noqa: E402
from onepolicy.cluster.place import Where  # noqa: E402
from onepolicy.train import checkpoint  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1200)]
RAY = ["cluster.kind=ray", "cluster.start_timeout=240", "cluster.restart_timeout=240"]
EXACT = ["numerics=on-policy", "model.dtype=float32", "train.device=cpu"]
OVERRIDES = ["steps=3", "checkpoint.every=3", "train.device=cpu"]


@pytest.fixture
def processes(monkeypatch):
    """Pids of a run's processes by name, as far as they are started."""
    found = {}
    told = Where.told

    def note(name, text):
        where = told(name, text)
        found[name] = where
        return where

    monkeypatch.setattr(hosts.Where, "told", note)
    return found


@pytest.fixture
def two_nodes():
    """Address of a Ray of two nodes with two CPUs each; the driver is on the first."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=2)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def exact(recipe, tmp_path_factory):
    """The local run with on-policy numerics."""
    out = tmp_path_factory.mktemp("exact") / "local"
    assert main(["train", str(recipe), f"out={out}", *OVERRIDES, *EXACT]) == 0
    return out


def assert_same_run(found, expected):
    assert [timeless(row) for row in rows(found)] == [timeless(row) for row in rows(expected)]
    assert (found / "samples.jsonl").read_bytes() == (expected / "samples.jsonl").read_bytes()
    assert_same_weights(found, expected)


def assert_same_weights(found, expected):
    ours, theirs = (weights_of(checkpoint.latest(run)) for run in (found, expected))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def weights_of(folder):
    return {name: tensor for file in folder.glob("model*.safetensors") for name, tensor in load_file(file).items()}


def repeated(run):
    return sum(row.get("rollout/requests_repeated", 0) for row in rows(run))


def without_faults(row):
    return {
        name: value
        for name, value in timeless(row).items()
        if "replica_restarts" not in name and "repeated" not in name
    }


def kill_in_the_middle(monkeypatch, processes, name, version):
    """SIGKILL for replica `name` as soon as it has been sent several requests under weights of `version` or later."""
    send, done = RemoteEngine._send, []

    async def send_and_kill(engine):
        await send(engine)
        if engine.name == name and engine.version >= version and len(engine._asked) > 1 and not done:
            done.append(True)
            os.kill(processes[name].pid, signal.SIGKILL)

    monkeypatch.setattr(RemoteEngine, "_send", send_and_kill)
    return done


def test_one_replica_is_the_local_loop_to_the_bit(train, recipe, tmp_path):
    """By the command line: a Ray of this machine only, which keeps its own words to itself."""
    local, out = train("local", *OVERRIDES), tmp_path / "ray"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-m", "onepolicy.cli", "train", recipe, f"out={out}", *OVERRIDES, *RAY],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert_same_run(out, local)
    assert done.stderr == ""
    assert re.search(r"^replica 0 +\d+ +127\.0\.0\.1 ", done.stdout, re.MULTILINE)
    assert json.loads((out / "config.json").read_text())["cluster"]["replicas"] == 1


def test_two_replicas_on_two_nodes_are_the_local_loop_under_on_policy_numerics(train, two_nodes, processes, exact):
    out = train(
        "ray",
        *OVERRIDES,
        *EXACT,
        *RAY,
        "cluster.replicas=2",
        "cluster.placement=spread",
        f"cluster.address={two_nodes.address}",
    )
    assert_same_run(out, exact)
    assert processes["replica 0"].node != processes["replica 1"].node
    assert len({where.pid for where in processes.values()}) == 3


def test_replicas_and_ranks_on_two_nodes(train, two_nodes, processes):
    """Which requests meet in a batch decides last bits; problems, seeds and statistics are the same."""
    local = train("local", *OVERRIDES, "train.ranks=2", "optim.lr=1e-5")
    ranks = ["train.ranks=2", "cluster.replicas=2", "cluster.placement=spread", f"cluster.address={two_nodes.address}"]
    out = train("ray", *OVERRIDES, *RAY, *ranks, "optim.lr=1e-5")
    assert len({where.node for where in processes.values()}) == 2
    for ours, theirs in zip(rows(out), rows(local), strict=True):
        for name in ("train/reward", "train/response_length", "eval/greedy"):
            assert ours.get(name) == theirs.get(name), name
        for name in {"train/loss", "train/grad_norm", "train/entropy"} & theirs.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name


def test_a_replica_killed_in_the_middle_of_a_batch(train, processes, exact, monkeypatch, caplog):
    """It comes back with the weights of then, its requests are repeated, and the run is what it would have been."""
    killed = kill_in_the_middle(monkeypatch, processes, "replica 0", version=1)
    with caplog.at_level(logging.WARNING):
        out = train("ray", *OVERRIDES, *EXACT, *RAY, "cluster.replicas=2")
    assert killed
    assert list(map(without_faults, rows(out))) == list(map(without_faults, rows(exact)))
    assert_same_weights(out, exact)
    assert repeated(out) > 0
    assert "replica 0 is back after" in caplog.text


def test_the_others_take_over_when_restarts_are_used_up(train, processes, exact, monkeypatch, caplog):
    killed = kill_in_the_middle(monkeypatch, processes, "replica 0", version=1)
    out = train("ray", *OVERRIDES, *EXACT, *RAY, "cluster.replicas=2", "cluster.restarts=0")
    assert killed
    assert_same_run(out, exact)
    assert "replica 0 is gone for good" in caplog.text
    assert "1 replicas are left" in caplog.text


def test_the_last_replica_lost_ends_the_run_and_it_resumes(recipe, processes, exact, monkeypatch, tmp_path, capsys):
    out = tmp_path / "ray"
    with monkeypatch.context() as patch:
        kill_in_the_middle(patch, processes, "replica 0", version=1)
        settings = [*OVERRIDES, *EXACT, *RAY, "checkpoint.every=1", "cluster.restarts=0"]
        assert main(["train", str(recipe), f"out={out}", *settings]) == 1
    assert "no rollout replica is left" in capsys.readouterr().err
    assert len(rows(out)) == 2  # the first evaluation and one step
    assert main(["train", "--resume", str(out), "cluster.replicas=2"]) == 0
    assert_same_run(out, exact)


def test_a_rank_killed_ends_the_run_and_it_resumes(recipe, processes, monkeypatch, tmp_path, capsys):
    settings = [*OVERRIDES, "train.ranks=2", "checkpoint.every=1"]
    whole, out = tmp_path / "whole", tmp_path / "ray"
    assert main(["train", str(recipe), f"out={whole}", *settings]) == 0
    with monkeypatch.context() as patch:
        send = RemoteEngine._send

        async def send_and_kill(engine):
            await send(engine)
            if engine.version == 1 and len(engine._asked) > 1:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(processes["rank 1"].pid, signal.SIGKILL)

        patch.setattr(RemoteEngine, "_send", send_and_kill)
        assert main(["train", str(recipe), f"out={out}", *settings, *RAY]) == 1
    assert "rank 1 (process" in capsys.readouterr().err
    assert main(["train", "--resume", str(out)]) == 0
    assert_same_run(out, whole)


def test_a_node_that_goes_takes_its_replica_along(train, two_nodes, processes, exact, monkeypatch, caplog):
    """No other node has room for it, so it is lost after cluster.restart_timeout; the other replica goes on."""
    (other,) = two_nodes.worker_nodes
    send, done = RemoteEngine._send, []

    async def send_and_remove(engine):
        await send(engine)
        if processes[engine.name].node == other.node_id and engine.version >= 1 and len(engine._asked) > 1 and not done:
            done.append(engine.name)
            two_nodes.remove_node(other, allow_graceful=False)

    monkeypatch.setattr(RemoteEngine, "_send", send_and_remove)
    settings = ["cluster.replicas=2", "cluster.cpus_per_replica=2", "cluster.restart_timeout=20"]
    out = train("ray", *OVERRIDES, *EXACT, *RAY, *settings, f"cluster.address={two_nodes.address}")
    assert done
    assert_same_weights(out, exact)
    assert f"{done[0]} did not come back within 20 s" in caplog.text


def test_no_room_and_nobody_there_are_told(recipe, two_nodes, tmp_path, capsys):
    command = ["train", str(recipe), f"out={tmp_path / 'x'}", "cluster.kind=ray", "train.device=cpu"]
    address = f"cluster.address={two_nodes.address}"
    assert main([*command, address, "cluster.cpus_per_replica=3", "cluster.start_timeout=3"]) == 2
    errors = capsys.readouterr().err
    assert "found no room within 3 s" in errors
    assert "1 x 3 CPU, 0 GPU: replicas" in errors
    assert errors.count("2 CPU, 0 GPU: node") == 2
    assert main([*command, "cluster.address=127.0.0.1:1"]) == 2
    assert "cluster.address: no Ray at 127.0.0.1:1" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
