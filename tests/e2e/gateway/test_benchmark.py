"""The benchmark of the gateway's overhead plays what it says."""

import asyncio
import importlib.util
from multiprocessing.pool import ThreadPool

import pytest

pytest.importorskip("uvicorn", reason="make test-gateway installs it")
from support.paths import ROOT

pytestmark = pytest.mark.gateway


def test_the_benchmark_of_a_turns_overhead():
    spec = importlib.util.spec_from_file_location("bench", ROOT / "benchmarks" / "gateway.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    with ThreadPool(1) as pool:
        found = asyncio.run(benchmark.measure(3, 2, 0.01, pool))
    assert len(found) == 3 * 2
    assert found == sorted(found)
    assert found[0] > 0
