"""Tests beside the real verl; they run in .venv-verl (`make test-verl`)."""

import os
from importlib.util import find_spec

import pytest
import torch.distributed as dist


@pytest.fixture(scope="session", autouse=True)
def _beside_verl():
    assert find_spec("verl"), "verl is not installed: `make test-verl` runs these tests"
    # Read by verl when it chooses an engine, and by onepolicy when verl's engines are imported
    os.environ["VERL_ENGINE_VENDOR"] = "onepolicy"
    yield
    if dist.is_initialized():  # else gloo aborts the process now and then as it ends
        dist.destroy_process_group()
