"""The plugin in verl's processes: without effect for who did not ask for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.paths import ROOT

pytestmark = [pytest.mark.verl, pytest.mark.process]
UNASKED = """
import sys, os
os.environ.pop("VERL_ENGINE_VENDOR", None)
import verl
import onepolicy.integrations.verl
import verl.workers.engine
from verl.workers.engine import EngineRegistry
assert "onepolicy.integrations.verl.engine" not in sys.modules
assert all("onepolicy" not in str(key) for by in EngineRegistry._engines.values()
           for table in by.values() for key in table)
"""
ASKED = """
import os
os.environ["VERL_ENGINE_VENDOR"] = "onepolicy"
os.environ["VERL_ENGINE_DEVICE"] = "cuda"
import onepolicy.integrations.verl
import verl
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead
from onepolicy.integrations.verl.engine import ReplayingFSDPEngine
for backend in ("fsdp", "fsdp2"):
    assert EngineRegistry.get_engine_cls("language_model", backend) is ReplayingFSDPEngine
    critic = EngineRegistry.get_engine_cls("value_model", backend)
    assert critic.__module__.startswith("verl."), "a critic has no routes"
from verl.trainer.ppo.v1 import get_trainer_cls
assert get_trainer_cls("onepolicy_sync").__module__ == "onepolicy.integrations.verl.trainer"
from verl.trainer.ppo.core_algos import get_policy_loss_fn
assert get_policy_loss_fn("onepolicy").__module__ == "onepolicy.integrations.verl.policy_loss"
"""
BROKEN = """
import os, sys
os.environ["VERL_ENGINE_VENDOR"] = "onepolicy"
import onepolicy.integrations.verl
sys.modules["onepolicy.replay.routers"] = None  # as beside a transformers that it cannot use
import verl
import verl.workers.engine
import verl.trainer.ppo.core_algos
"""


def run(code):
    own = {"PYTHONPATH": str(ROOT / "src"), "VERL_USE_EXTERNAL_PLUGINS": "none"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, env=os.environ | own, capture_output=True, text=True)


@pytest.mark.parametrize("code", [UNASKED, ASKED], ids=["unasked", "asked"])
def test_plugin(code):
    done = run(code)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_plugin_that_cannot_load_stops_nobody():
    done = run(BROKEN)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "onepolicy is not registered with verl.workers.engine" in done.stderr + done.stdout
