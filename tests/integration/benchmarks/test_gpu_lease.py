"""A queue of cases in processes: one that raises, hangs, is out of memory or killed ends alone."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from gpu.harness import Bench
from gpu.lease import Case, Results, run_queue

from support.waiting import patience, wait_until

pytestmark = pytest.mark.process


def raises(bench):
    bench.record("before", value=1)
    raise ValueError("no such shape")


def hangs(bench):
    bench.record("before", value=2)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def fills_the_gpu(bench):
    with bench.case("large"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    bench.record("after", value=3)


def is_killed(bench):
    os.kill(os.getpid(), signal.SIGKILL)


def works(bench):
    bench.record("works")


def queue(tmp_path, *cases, seconds=600.0, jobs=1):
    results = Results(tmp_path)

    def bench_of(case, limit):
        return Bench(case.name, torch.device("cpu"), results, tiny=True, limit=limit)

    ended = run_queue(cases, results, bench_of, seconds=seconds, jobs=jobs)
    return ended, results.rows()


def test_the_queue_goes_on_after_every_kind_of_failure(tmp_path, capfd):
    cases = [Case(run.__name__, run, 60) for run in (raises, fills_the_gpu, is_killed, works)]
    cases.insert(1, Case("hangs", hangs, limit := patience(2.0)))
    ended, rows = queue(tmp_path, *cases)
    assert ended == {
        "raises": "failed",
        "hangs": f"ended after its {limit:.0f} s",
        "fills_the_gpu": "done, with errors",
        "is_killed": "killed by SIGKILL (host memory?)",
        "works": "done",
    }
    found = {(row["case"], row["name"]): row for row in rows if "name" in row}
    assert "ValueError: no such shape" in found["raises", "error"]["error"]
    assert found["raises", "before"]["value"] == 1
    assert found["hangs", "before"]["value"] == 2
    assert "OutOfMemoryError" in found["fills_the_gpu", "large"]["error"]
    assert found["fills_the_gpu", "after"]["value"] == 3
    assert Results(tmp_path).done(tiny=True) == {"works"}
    assert "--- hangs: ended after its" in capfd.readouterr().out


def test_a_case_gets_what_is_left_and_none_begins_after_that(tmp_path):
    cases = [Case("hangs", hangs, 90), Case("late", works, 90)]
    ended, rows = queue(tmp_path, *cases, seconds=1.0)
    assert ended == {"hangs": "ended after its 1 s", "late": "not reached"}
    assert not [row for row in rows if row["case"] == "late"]


def test_what_found_no_time_is_not_done(tmp_path):
    def in_part(bench):
        bench.tiny = False
        assert not bench.has_time("the rest", 10**6)

    ended, _ = queue(tmp_path, Case("case", in_part, 60))
    assert ended == {"case": "done in part, for lack of time"}
    assert Results(tmp_path).done(tiny=True) == set()


def test_toy_shapes_are_not_done_at_real_ones(tmp_path):
    results = Results(tmp_path)
    results.add(lease="2026-11-27", tiny=True)
    results.add(case="works", ended="done")
    assert (results.done(tiny=True), results.done(tiny=False)) == ({"works"}, set())


def test_what_a_case_has_started_ends_with_it(tmp_path):
    def starts(bench):
        bench.record("started", pid=subprocess.Popen(["sleep", "600"]).pid)

    ended, rows = queue(tmp_path, Case("starts", starts, 60))
    assert ended == {"starts": "done"}
    wait_until(lambda: not cmdline(rows[0]["pid"]))


def cmdline(pid):
    """Return the command of a process, b"" of one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_row_after_a_line_that_was_cut_off_is_kept(tmp_path):
    queue(tmp_path / "old", Case("works", works, 60))
    with (tmp_path / "old" / "results.jsonl").open("a") as file:
        file.write('{"case": "lo')
    results = Results(tmp_path / "new")
    results.take_over(tmp_path / "old")
    results.add(case="next", ended="done")
    assert results.done(tiny=False) == {"works", "next"}


def test_side_by_side_are_only_those_that_are_not_alone(tmp_path):
    def waits_for_the_other(bench):
        (tmp_path / bench.name).touch()
        while not (tmp_path / {"a": "b", "b": "a"}[bench.name]).exists():
            time.sleep(0.01)

    def is_alone(bench):
        assert not (tmp_path / "c").exists()

    cases = [Case(name, waits_for_the_other, 60, alone=False) for name in "ab"]
    cases += [Case("alone", is_alone, 60)]
    cases += [Case("c", lambda bench: (tmp_path / "c").touch(), 60, alone=False)]
    ended, _ = queue(tmp_path, *cases, jobs=2)
    assert set(ended.values()) == {"done"}, ended


def test_results_are_not_mixed_with_those_of_another_folder(tmp_path):
    results = Results(tmp_path / "new")
    with pytest.raises(SystemExit, match=r"no results\.jsonl there"):
        results.take_over(tmp_path)
    queue(tmp_path / "old", Case("works", works, 60))
    results.take_over(tmp_path / "old")
    assert results.done(tiny=True) == {"works"}
    with pytest.raises(SystemExit, match="it has results of its own"):
        results.take_over(tmp_path / "old")
    results.take_over(tmp_path / "new")  # going on in the same folder
