"""A plain local run imports only the modules that it uses, and a step runs few files."""

import json
import subprocess
import sys

import house
import pytest

from support.paths import ROOT

pytestmark = pytest.mark.process
RECIPE = ROOT / "recipes" / "quickstart.toml"
BESIDE = """
onepolicy.audit onepolicy.build.calibrate onepolicy.build.measure
onepolicy.config.errors onepolicy.correct.equations onepolicy.diagnose onepolicy.envs.adapters
onepolicy.envs.tools onepolicy.launch.ranks onepolicy.launch.ray onepolicy.models.quant
onepolicy.objective.gae onepolicy.plan onepolicy.replay.axes onepolicy.replay.misalignment
onepolicy.replay.padding onepolicy.rollout.fleet onepolicy.rollout.servers
onepolicy.rollout.sglang onepolicy.rollout.vllm onepolicy.run.async_rollouts
onepolicy.run.recovery onepolicy.run.resume onepolicy.sync.broadcast onepolicy.train.critic
onepolicy.train.sharded ray sglang vllm
"""
MOST_FILES, MOST_LINES = 51, 11_000
"""Of the package, in which a plain step calls a function (`python benchmarks/house.py --steps`).

48 and 10,540; the first step of a run, which is scored without replay too, 49 and 10,670.
"""
CODE = """
import json
from onepolicy.cli import main
for words in json.loads(sys.argv[1]):
    assert main(words) == 0
    print("LOADED", *sorted(sys.modules))
    print("EXECUTED", *sorted(executed))
"""


def beside(modules):
    names = BESIDE.split()
    inside = tuple(f"{each}." for each in names)
    return [module for module in modules if module.startswith(inside) or module in names]


@pytest.mark.full
def test_a_run_loads_and_runs_the_road_and_an_option_where_it_is_used(policy, tmp_path):
    """One step of the quickstart, then one with an option, in one process."""
    quick = ["train", str(RECIPE), f"model.path={policy}", "steps=1", "task.ops=2"]
    quick += ["rollout.prompts_per_step=2", "rollout.group_size=2", "eval.problems=2"]
    quick += ["rollout.engine.max_num_seqs=4"]
    option = ["rollout.max_staleness=0", "train.reuse_scoring_forward=false"]
    runs = [[*quick, f"out={tmp_path / 'a'}"], [*quick, *option, f"out={tmp_path / 'b'}"]]
    command = [sys.executable, "-c", house.TRACE + CODE, json.dumps(runs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    loaded = [beside(words[1:]) for words in lines if words[:1] == ["LOADED"]]
    assert loaded == [[], ["onepolicy.run.async_rollouts"]]
    executed = next(words[1:] for words in lines if words[:1] == ["EXECUTED"])
    files = house.own_files(executed)
    assert len(files) <= MOST_FILES
    assert house.lines(files) <= MOST_LINES
