"""Short checks of an engine, which servers in miniature answer many times."""

import pytest

from onepolicy.rollout.servers import start_up
from onepolicy.sync import canary


@pytest.fixture(autouse=True)
def short_checks(monkeypatch):
    monkeypatch.setattr(start_up, "NUM_PROMPTS", 2)
    monkeypatch.setattr(canary, "CANARY_PROMPTS", 3)
