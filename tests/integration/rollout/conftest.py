"""Short start-up checks of an engine, which servers in miniature answer many times."""

import pytest

from onepolicy.rollout.servers import start_up


@pytest.fixture(autouse=True)
def short_start_up(monkeypatch):
    monkeypatch.setattr(start_up, "NUM_PROMPTS", 2)
