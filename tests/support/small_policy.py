"""Fixtures: one small warmed-up policy for every test that trains. A conftest imports them."""

import fcntl
import itertools
import os

import pytest
import torch

from onepolicy.cli import main
from onepolicy.config.policy import PolicyConfig
from support.small_recipe import write_recipe

SMALL = PolicyConfig(
    **{"hidden_size": 64, "layers": 3, "experts": 16, "top_k": 4, "max_len": 128, "steps": 120},
    **{"tokens_per_step": 512, "warmup_steps": 10, "lr": 4e-3},
)


@pytest.fixture(scope="session")
def policy(tmp_path_factory):
    """Return the folder of a 3-layer MoE with its tokenizer, warmed up just enough to write
    responses. The first worker of pytest-xdist makes it for all."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with (folder / "small.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "small").exists():
            make_small_policy(folder / "making", SMALL).rename(folder / "small")
    return folder / "small"


def make_small_policy(path, config):
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
