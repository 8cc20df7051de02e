"""A vLLM server imports our worker methods and our guard into its own process, where vLLM pins
torch and transformers."""

import os
import subprocess
import sys

import pytest

from support.paths import ROOT

CHECK = """
import sys
sys.modules["transformers"] = None  # an import of it would fail
import onepolicy.rollout.vllm.worker, onepolicy.rollout.vllm.guard
ours = {name.split(".")[1] for name in sys.modules if name.startswith("onepolicy.")}
assert ours <= ROOMS, ours - ROOMS
others = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
assert "vllm" not in others
third = {"rich", "tomlkit", "httpx2", "plotly", "huggingface_hub", "tokenizers"} & others
assert not third, third
models = [name for name in sys.modules if name.startswith("onepolicy.models.")]
own = {f"onepolicy.models.{name}" for name in ("checksum", "quant", "quant.size_report")}
assert set(models) == own, models
"""
ROOMS = {
    *("config", "divergence", "interfaces", "models", "replay", "rollout", "support", "sync"),
    *("errors", "npy", "telemetry", "types"),
}
"""What the server's process may load: the library's readers of routes and of supports, and weight
sync."""


@pytest.mark.full
@pytest.mark.process
def test_a_server_imports_nothing_that_depends_on_its_versions():
    code = CHECK.replace("ROOMS", repr(ROOMS))
    places = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": places}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
