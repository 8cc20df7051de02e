"""The quickstart on two seeds: reward rises on both, and accuracy stays. Minutes; `make
test-all`."""

import json

import pytest

from onepolicy.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module", autouse=True)
def tiny_policy(tmp_path_factory):
    """Make it in a cache of this file's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        assert main(["make-policy"]) == 0
        yield


@pytest.mark.parametrize("seed", range(2))
def test_reward_rises_and_stays(seed, tmp_path):
    out = tmp_path / "run"
    settings = [f"out={out}", f"seed={seed}", "log.report=false"]
    assert main(["train", "recipes/quickstart.toml", *settings]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["reward_last"] > summary["reward_first"] + 0.2
    assert summary["reward_last"] > 0.75
    assert summary["crash_step"] is None
    first, last = (summary[name]["value"] for name in ("eval_first", "eval_last"))
    assert last >= min(first, 0.97)  # greedy: the policy of some CPUs begins with all of 128
