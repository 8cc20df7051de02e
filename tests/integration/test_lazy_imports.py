"""A plain local run imports only the modules that it uses."""

import subprocess
import sys

from support.paths import ROOT

RECIPE = ROOT / "recipes" / "quickstart.toml"
BESIDE = (
    "onepolicy.audit",
    "onepolicy.build.calibrate",
    "onepolicy.build.measure_components",
    "onepolicy.config.errors",
    "onepolicy.correct.equations",
    "onepolicy.diagnose",
    "onepolicy.envs.adapters",
    "onepolicy.envs.tools",
    "onepolicy.launch.ranks",
    "onepolicy.launch.ray",
    "onepolicy.models.quant",
    "onepolicy.objective.gae",
    "onepolicy.plan",
    "onepolicy.replay.axes",
    "onepolicy.replay.misalignment",
    "onepolicy.replay.padding",
    "onepolicy.rollout.fleet",
    "onepolicy.rollout.servers",
    "onepolicy.rollout.sglang",
    "onepolicy.rollout.vllm",
    "onepolicy.run.async_rollouts",
    "onepolicy.run.recovery",
    "onepolicy.run.resume",
    "onepolicy.sync.broadcast",
    "onepolicy.train.critic",
    "onepolicy.train.current_policy",
    "onepolicy.train.restore",
    "onepolicy.train.sharded",
    "ray",
    "sglang",
    "vllm",
)
CODE = """
import sys
from onepolicy.cli import main
assert main(sys.argv[1:]) == 0
print("LOADED", *sorted(sys.modules))
"""


def loaded(policy, out, *settings):
    """Return the modules of a process that has trained one step of the quickstart."""
    quick = [
        "rollout.prompts_per_step=2",
        "rollout.group_size=2",
        "rollout.engine.max_num_seqs=4",
        "eval.problems=2",
    ]
    command = [
        sys.executable,
        "-c",
        CODE,
        "train",
        str(RECIPE),
        f"model.path={policy}",
        f"out={out}",
        "steps=1",
    ]
    done = subprocess.run(
        [*command, "task.ops=2", *quick, *settings], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("LOADED")).split()[1:]


def beside(modules):
    return [
        name
        for name in modules
        if name.startswith(tuple(f"{each}." for each in BESIDE)) or name in BESIDE
    ]


def test_the_quickstart_loads_nothing_beside_the_road(policy, tmp_path):
    assert not beside(loaded(policy, tmp_path / "run"))


def test_an_option_is_loaded_where_it_is_used(policy, tmp_path):
    modules = loaded(
        policy, tmp_path / "run", "rollout.max_staleness=0", "train.reuse_scoring_forward=false"
    )
    assert beside(modules) == ["onepolicy.run.async_rollouts"]
