"""The harness of the benchmarks for a GPU: rounds, time limits, errors and results; the pack."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch
from gpu import harness, pack, run, unpack
from gpu.cases import CASES
from gpu.harness import ROUNDS, WARM_UPS, Bench
from gpu.lease import Results

from support.paths import ROOT


@pytest.fixture(autouse=True)
def _without_garbage_collection(monkeypatch):
    monkeypatch.setattr(harness, "gc", SimpleNamespace(collect=lambda: None))


def bench_of(tmp_path, **settings):
    return Bench("case", torch.device("cpu"), Results(tmp_path), **{"tiny": False, **settings})


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


def test_results_are_written_as_they_come(tmp_path, capsys):
    bench = bench_of(tmp_path)
    bench.record("speed", seconds=[0.5, 0.25], ratio=1.23456)
    row = {"case": "case", "name": "speed", "seconds": [0.5, 0.25], "ratio": 1.23456}
    assert Results(tmp_path).rows() == [row]
    assert capsys.readouterr().out == "case: speed: seconds [0.5, 0.25]  ratio 1.235\n"


def test_a_line_that_a_lost_machine_cut_off_is_left_out(tmp_path):
    bench_of(tmp_path).record("speed", ratio=1)
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"case": "ca')
    assert [row["name"] for row in Results(tmp_path).rows()] == ["speed"]


def test_a_copy_without_git_names_the_given_commit(monkeypatch):
    assert re.fullmatch(r"[0-9a-f]{40}\+?", harness.commit("abc"))
    monkeypatch.setattr(harness, "output_of", lambda *_: "")
    assert harness.commit("abc") == "abc"
    assert harness.commit() == "unknown"


def test_an_error_is_a_result_and_what_follows_runs(tmp_path):
    bench = bench_of(tmp_path)
    with bench.case("first"):
        raise RuntimeError("out of memory\nmore")
    with bench.case("second"):
        bench.record("second", value=1)
    first, second = Results(tmp_path).rows()
    assert first == {"case": "case", "name": "first", "error": "RuntimeError: out of memory"}
    assert second["value"] == 1
    assert bench.errors == 1


def test_nothing_begins_that_may_not_end_in_time(tmp_path):
    bench = bench_of(tmp_path, limit=30.0)
    assert bench.has_time("short", 10)
    assert not bench.has_time("long", 40)
    assert "it may take 40 s" in Results(tmp_path).rows()[0]["skipped"]


def test_every_test_of_a_gpu_is_in_the_queue():
    marked = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests" / "integration").rglob("test_*.py")
        if re.search(r"^@pytest.mark.gpu|^pytestmark = CUDA|marks=CUDA", path.read_text(), re.M)
        or path.parent.name == "gpu"
    }
    assert len(marked) >= 9
    queued = {case.run.args[0] for case in CASES if hasattr(case.run, "args")}
    assert marked - queued == set()
    assert all((ROOT / file).exists() for file in queued)
    assert len({case.name for case in CASES}) == len(CASES)


def test_missing_packages_and_unknown_cases_are_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", "mo"])
    assert run.main() == 2
    assert capsys.readouterr().out.startswith("no case mo; there are smoke, room, ")
    monkeypatch.setattr(run, "find_spec", {"torch": "torch"}.get)
    assert run.main() == 1
    assert capsys.readouterr().out.startswith("missing here: transformers, pydantic, ")


@pytest.mark.parametrize(
    ("wheel", "wanted"),
    [
        ("rich-12.0-py3-none-any.whl", True),
        ("rich-11.9-py3-none-any.whl", False),
        ("rich-11.10-py3-none-any.whl", False),
        ("absent-1.0-py3-none-any.whl", True),
    ],
)
def test_a_wheel_is_taken_where_its_package_is_missing_or_older(
    wheel, wanted, monkeypatch, tmp_path
):
    def version(name):
        if name != "rich":
            raise unpack.PackageNotFoundError
        return "11.10"

    monkeypatch.setattr(unpack, "version", version)
    assert unpack.is_wanted(tmp_path / wheel) is wanted


def test_a_pack_names_what_the_image_lacks_and_the_python_it_is_for(monkeypatch, capsys):
    monkeypatch.setattr(unpack, "find_spec", {"torch": "torch"}.get)
    fake = SimpleNamespace(version_info=(3, 10), platform="linux", executable="python3")
    monkeypatch.setattr(unpack, "sys", fake)
    assert unpack.main() == 1
    out = capsys.readouterr().out
    assert "lacks numpy, which is not packed" in out
    assert "for Python 3.12 on linux, this is 3.10 on linux" in out


def test_a_pack_has_what_the_queue_reads():
    names = [name for name in pack.tracked() if pack.is_packed(name)]
    assert "benchmarks/evidence/policies/one-of-8/model.safetensors" in names
    assert not [name for name in names if "one-of-128" in name or name.startswith("docs/")]
    assert {"pyproject.toml", "src/onepolicy/__init__.py", "tests/conftest.py"} <= set(names)
