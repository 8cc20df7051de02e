"""examples/loop.py runs, learns and shows the effect of R3."""

import asyncio
import importlib.util

import torch

from support.paths import ROOT

EXAMPLE = ROOT / "examples" / "loop.py"


def load_example():
    spec = importlib.util.spec_from_file_location("loop_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_example_learns_and_replay_closes_the_gap():
    torch.set_num_threads(1)
    log = asyncio.run(load_example().main(steps=6))
    assert log[-1]["reward"] > log[0]["reward"] + 0.1
    assert sum(row["routers apart"] for row in log) > 0
    assert sum(row["k3 with R3"] for row in log) < sum(row["k3"] for row in log)
