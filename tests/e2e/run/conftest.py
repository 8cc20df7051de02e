"""The policies of the recipes with tools, warmed up once a session, a minute or two each."""

import pytest

from onepolicy.cli import main

SETTINGS = ["layers=4", "tokens_per_step=2048", "task.kind=react", 'task.instructions=""']
SETTINGS += ["task.problems.kind=gym"]
SETTINGS += [f"task.problems.params.{end}_digits=2" for end in ("min", "max")]
PRODUCTS = [*SETTINGS, "max_len=256", "steps=400", "mistakes=0.5", "mistakes_from=0.6"]
PRODUCTS += ["task.max_turns=3", 'task.tools=[{kind="calculator"}]']
PRODUCTS += ["task.problems.name=products"]
SUMS = [*SETTINGS, "max_len=384", "steps=600", "mistakes=0.2", "mistakes_from=0.75"]
SUMS += ["task.max_turns=8", 'task.tools=[{kind="calculator",operations=1}]']
SUMS += ["task.problems.name=chain_sum"]
SUMS += ["task.problems.params.min_terms=2", "task.problems.params.max_terms=5"]


@pytest.fixture(scope="session")
def products_policy(tmp_path_factory):
    """Make the policy as `make train-agent` does."""
    return made(tmp_path_factory.mktemp("policies") / "products", PRODUCTS)


@pytest.fixture(scope="session")
def sums_policy(tmp_path_factory):
    """Make the policy as recipes/agent_sums.toml describes."""
    return made(tmp_path_factory.mktemp("policies") / "sums", SUMS)


def made(folder, settings):
    assert main(["make-policy", "--out", str(folder), *settings]) == 0
    return folder
