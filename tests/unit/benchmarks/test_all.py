"""What benchmarks/all.py reads from outputs, what moved, and which tables it has."""

import json
from dataclasses import replace

import all as measurements
import doc_tables
import pytest

from support.paths import ROOT

COMMANDS = {command.run: command for command in measurements.commands()}
LEFT_OUT = measurements.left_out()
OUTPUTS = {
    "python benchmarks/replay.py --models 8 32 128 --pairs 61": """\
8 experts, 1.3M, 27 ms, 1.001 [0.995, 1.020], 1.003 [0.999, 1.011], 64 = 8 x 4, 0 B
32 experts, 3.6M, 40 ms, 1.004 [0.981, 1.033], 1.031 [1.010, 1.042], 64 = 8 x 4, 0 B
128 experts, 13.0M, 88 ms, 0.997 [0.965, 1.020], 0.994 [0.971, 1.016], 64 = 8 x 4, 0 B
""",
    "python benchmarks/correct.py": """\
1000000 slots, 512 sequences, cpu, 1 threads; softmax 0.644 s

| preset | seconds | / softmax | memory [T float32] |
| --- | --- | --- | --- |
| cispo-rollout | 0.054 | 0.08 | 1.0 |
| m2po | 0.151 | 0.29 | 5.9 |
""",
    "python benchmarks/on_policy.py --steps 21": """\
     float32, 26+75: CPU seconds, median of 5 steps     
┏━━━━━━━━━━━━┳━━━━━━━━━┳━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━┓
┃            ┃    fast ┃ on-policy ┃  on-policy / fast ┃
┡━━━━━━━━━━━━╇━━━━━━━━━╇━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━┩
│    rollout │   0.820 │     0.912 │ 1.13 [1.11, 1.21] │
│     update │   0.659 │     0.733 │ 1.12 [1.01, 1.16] │
│       step │   1.492 │     1.652 │ 1.13 [1.06, 1.19] │
│ largest k3 │ 6.3e-14 │   0.0e+00 │                   │
└────────────┴─────────┴───────────┴───────────────────┘
    bfloat16, 26+75: CPU seconds, median of 5 steps     
┏━━━━━━━━━━━━┳━━━━━━━━━┳━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━┓
┃            ┃    fast ┃ on-policy ┃  on-policy / fast ┃
┡━━━━━━━━━━━━╇━━━━━━━━━╇━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━┩
│    rollout │   0.895 │     0.965 │ 1.08 [1.08, 1.10] │
│     update │   0.800 │     0.785 │ 0.95 [0.90, 1.00] │
│       step │   1.688 │     1.754 │ 1.02 [1.00, 1.04] │
│ largest k3 │ 6.4e-06 │   0.0e+00 │                   │
└────────────┴─────────┴───────────┴───────────────────┘
""",
}
MEASURED = {
    "python benchmarks/replay.py --models 8 32 128 --pairs 61": [
        *(1.003, 0.999, 1.011, 1.031, 1.010, 1.042, 0.994, 0.971, 1.016),
    ],
    "python benchmarks/correct.py": [0.08, 0.29],
    "python benchmarks/on_policy.py --steps 21": [
        *(1.13, 1.08, 1.12, 0.95, 1.13, 1.02),
    ],
}


@pytest.mark.parametrize("run", OUTPUTS)
def test_a_recorded_output_has_every_number(run):
    found = list(measurements.cells(COMMANDS[run], OUTPUTS[run]))
    assert [cell.measured for cell in found] == MEASURED[run]


def test_a_number_moves_out_of_its_interval():
    run = "python benchmarks/replay.py --models 8 32 128 --pairs 61"
    found = {cell.name: cell for cell in measurements.cells(COMMANDS[run], OUTPUTS[run])}
    cell = found["costs/replay: 32 experts: ratio"]
    row = next(
        row for row in doc_tables.tables("costs")["replay"]["rows"] if row[0] == "32 experts"
    )
    assert [cell.documented, cell.low, cell.high] == [float(each) for each in row[1:4]]
    for measured, moved in ((cell.low, False), (cell.high, False), (cell.high + 0.001, True)):
        assert replace(cell, measured=measured).moved == moved


def test_a_number_without_an_interval_moves_by_a_tenth():
    cell = measurements.Cell("costs/a: b: c", 2.0, None, None, 2.19)
    assert not cell.moved
    assert measurements.Cell("costs/a: b: c", 2.0, None, None, 1.79).moved


def test_a_number_that_is_not_printed_has_moved():
    (run,) = [run for run in COMMANDS if run.endswith("correct.py")]
    found = list(measurements.cells(COMMANDS[run], "an output of another form"))
    assert [cell.measured for cell in found] == [None, None]
    assert all(cell.moved for cell in found)


@pytest.mark.parametrize("run", COMMANDS)
def test_every_row_and_column_is_one_of_the_docs(run):
    command = COMMANDS[run]
    for cell in measurements.cells(command, ""):
        assert cell.documented is not None, cell.name
    for key, expression in command.cells.items():
        names = key.rsplit(": ", 1)[1].split(" | ")
        assert measurements.re.compile(expression).groups == len(names), key
    assert (ROOT / run.split()[1]).is_file()


