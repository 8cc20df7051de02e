"""Short start-up checks and waits: servers in miniature are asked and retried many times."""

import pytest

from onepolicy.rollout.remote import client as http
from onepolicy.rollout.remote import start_up


@pytest.fixture(autouse=True)
def in_haste(monkeypatch):
    monkeypatch.setattr(start_up, "NUM_PROMPTS", 2)
    monkeypatch.setattr(http, "FIRST_WAIT", 0.001)
