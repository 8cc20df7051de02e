"""Short runs with R3 on the embedded engine, on environments of textarena and verifiers; resumed to
the bit."""

from __future__ import annotations

import shutil
import sys

import pytest
import torch

from onepolicy.cli import main
from onepolicy.config.policy import PolicyConfig
from onepolicy.tiny.model import make_model, make_tokenizer, save_policy
from support.metrics import rows, timeless
from support.paths import ROOT
from support.scripted_engine import PRINTABLE

pytestmark = pytest.mark.envs
PACKAGES = ROOT / "tests" / "support" / "envs"
TASKS = {
    "textarena": 'kind = "textarena"\ngame = "GuessTheNumber-v0"',
    "verifiers": 'kind = "verifiers"\nenv = { taskset = { id = "doubling-v1" } }',
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """Return the folder of a random MoE."""
    torch.set_num_threads(1)
    config = PolicyConfig(hidden_size=32, layers=2, experts=8, top_k=2, max_len=1024)
    tokenizer = make_tokenizer("".join(sorted(PRINTABLE)))
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("policies") / "random"
    save_policy(make_model(config, len(tokenizer)), tokenizer, config, folder)
    return folder


def recipe_of(task, policy, path):
    path.write_text(
        f"""
        out = "set by the test"
        steps = 2
        model = {{ path = "{policy}" }}
        rollout.prompts_per_step = 2
        rollout.group_size = 2
        rollout.sampling = {{ max_tokens = 8 }}
        rollout.engine = {{ max_num_seqs = 4 }}
        eval = {{ every = 2, problems = 2 }}
        train = {{ threads = 1 }}
        log = {{ counterfactual_every = 1, tensorboard = false, report = false }}
        checkpoint = {{ every = 1 }}
        [task]
        max_turns = 3
        {TASKS[task]}
        """
    )
    return str(path)


@pytest.mark.parametrize("task", TASKS)
def test_a_run_and_a_resumed_one(task, policy, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(PACKAGES))  # doubling-v1
    recipe = recipe_of(task, policy, tmp_path / "recipe.toml")
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert main(["train", recipe, f"out={whole}"]) == 0
    expected = list(map(timeless, rows(whole)))
    assert [row["step"] for row in expected] == [0, 1, 2]
    for row in expected[1:]:
        assert row["mismatch/k3"] < 1e-3
        assert row["replay/native_rows"] == 0
    assert "eval/greedy" in expected[2]
    shutil.copytree(whole, part)
    shutil.rmtree(part / "checkpoints" / "step_00002")  # as if stopped after the first step
    assert main(["train", "--resume", str(part), f"task.kind={task}"]) == 0
    assert list(map(timeless, rows(part))) == expected
    sys.modules.pop("doubling_v1", None)
