"""A plain local run imports only the modules that it uses, and a step runs few files."""

import subprocess
import sys

import house
import pytest

from support.paths import ROOT

pytestmark = pytest.mark.process
RECIPE = ROOT / "recipes" / "quickstart.toml"
BESIDE = """
onepolicy.audit onepolicy.build.sharded_learner onepolicy.envs.adapters onepolicy.envs.tools
onepolicy.launch.ranks onepolicy.launch.ray.actors onepolicy.measure onepolicy.models.nf4
onepolicy.plan.planner onepolicy.rollout.vllm.engine onepolicy.train.sharded.rank
bitsandbytes kaleido peft pyarrow ray sglang torchao vllm
"""
"""Packages of extras that the run does not use, and what needs them or other processes."""
MOST_FILES, MOST_LINES = 51, 10_470
"""Of the package, in which a plain step calls a function (`python benchmarks/house.py --steps`).

50 and 10,297. The first step of a run, on a processor with AVX-512, has 51 and 10,464: it is scored
without replay too.
"""
CODE = """
from onepolicy.cli import main
assert main(sys.argv[1:]) == 0
print("LOADED", *sorted(sys.modules))
print("EXECUTED", *sorted(executed))
"""


def beside(modules):
    names = BESIDE.split()
    inside = tuple(f"{each}." for each in names)
    return [module for module in modules if module.startswith(inside) or module in names]


@pytest.mark.full
def test_a_run_loads_and_runs_the_road(policy, tmp_path):
    """One step of the quickstart."""
    quick = ["train", str(RECIPE), f"model.path={policy}", "steps=1", "task.ops=2"]
    quick += ["rollout.prompts_per_step=2", "rollout.group_size=2", "eval.problems=2"]
    quick += ["rollout.engine.max_num_seqs=4", f"out={tmp_path / 'run'}"]
    command = [sys.executable, "-c", house.TRACE + CODE, *quick]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    loaded, executed = (
        next(words[1:] for words in lines if words[:1] == [name]) for name in ("LOADED", "EXECUTED")
    )
    assert beside(loaded) == []
    files = house.own_files(executed)
    assert len(files) <= MOST_FILES
    assert house.lines(files) <= MOST_LINES
