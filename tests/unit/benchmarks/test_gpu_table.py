"""The table of what leases of a GPU answered: how a row gets its state, and the page's own."""

import pytest
from gpu import table
from gpu.table import ANSWERS, Answer, Number

SPEED = Number("case", "speed*", "gb", "{} GB/s (50)")


@pytest.mark.parametrize(
    ("rows", "state"),
    [
        ([], "not reached |  |"),
        ([{"case": "case", "name": "speed of x", "gb": 12.345}], "runs | 12.3 GB/s (50) |"),
        (
            [{"case": "case", "name": "a.py::t", "outcome": "passed"}],  # no end: a lost machine
            "runs | 1 of 1 tests pass, of a file that was lost |",
        ),
        (
            [
                {"case": "case", "name": "a.py::t", "outcome": "passed"},
                {"case": "case", "ended": "done"},
            ],
            "runs | 1 of 1 tests pass |",
        ),
        ([{"case": "case", "name": "speed", "error": "out of memory"}], "**breaks** |  |"),
        ([{"case": "case", "name": "a.py::t", "outcome": "skipped"}], "not reached |  |"),
        (
            [
                {"case": "case", "name": "a.py::t", "outcome": "passed"},
                {"case": "case", "name": "a.py::u", "outcome": "failed"},
                {"case": "case", "ended": "done, with errors"},
            ],
            "**breaks** | 1 of 2 tests pass |",
        ),
        (
            [
                {"case": "case", "name": "a.py::t", "outcome": "passed"},
                {"case": "case", "ended": "ended after its 60 s"},
            ],
            "runs | 1 of 1 tests pass, of a file that was ended after its 60 s |",
        ),
    ],
)
def test_states(rows, state):
    assert Answer("B1", "what", ("a.py",), (SPEED,)).line(rows) == f"| B1 | what | {state}"


def test_what_needs_more_says_so_beside_what_ran():
    answer = Answer("B2", "what", (), (SPEED,), needs="needs two GPUs")
    assert answer.line([]) == "| B2 | what | needs two GPUs |  |"
    found = answer.line([{"case": "case", "name": "speed", "gb": 1.0}])
    assert found == "| B2 | what | in part, needs two GPUs | 1 GB/s (50) |"


def test_the_last_run_of_a_case_counts():
    """What an earlier run had and the last one did not reach is not shown."""
    rows = [
        {"lease": "2026-11-27 15:00:00"},
        {"case": "a", "name": "old", "gb": 1},
        {"case": "b", "name": "kept", "gb": 2},
        {"case": "a", "ended": "done"},
        {"case": "b", "ended": "done"},
        {"case": "a", "name": "new", "gb": 3},
        {"case": "a", "ended": "ended after its 5 s"},
    ]
    names = [row["name"] for row in table.last_runs(rows) if "name" in row]
    assert sorted(names) == ["kept", "new"]


def test_a_rehearsal_is_in_no_row():
    """Toy shapes count neither before nor after a lease of real ones, nor does their lease."""
    machine = {"device": "a card, 1 MiB, driver", "torch": "2", "transformers": "5", "python": "3"}
    lease = {"lease": "2026-11-27 15:00:00", "commit": "abc", "tiny": False, "machine": machine}
    toy = [lease | {"tiny": True}, {"case": "sync", "name": "cast", "gb_per_second": 1.0}]
    toy.append({"case": "sync", "ended": "done"})
    real = [lease, {"case": "sync", "name": "cast", "gb_per_second": 2.0}]
    found = table.table([*toy, *real, *toy])
    assert "| runs | 2 GB/s |" in found
    assert found.startswith("1 lease of one a card")
    assert table.table(toy) == "No lease of real shapes yet.\n"


def test_the_page_has_the_table_of_the_results():
    page = table.PAGE.read_text(encoding="utf-8")
    rows = table.parsed(table.RESULTS)
    assert table.written(page, rows) == page, "run python benchmarks/gpu/table.py"
    with pytest.raises(AssertionError, match="no place for the table"):
        table.written("a page", rows)


def test_every_row_of_the_reference_is_there():
    rows = [answer.row for answer in ANSWERS]
    assert [f"B{i}" for i in range(1, 14)] == [row for row in rows if row[0] == "B"]
    assert [f"P{i}" for i in range(1, 13)] == [row for row in rows if row[0] == "P"]
