"""Tests that train with TRL; they run in .venv-trl (`make test-trl`). Elsewhere there is nothing to
collect, and a run of these tests alone fails for it."""

from importlib.util import find_spec

collect_ignore_glob = []
if find_spec("trl") is None:
    collect_ignore_glob = ["test_*.py"]
