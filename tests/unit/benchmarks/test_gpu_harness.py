"""The harness of the benchmarks for a GPU: rounds, time limits, errors and files of results."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from gpu import harness, ready, run, tests
from gpu.harness import ROUNDS, WARM_UPS, Bench

from support.paths import ROOT

OUTPUT_OF = harness.output_of


@pytest.fixture(autouse=True)
def _without_git_and_garbage_collection(monkeypatch):
    monkeypatch.setattr(harness, "output_of", lambda *_: "")
    monkeypatch.setattr(harness, "gc", SimpleNamespace(collect=lambda: None))


def bench_of(tmp_path, **settings):
    return Bench("name", torch.device("cpu"), tmp_path, **{"tiny": False, **settings})


def read(tmp_path):
    return json.loads((tmp_path / "name.json").read_text())


def test_a_call_is_timed_five_times_after_two_warm_ups(tmp_path):
    calls = []
    found = bench_of(tmp_path).measure(lambda: calls.append(1))
    assert len(found.seconds) == ROUNDS == 5
    assert len(calls) == ROUNDS + WARM_UPS
    assert found.median == sorted(found.seconds)[2]
    assert bench_of(tmp_path, tiny=True).measure(lambda: calls.append(1)).seconds
    assert len(calls) == ROUNDS + WARM_UPS + 2


def test_a_slow_call_ends_after_its_share(tmp_path):
    calls = []
    found = bench_of(tmp_path).measure(lambda: calls.append(1), share=0.0, warm_ups=0)
    assert len(found.seconds) == len(calls) == 1


def test_calls_are_compared_in_turn(tmp_path):
    calls = []
    runs = {name: lambda name=name: calls.append(name) for name in "ab"}
    found = bench_of(tmp_path).compare(runs)
    assert calls == ["a", "b"] * (WARM_UPS + ROUNDS)
    assert [len(found[name].seconds) for name in "ab"] == [ROUNDS, ROUNDS]


def test_results_are_written_as_they_come(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(harness, "output_of", OUTPUT_OF)
    bench = bench_of(tmp_path, given_commit="abc")
    assert read(tmp_path)["results"] == []
    bench.record("case", seconds=[0.5, 0.25], ratio=1.23456)
    content = read(tmp_path)
    assert content["results"] == [{"case": "case", "seconds": [0.5, 0.25], "ratio": 1.23456}]
    assert re.fullmatch(r"[0-9a-f]{40}\+?", content["commit"])
    assert {"clocks_before", "clocks_after", "utc", "machine", "command"} <= content.keys()
    assert content["machine"]["torch"] == torch.__version__
    assert capsys.readouterr().out == "name: case: seconds [0.5, 0.25]  ratio 1.235\n"


def test_a_copy_without_git_names_the_given_commit():
    assert harness.commit("abc") == "abc"
    assert harness.commit() == "unknown"


def test_a_case_that_fails_is_a_result_and_the_next_one_runs(tmp_path):
    bench = bench_of(tmp_path)
    with bench.case("first"):
        raise RuntimeError("out of memory\nmore")
    with bench.case("second"):
        bench.record("second", value=1)
    first, second = read(tmp_path)["results"]
    assert first == {"case": "first", "error": "RuntimeError: out of memory"}
    assert second["value"] == 1
    with pytest.raises(RuntimeError), bench_of(tmp_path, tiny=True).case("first"):
        raise RuntimeError


def test_no_case_begins_that_may_not_end_in_time(tmp_path):
    bench = bench_of(tmp_path, limit=30.0)
    assert bench.has_time("short", 10)
    assert not bench.has_time("long", 40)
    assert "it may take 40 s" in read(tmp_path)["results"][0]["skipped"]


def test_three_parts_are_of_at_most_nine_minutes():
    seconds = [sum(run.LIMITS[name] for name in part) for part in run.PARTS.values()]
    assert max(seconds) <= 9 * 60
    assert sorted(name for part in run.PARTS.values() for name in part) == sorted(run.LIMITS)


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(ready, "find_spec", {name: name for name in ready.NEEDED.values()}.get)
    assert ready.problems() == []
    monkeypatch.setattr(ready, "find_spec", {"torch": "torch"}.get)
    first, second = ready.problems()
    assert first.startswith("missing here: transformers, pydantic, ")
    assert "make gpu-wheels" in second


def test_every_test_of_a_gpu_is_among_the_files():
    marked = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests" / "integration").rglob("test_*.py")
        if re.search(r"^@pytest.mark.gpu|^pytestmark = CUDA|marks=CUDA", path.read_text(), re.M)
    }
    assert {file for file in marked if not file.startswith(tests.FILES)} == set()
    assert len(marked) >= len(tests.FILES)
    assert all((ROOT / file).exists() for file in tests.FILES)
