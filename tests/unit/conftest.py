"""A vLLM server in miniature, with checkpoints to serve (fake_vllm.py)."""

import pytest


@pytest.fixture
def no_waiting(monkeypatch):
    """Retries come at once."""
    from onepolicy.rollout.servers import http

    monkeypatch.setattr(http, "FIRST_WAIT", 0.001)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two models of one config, [(folder, model)]."""
    from fake_vllm import make_checkpoints

    return make_checkpoints(tmp_path_factory.mktemp("fake"))


@pytest.fixture
def fake(checkpoints):
    """Serves the first of them."""
    from fake_vllm import serving

    with serving(checkpoints) as fake:
        yield fake
