"""The examples for a trainer of your own run as they are, and show what they say."""

import asyncio
import importlib.util
import re
import runpy

import torch

from support.paths import ROOT

EXAMPLES = ROOT / "examples"


def load_example():
    spec = importlib.util.spec_from_file_location("loop_example", EXAMPLES / "loop.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_example_learns_and_replay_closes_the_gap():
    torch.set_num_threads(1)
    log = asyncio.run(load_example().main(steps=6))
    assert log[-1]["reward"] > log[0]["reward"] + 0.1
    assert sum(row["routers apart"] for row in log) > 0
    assert sum(row["k3 with R3"] for row in log) < sum(row["k3"] for row in log)


def test_a_grpo_loop_of_transformers_and_the_library(capsys):
    """Padded prompts, micro-batches: with replay the gap is smaller in each step, and it learns."""
    runpy.run_path(str(EXAMPLES / "grpo_loop.py"))
    found = re.findall(r"reward ([\d.]+)  k3 (\S+) without, (\S+) with", capsys.readouterr().out)
    steps = [tuple(map(float, step)) for step in found]
    assert len(steps) == 8
    assert all(0 < replayed < without / 2 for _, without, replayed in steps)
    assert max(reward for reward, *_ in steps[-3:]) > 3 * steps[0][0]
