"""A run on a gymnasium environment is like any other: resumed to the bit and evaluated."""

import json
import shutil

import pytest
import torch

from onepolicy.cli import main
from onepolicy.config import GymnasiumTask
from onepolicy.config.policy import PolicyConfig
from onepolicy.envs.warmup.examples import task_alphabet, warmup_examples
from onepolicy.tiny.model import make_model, make_tokenizer, save_policy, warm_up
from support.metrics import rows, timeless

LAKE = GymnasiumTask(
    id="FrozenLake-v1", params={"is_slippery": False}, returns=(0, 1), max_turns=6, instructions=""
)
SMALL = PolicyConfig(
    task=LAKE,
    hidden_size=64,
    layers=2,
    experts=8,
    top_k=2,
    max_len=512,
    steps=60,
    tokens_per_step=512,
    warmup_steps=5,
    lr=6e-3,
    mistakes=0.5,
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Write a recipe of a few steps on a policy that has seen some walks."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("lake")
    tokenizer = make_tokenizer(task_alphabet(LAKE))
    model = make_model(SMALL, len(tokenizer))
    warm_up(
        model, tokenizer, lambda mistakes: warmup_examples(LAKE, mistakes=mistakes, seed=0), SMALL
    )
    save_policy(model, tokenizer, SMALL, folder / "policy")
    path = folder / "recipe.toml"
    path.write_text(
        f"""
        out = "set by the test"
        steps = 2
        model = {{ path = "{folder / "policy"}" }}
        [task]
        kind = "gymnasium"
        id = "FrozenLake-v1"
        params = {{ is_slippery = false }}
        returns = [0, 1]
        max_turns = 6
        instructions = ""
        [rollout]
        prompts_per_step = 2
        group_size = 4
        sampling = {{ max_tokens = 24 }}
        engine = {{ max_num_seqs = 8 }}
        [eval]
        every = 2
        problems = 2
        k = 2
        [train]
        threads = 1
        [log]
        counterfactual_every = 1
        tensorboard = false
        report = false
        [checkpoint]
        every = 1
        """
    )
    return path


@pytest.mark.full
def test_a_run_on_a_lake(recipe, tmp_path, capsys):
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert main(["train", str(recipe), f"out={whole}"]) == 0
    found = rows(whole)
    assert all(row["tools/act"] > 1 and row["train/turns"] > 1 for row in found[1:])
    shutil.copytree(whole, part)
    shutil.rmtree(
        part / "checkpoints" / "step_00002"
    )  # as if it had been stopped after the first step
    assert main(["train", "--resume", str(part)]) == 0
    assert list(map(timeless, rows(part))) == list(map(timeless, found))
    assert (whole / "samples.jsonl").read_text() == (part / "samples.jsonl").read_text()
    samples = [json.loads(line) for line in (whole / "samples.jsonl").read_text().splitlines()]
    assert samples[0]["prompt"] == "row 0, column 0\n"
    capsys.readouterr()
    assert main(["eval", str(whole)]) == 0
    assert f"{found[-1]['eval/avg@2']:.3f}"[:4] in capsys.readouterr().out
