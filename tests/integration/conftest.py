"""A small warmed-up policy, and a vLLM server in miniature (support/fake_vllm.py) with checkpoints
to serve."""

import pytest

from onepolicy.sync import canary
from support.small_policy import policy, recipe, train  # noqa: F401


@pytest.fixture(autouse=True)
def short_canary(monkeypatch):
    """Let the checks around a push ask for 4 prompts in place of 16."""
    monkeypatch.setattr(canary, "CANARY_PROMPTS", 4)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Make two models of one config: [(folder, model)]."""
    from support.fake_vllm import make_checkpoints

    return make_checkpoints(tmp_path_factory.mktemp("fake"))


@pytest.fixture
def fake(checkpoints):
    """Serve the first of the two models."""
    from support.fake_vllm import serving

    with serving(checkpoints) as fake:
        yield fake
