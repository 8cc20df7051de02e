"""Fixtures: one small warmed-up policy for every test that trains. A conftest imports them.

The policy is in the tree, where `PYTHONPATH=tests python -m support.small_policy` writes it.
"""

import itertools
import shutil
from pathlib import Path

import pytest

from onepolicy.cli import main
from onepolicy.config.policy import PolicyConfig
from support.small_recipe import write_recipe

SMALL = PolicyConfig(
    **{"hidden_size": 64, "layers": 3, "experts": 16, "top_k": 4, "max_len": 128, "steps": 120},
    **{"tokens_per_step": 512, "warmup_steps": 10, "lr": 4e-3},
)
FOLDER = Path(__file__).parent / "policies" / "small"


@pytest.fixture(scope="session")
def policy(tmp_path_factory):
    """Return the folder of a 3-layer MoE with its tokenizer, warmed up just enough to write
    responses."""
    return shutil.copytree(FOLDER, tmp_path_factory.mktemp("policies") / "small")


def make_small_policy(path, config=SMALL):
    import torch  # pytest-xdist's first process loads this file and runs no test

    from onepolicy.envs.warmup.examples import task_alphabet, warmup_examples
    from onepolicy.tiny.model import make_model, make_tokenizer, save_policy, warm_up

    torch.set_num_threads(1)
    tokenizer = make_tokenizer(task_alphabet(config.task))
    model = make_model(config, len(tokenizer))
    examples = lambda mistakes: warmup_examples(config.task, mistakes=0.0, seed=0)  # noqa: E731
    warm_up(model, tokenizer, examples, config)
    save_policy(model, tokenizer, config, path)
    return path


@pytest.fixture(scope="session")
def recipe(policy, tmp_path_factory):
    """Write a recipe of a few fast steps on that policy."""
    return write_recipe(
        policy,
        "steps = 4",
        "train = { threads = 1 }",
        "eval = { every = 2, problems = 4, k = 2 }",
        "log = { counterfactual_every = 2, tensorboard = false, report = false }",
        folder=tmp_path_factory.mktemp("recipe"),
    )


@pytest.fixture
def train(recipe, tmp_path):
    """Return train("name", "a.b=c", ...) -> run folder, which fails the test if the command
    fails."""
    numbers = itertools.count()

    def run(name=None, *overrides):
        out = tmp_path / (name or f"run{next(numbers)}")
        assert main(["train", str(recipe), f"out={out}", *overrides]) == 0
        return out

    return run


if __name__ == "__main__":
    make_small_policy(FOLDER)
