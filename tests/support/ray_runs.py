"""Shared parts of the tests of runs under Ray. Import it before Ray, which reads its environment at
its import."""

import os
import signal
from contextlib import contextmanager

import pytest

from onepolicy.launch.ray import connect
from support.metrics import rows

connect.prepare_environment(own=True)
ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

from onepolicy.launch.ray import actors  # noqa: E402
from onepolicy.launch.ray.actor_engine import ActorEngine  # noqa: E402
from onepolicy.launch.ray.placement import ProcessInfo  # noqa: E402

RAY = ["cluster.kind=ray", "cluster.start_timeout=240", "cluster.restart_timeout=240"]


@contextmanager
def two_nodes():
    """Yield a Ray of two nodes with two CPUs each. The driver is on the first."""
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    try:
        cluster.add_node(num_cpus=2)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def start_noting(monkeypatch):
    """Note name -> pid and node of a run's processes, as far as they are started."""
    found, from_json = {}, ProcessInfo.from_json

    def note(name, text):
        where = from_json(name, text)
        found[name] = where
        return where

    monkeypatch.setattr(actors.ProcessInfo, "from_json", note)
    return found


def when_several_run(monkeypatch, version, do):
    """Call do(engine) once, when a replica has several requests under weights of `version` or
    later and `do` returns true."""
    answer, done = ActorEngine._answer, []

    async def noted(engine, reply):
        several = engine._waiting >= 1  # beside this one
        if several and engine.version >= version and not done and do(engine):
            done.append(engine.name)
        return await answer(engine, reply)

    monkeypatch.setattr(ActorEngine, "_answer", noted)
    return done


def kill_in_the_middle(monkeypatch, processes, name, version):
    """Send SIGKILL to replica `name` as soon as it has several requests under weights of `version`
    or later."""

    def kill(engine):
        if engine.name == name:
            os.kill(processes[name].pid, signal.SIGKILL)
        return engine.name == name

    return when_several_run(monkeypatch, version, kill)


def repeated(run):
    """Return the number of requests that were repeated."""
    return sum(row.get("rollout/requests_repeated", 0) for row in rows(run))
