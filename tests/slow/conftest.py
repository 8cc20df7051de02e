"""The policies of the recipes with tools, warmed up once a session, a minute or two each."""

import pytest

from onepolicy.cli import main

SETTINGS = ["layers=4", "max_len=256", "tokens_per_step=2048", "task.kind=react", 'task.instructions=""']
PRODUCTS = [*SETTINGS, "steps=400", "mistakes=0.5", "mistakes_from=0.6", "task.max_turns=3"]
PRODUCTS += ['task.tools=[{kind="calculator"}]', "task.problems.kind=gym", "task.problems.name=products"]
PRODUCTS += [f"task.problems.params.{end}_digits=2" for end in ("min", "max")]


@pytest.fixture(scope="session")
def products_policy(tmp_path_factory):
    """As `make train-agent` makes it."""
    folder = tmp_path_factory.mktemp("policies") / "products"
    assert main(["make-policy", "--out", str(folder), *PRODUCTS]) == 0
    return folder
