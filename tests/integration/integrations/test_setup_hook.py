"""Ray runs the setup of an adapter in its workers, before the trainer's modules are imported."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from support.paths import ROOT

pytestmark = [pytest.mark.process, pytest.mark.ray, pytest.mark.slow]
CODE = """
import json, sys, ray
from onepolicy.integrations.core import on_import

@ray.remote
def look():
    waiting = sorted(on_import._waiting)
    from onepolicy.integrations.openrlhf.experience import own_settings
    return waiting, own_settings().correction.name

environment = {"ONEPOLICY": json.dumps({"correction": "tis"}), "PYTHONPATH": sys.argv[1]}
hook = {"worker_process_setup_hook": "onepolicy.integrations.openrlhf.setup"}
ray.init(
    address="local", num_cpus=1, include_dashboard=False,
    runtime_env=hook | {"env_vars": environment},
)
print(json.dumps(ray.get(look.remote())))
"""


def test_a_worker_waits_for_the_trainers_modules_with_its_settings():
    command = [sys.executable, "-c", CODE, str(ROOT / "src")]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    waiting, correction = json.loads(said.splitlines()[-1])
    assert waiting == [
        "openrlhf.models.loss",
        "openrlhf.trainer.ppo_trainer",
        "openrlhf.trainer.ppo_utils.experience_maker",
        "openrlhf.trainer.ray.ppo_actor",
    ]
    assert correction == "tis"
