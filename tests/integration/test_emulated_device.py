"""Whole RL steps on a device that refuses tensors of the CPU, and how often its host waits."""

import json
import subprocess
import sys

import pytest

from support.paths import ROOT
from support.step_cases import FAMILIES, SLOW

pytestmark = pytest.mark.process
COMMAND = "import support.emulated_device, support.{module} as run; run.main({arguments!r})"


def run(module, arguments):
    """Run `main` of a module of tests/support in a process of its own. Return its lines."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND.format(module=module, arguments=arguments)],
        cwd=ROOT / "tests",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check_all(cases):
    from support.whole_step import check

    found = run("emulated_run", cases)
    assert [each["case"] for each in found] == cases
    problems = [f"{each['case']}: {each['error']}" for each in found if "error" in each]
    assert not problems, "\n\n".join(problems)
    for each in found:
        check(each)


STEPS = [
    "qwen3_dense off tis",
    "qwen3_moe off centering",
    "qwen3_moe r2 kl-entropy gspo",
    "qwen3_moe r3 tis bfloat16",
    "qwen3_moe r3 critic m2po",
    "qwen3_moe r3 int8-static mis",
    "olmoe r3 tis fp8",
    "mixtral r3 tis",
    "deepseek_v3 r3 tis",
    "deepseek_v3 weights seq-mis reuse",
    "gpt_oss soft opsm chunks",
]
"""Every family, mode and kind of correction, and two formats, with as few steps as hold them."""


@pytest.mark.full
def test_steps_of_every_family_mode_and_kind_of_correction():
    check_all(STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_step_of_a_family(family):
    check_all([case for case in SLOW if case.split()[0] == family])


READS = {
    "decode step": 1,
    "finished request": 3,
    "prefix look-up": 1,
    "one micro-batch and the update": 18,
    "further micro-batch": 15,
    "layer": 0,
}
"""Times that the host waits for the device: a micro-batch is scored and trained on, a request of a
MoE model has its routes to return. The numbers may only go down."""


@pytest.mark.full
def test_the_host_waits_as_often_as_the_budget_says():
    moe, dense = run("emulated_budgets", ["qwen3_moe", "qwen3_dense"])
    for line in (moe, dense):
        over = {name: n for name, n in line["found"].items() if n > READS[name]}
        assert not over, f"{over} of {READS}; reads of a step by line: {line['lines']}"
    slack = {name: n for name, n in moe["found"].items() if n < READS[name]}
    assert not slack, f"fewer reads than the budget: lower it to {slack}"
