"""What README and docs print is run: commands that take seconds, the README's code, the names of
ours in every example."""

import ast
import contextlib
import importlib
import importlib.util
import inspect
import json
import math
import re

import pytest
import torch
from pyarrow import parquet

import onepolicy as op
from onepolicy.cli import main
from onepolicy.integrations.trl import attach
from support.doc_commands import PAGES, Command, blocks, commands
from support.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
CHEAP = [
    "onepolicy config recipes/quickstart.toml",
    "onepolicy config preset icepop",
    "onepolicy config objective gspo",
    pytest.param("onepolicy audit --conformance conformance", marks=pytest.mark.full),
]


@pytest.mark.parametrize("line", CHEAP)
def test_it_runs_as_it_is_printed(line, monkeypatch, capsys):
    assert tuple(line.split()) in {command.words for command in commands()}
    monkeypatch.chdir(ROOT)
    with contextlib.suppress(SystemExit):
        assert main(line.split()[1:]) == 0
    assert capsys.readouterr().out.strip()


def test_the_audits_of_the_readme_and_of_the_guide(tmp_path, monkeypatch, capsys):
    """On a dump with another framework's name of a column, as a newcomer has it."""
    table = parquet.read_table(ROOT / "conformance" / "temperature.parquet")
    names = [name.replace("logp_trainer", "old_log_probs") for name in table.column_names]
    parquet.write_table(table.rename_columns(names), tmp_path / "dump.parquet")
    monkeypatch.chdir(tmp_path)
    line = "onepolicy audit dump.parquet --columns logp_trainer=old_log_probs"
    assert Command("README.md", tuple(line.split())) in commands()
    assert main([*line.split()[1:], "--out", "report"]) == 0
    first, reason = capsys.readouterr().out.splitlines()[:2]
    assert first == "BUG"
    assert "temperature" in reason
    assert (tmp_path / "report" / "audit.html").is_file()


def test_the_example_of_a_dump_is_read_as_its_page_says(tmp_path, capsys):
    page = (ROOT / "docs" / "dump_schema.md").read_text(encoding="utf-8")
    lines = re.search(r"^```json\n(.*?)^```$", page, re.DOTALL | re.MULTILINE).group(1)
    rows = [json.loads(line) for line in lines.splitlines()]
    (tmp_path / "dump.jsonl").write_text(lines)
    assert main(["audit", str(tmp_path / "dump.jsonl"), "--out", str(tmp_path / "out")]) == 0
    assert "only 4 tokens, too few" in " ".join(capsys.readouterr().out.split())
    found = json.loads((tmp_path / "out" / "audit.json").read_text())["overall"]
    pairs = [
        (trainer, rollout)
        for row in rows
        for trainer, rollout, mask in zip(
            row["logp_trainer"], row["logp_rollout"], row["mask"], strict=True
        )
        if mask
    ]
    gaps = [math.exp(old - rollout) - 1 - (old - rollout) for old, rollout in pairs]
    assert found["k3"] == pytest.approx(sum(gaps) / 4, rel=1e-3)
    assert found["routers"] == 0.25  # one of the four sampled tokens


def test_the_line_for_trl():
    attached, _ = blocks(README, "python")
    call = re.search(r"op_trl\.attach\((.*?)\)", attached).group(1)
    names = re.findall(r"(\w+)=", call)
    assert names == ["replay", "dump"]
    assert set(names) <= set(inspect.signature(attach).parameters)


@pytest.mark.parametrize("preset", ["off", "tis"])
def test_the_lines_for_a_trainer_of_your_own(preset, capsys):
    """They run as they are printed, with nothing given."""
    torch.manual_seed(0)
    lines, names = blocks(README, "python")[1], {}
    assert 'op.preset("off"))  # or "tis"' in lines
    exec(compile(lines.replace('"off"', f'"{preset}"'), "README.md", "exec"), names)
    without, replayed = map(float, re.findall(r"k3 [\w ]+ ([\d.e-]+)", capsys.readouterr().out))
    assert 0 < replayed < without / 3
    gates = [p.grad for n, p in names["model"].named_parameters() if n.endswith("mlp.gate.weight")]
    assert len(gates) == 4
    assert all(gate.abs().sum() > 0 for gate in gates)


@pytest.mark.full
def test_the_first_example(capsys):
    path = ROOT / "examples" / "record_and_replay.py"
    names = {}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)
    k3_without, k3_with = map(float, re.findall(r"k3 [\w ]+: ([\d.e-]+)", capsys.readouterr().out))
    assert 0 < k3_with < k3_without
    gates = [
        p.grad for n, p in names["trainer"].named_parameters() if n.endswith("mlp.gate.weight")
    ]
    assert len(gates) == 4
    assert all(gate.abs().sum() > 0 for gate in gates)


def test_python_of_the_pages_compiles_and_its_names_of_ours_exist():
    found = [(page, block) for page in PAGES for block in blocks(page.read_text(), "python")]
    assert len(found) > 3
    for page, block in found:
        for node in ast.walk(ast.parse(block, str(page))):
            check_names_of_ours(node, f"{page}: {block.splitlines()[0]}")


def check_names_of_ours(node, place):
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onepolicy"):
        module = importlib.import_module(node.module)
        assert all(hasattr(module, name.name) for name in node.names), (place, node.module)
    if isinstance(node, ast.Import):
        ours = [name.name for name in node.names if name.name.startswith("onepolicy")]
        assert all(map(importlib.util.find_spec, ours)), (place, ours)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        assert node.value.id != "op" or hasattr(op, node.attr), (place, node.attr)
