"""Tests on Megatron-core's own models; they run in .venv-megatron (`make test-megatron`). Elsewhere
there is nothing to collect, and a run of these tests alone fails for it."""

from importlib.util import find_spec

import pytest

collect_ignore_glob = []
if find_spec("megatron") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def one_process(tmp_path_factory):
    """A process group of one rank, which Megatron's modules look up."""
    from support.megatron.cpu import start, stop

    start(str(tmp_path_factory.mktemp("group")))
    yield
    stop()