def test_every_table_with_a_command_is_measured_or_left_out_with_a_reason():
    measured = {table for command in COMMANDS.values() for table in command.tables}
    with_command = {
        f"{name}/{at}"
        for name in doc_tables.sets()
        for at, table in doc_tables.tables(name).items()
        if table.get("commands") or any(c["name"] == "command" for c in table["columns"])
    }
    known = {table for table in with_command if {table, table.split("/")[0]} & LEFT_OUT.keys()}
    assert with_command == measured | known
    assert not measured & known
    assert all(LEFT_OUT.values())
    assert {*LEFT_OUT} <= {*with_command, *(table.split("/")[0] for table in with_command)}


def test_a_command_of_this_commit_is_not_run_again(tmp_path, monkeypatch, capsys):
    out, ran = tmp_path / "out.jsonl", []

    def measure(command, here):
        ran.append(command.run)
        status = len(ran) == 1  # the first one fails
        return {"command": command.run, **here, "status": status, "stderr": "", "stdout": ""}

    monkeypatch.setattr(measurements, "measure", measure)
    monkeypatch.setattr(measurements, "state", lambda: {"commit": "c", "machine": "m"})
    monkeypatch.setattr("sys.argv", ["all.py", "--only", "costs/audit", "--out", str(out)])
    for _ in range(3):
        measurements.main()
    first, second = [run for run in COMMANDS if "audit.py" in run]
    assert ran == [first, second, first]
    assert "exit status" in capsys.readouterr().out
    monkeypatch.setattr(measurements, "state", lambda: {"commit": "d", "machine": "m"})
    measurements.main()
    assert ran[3:] == [first, second]
    monkeypatch.setattr(measurements, "state", lambda: {"commit": "d, changed", "machine": "m"})
    for _ in range(2):
        measurements.main()
    assert ran[5:] == 2 * [first, second]


def test_a_command_that_failed_is_named_and_compares_nothing(tmp_path):
    out = tmp_path / "out.jsonl"
    both = [command for command in COMMANDS.values() if "audit.py" in command.run]
    rest = {"commit": "c", "machine": "m", "stdout": ""}
    lines = [{"command": command.run, **rest, "status": 0} for command in both]
    out.write_text("\n".join(map(measurements.json.dumps, lines)))
    whole = measurements.report(both, out)
    lines.append(lines[1] | {"status": 1})
    out.write_text("\n".join(map(measurements.json.dumps, lines)))
    found = measurements.report(both, out)
    assert whole.caption is None
    assert found.caption == f"failed: {both[1].run}"
    assert 0 < found.row_count < whole.row_count


def test_a_command_without_its_venv_says_how_it_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(measurements, "ROOT", tmp_path)
    monkeypatch.setattr(measurements, "state", lambda: {"commit": "c", "machine": "m"})
    monkeypatch.setattr("sys.argv", ["all.py", "--only", "results/step"])
    with pytest.raises(SystemExit, match=r"make \.venv-trl/\.ready"):
        measurements.main()


def test_a_renewed_number_takes_the_place_of_the_old_one_with_its_digits():
    """Of two tables of a file, and of two rows, one cell changes."""
    table = """[
{
  "id": "first",
  "columns": [{"name": "model"}, {"name": "ratio"}],
  "rows": [
    ["a, b] c", 1.25]
  ]
},
{
  "id": "second",
  "rows": [
    ["x", 1.25, 64, "`run`"],
    ["a, b] c", 64, 0.120, null],
    ["a, b] c", 128, 7, null]
  ]
}
]
"""
    after = measurements.with_cell(table, "set/second", ["a, b] c", "64"], 2, 0.9996)
    assert after == table.replace("0.120", "1.000")
    after = measurements.with_cell(table, "set/second", ["a, b] c", "128"], 2, 8.4)
    assert after == table.replace("128, 7,", "128, 8,")
    for other in (["a, b] c", "256"], ["x"]):
        with pytest.raises(KeyError, match="no row"):
            measurements.with_cell(table, "set/first", other, 1, 8.4)


@pytest.mark.parametrize(
    ("before", "measured", "after"),
    [
        ("0.120", 0.9996, "1.000"),
        ("64", 70.4, "70"),
        ("1.5e-4", 0.000262, "2.6e-4"),
        ("2e-7", 3.2e-11, "3e-11"),
        ("null", 0.25, "0.25"),
        ('{"table": "a/b"}', 0.25, '{"table": "a/b"}'),
    ],
)
def test_a_number_keeps_its_form(before, measured, after):
    assert measurements.rounded(measured, before) == after


def test_what_was_measured_is_written_into_the_data(tmp_path, monkeypatch):
    run = "python benchmarks/correct.py"
    data = (ROOT / "docs" / "data" / "costs.json").read_text(encoding="utf-8")
    (tmp_path / "costs.json").write_text(data, encoding="utf-8")
    line = {"command": run, "status": 0, "stdout": OUTPUTS[run].replace("0.29 |", "0.91 |")}
    (tmp_path / "out.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    monkeypatch.setattr(doc_tables, "DATA", tmp_path)
    assert measurements.renew([COMMANDS[run]], tmp_path / "out.jsonl") == 2
    written = (tmp_path / "costs.json").read_text(encoding="utf-8")
    assert '["m2po, which sorts", 0.91]' in written
    changed = zip(data.splitlines(), written.splitlines(), strict=True)
    assert sum(old != new for old, new in changed) == 2
