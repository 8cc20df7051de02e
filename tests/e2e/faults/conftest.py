"""One small warmed-up policy and a recipe of a few fast steps for every run with a fault."""

import os

import pytest

from onepolicy.cli import main
from support.faulty_runs import FAR, FAR_LINK, LINK, NEAR, SPACE, ip, rows
from support.small_recipe import write_recipe

POLICY = ["hidden_size=64", "layers=3", "experts=16", "top_k=4", "max_len=128"]
POLICY += ["steps=120", "tokens_per_step=512", "warmup_steps=10", "lr=4e-3", "task.kind=chain"]
POLICY += ["task.ops=2"]


@pytest.fixture(scope="session")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policies") / "small"
    assert main(["make-policy", "--out", str(folder), *POLICY]) == 0
    return folder


@pytest.fixture(scope="session")
def recipe(policy):
    return write_recipe(
        policy,
        "steps = 6",
        'train = { threads = 1, device = "cpu" }',
        "eval = { every = 0 }",
        "log = { counterfactual_every = 0, tensorboard = false, report = false }",
    )


@pytest.fixture(scope="session")
def whole(recipe, tmp_path_factory):
    """Run the recipe without a fault."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert main(["train", str(recipe), f"out={out}"]) == 0
    # a step that is lost or made twice shows in the weights
    assert all(row["train/grad_norm"] > 0 for row in rows(out))
    return out


@pytest.fixture(scope="session")
def whole_on_ranks(recipe, tmp_path_factory):
    """Run the recipe without a fault on two ranks."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert main(["train", str(recipe), f"out={out}", "train.ranks=2"]) == 0
    return out


@pytest.fixture(scope="session")
def network():
    """Yield whether there is a network namespace at the other end of a veth. Making one needs root
    and iproute2."""
    made = ip("netns", "add", SPACE, check=False) if os.geteuid() == 0 else None
    if made is None or made.returncode:
        yield False
        return
    try:
        ip("link", "add", LINK, "type", "veth", "peer", "name", FAR_LINK, "netns", SPACE)
        ip("addr", "add", f"{NEAR}/30", "dev", LINK)
        ip("link", "set", LINK, "up")
        ip("-n", SPACE, "addr", "add", f"{FAR}/30", "dev", FAR_LINK)
        for link in (FAR_LINK, "lo"):
            ip("-n", SPACE, "link", "set", link, "up")
        yield True
    finally:
        ip("netns", "del", SPACE)
