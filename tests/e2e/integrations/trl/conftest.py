"""Tests that train with TRL; they run in .venv-trl (`make test-trl`). Elsewhere there is nothing to
collect, and a run of these tests alone fails for it."""

from importlib.util import find_spec

collect_ignore_glob = []
if find_spec("trl") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config):
    """Let TRL not import vLLM for the gate's test, which samples by a function of its own."""
    if config.getoption("--gate") and find_spec("trl") is not None:
        from trl import import_utils

        import_utils.is_vllm_available = lambda min_version=None: False
