"""These tests run in .venv-envs (`make test-envs`), with the packages whose environments they play."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))  # envs_support


@pytest.fixture(scope="session", autouse=True)
def _packages():
    missing = [name for name in ("textarena", "verifiers") if find_spec(name) is None]
    assert not missing, (
        f"{', '.join(missing)} not installed: `make test-envs` runs these tests where they are"
    )
