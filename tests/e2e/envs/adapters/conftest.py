"""Tests with the packages whose environments they play; they run in .venv-envs (`make
test-envs`)."""

from importlib.util import find_spec

import pytest


@pytest.fixture(scope="session", autouse=True)
def _packages():
    missing = [name for name in ("textarena", "verifiers") if find_spec(name) is None]
    assert not missing, (
        f"{', '.join(missing)} not installed: `make test-envs` runs these tests where they are"
    )
