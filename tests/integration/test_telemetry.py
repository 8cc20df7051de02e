"""vLLM, Ray and the model hub's client report nothing, even if the user's environment allows it."""

import json
import os
import subprocess
import sys

import pytest

from onepolicy.launch.ray import connect
from onepolicy.rollout.vllm import serve
from onepolicy.telemetry import OPT_OUT

ON = dict.fromkeys(OPT_OUT, "0") | {"RAY_USAGE_STATS_ENABLED": "1"}
SHOW = (
    f"import json, os; "
    f"print(json.dumps({{name: os.environ.get(name) for name in {sorted(OPT_OUT)}}}))"
)


def test_statistics_are_switched_off():
    """The switches have the names of their documentation."""
    for name in ("HF_HUB_DISABLE_TELEMETRY", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"):
        assert OPT_OUT[name] == "1"
    assert OPT_OUT["RAY_USAGE_STATS_ENABLED"] == "0"


PROCESSES = [  # the command line, learner ranks, Ray's actors, and the model hub's client
    ("import onepolicy", {}),
    ("import onepolicy", ON),
    ("import onepolicy.cli", ON),
    ("import onepolicy.config", ON),
    ("import onepolicy.launch.ray.replica_actor", ON),
    (
        "import onepolicy.models.load, huggingface_hub.constants as hub\n"
        "assert hub.HF_HUB_DISABLE_TELEMETRY is True",
        ON,
    ),
]


@pytest.mark.full
@pytest.mark.process
def test_every_kind_of_our_processes_is_covered(subtests):
    others = {name: value for name, value in os.environ.items() if name not in OPT_OUT}
    for first, exported in PROCESSES:
        command = [sys.executable, "-c", f"{first}\n{SHOW}"]
        with subtests.test(first, exported=exported):
            done = subprocess.run(command, env=others | exported, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout) == OPT_OUT


def test_a_vllm_server(monkeypatch):
    for name, value in ON.items():
        monkeypatch.setenv(name, value)
    found = serve.server_environment("", hosts=(), vocab=32, cpu=True)
    assert {name: found[name] for name in OPT_OUT} == OPT_OUT


@pytest.mark.parametrize("own", [True, False])
def test_ray(monkeypatch, own):
    others = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
    for name in (*OPT_OUT, *connect.QUIET, *connect.ON_LOOPBACK, *others):
        monkeypatch.setenv(name, ON.get(name, ""))  # so that it is put back afterwards
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    connect.prepare_environment(own=own)
    assert {name: os.environ[name] for name in OPT_OUT} == OPT_OUT


def test_exported_settings_do_not_open_a_ray_started_for_the_run(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")
    connect.prepare_environment(own=True)
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"


ACTORS = """
import json, os, sys
from onepolicy.launch.ray import connect
from onepolicy.config import resolve
tree = {"out": "x", "steps": 1, "model": {"path": "tiny"}, "task": {"kind": "chain"}}
config = resolve(tree, ["cluster.kind=ray"])
with connect._connected(config, config.cluster):
    import ray
    from onepolicy.telemetry import OPT_OUT

    @ray.remote
    def shown():
        return {name: os.environ.get(name) for name in OPT_OUT}

    processes = sorted(ray._private.worker._global_node.all_processes)
    print(json.dumps([ray.get(shown.remote()), processes]))
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_ray_starts_no_api_server():
    """An API server would ask which cloud this is."""
    pytest.importorskip("ray")
    others = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", ACTORS]
    done = subprocess.run(command, env=others | ON, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    variables, processes = json.loads(done.stdout.splitlines()[-1])
    assert variables == OPT_OUT
    assert "raylet" in processes
    assert "dashboard" not in processes
