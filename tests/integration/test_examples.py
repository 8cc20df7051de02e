"""The examples run as they are, and show what they say. TRL's, verl's and Megatron's run in
tests/e2e/integrations, the first one in test_docs_run.py."""

import ast
import json
import re
import runpy
import subprocess
import sys

import pytest

from support.paths import ROOT

EXAMPLES = ROOT / "examples"
TESTED = {
    "agent_with_tool.py",
    "audit_dump.py",
    "figures.ipynb",
    "fsdp2_loop.py",
    "grpo_loop.py",
    "megatron_replay.py",  # tests/e2e/integrations/megatron
    "record_and_replay.py",  # test_docs_run.py
    "trl_grpo.py",  # tests/e2e/integrations/trl
    "verl_ppo.sh",  # tests/e2e/integrations/verl
}


def cells():
    """Return the sources of the notebook's code cells."""
    notebook = json.loads((EXAMPLES / "figures.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in code)
    return ["".join(cell["source"]) for cell in code]


def steps_of(text):
    """Return reward and k3, without and with replay, of each step that an example printed."""
    found = re.findall(r"reward ([\d.]+)  k3 (\S+) without, (\S+) with", text)
    return [tuple(map(float, step)) for step in found]


def test_every_example_is_tested_and_listed():
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert files == TESTED
    listed = (ROOT / "docs" / "other_trainers.md").read_text(encoding="utf-8")
    section = listed[listed.index("\n## Examples\n") :]
    assert set(re.findall(r"`[^`]* examples/([\w.]+)`", section)) == files


def test_each_is_one_file_of_under_100_lines():
    for name in TESTED:
        text = (EXAMPLES / name).read_text(encoding="utf-8")
        if name.endswith(".ipynb"):
            text = "\n".join(cells())
        assert len(text.splitlines()) < 100, name


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.full)])
def test_a_grpo_loop_of_transformers_and_the_library(count, capsys):
    """Padded prompts, micro-batches: with replay the gap is smaller in each step, and it learns."""
    source = (EXAMPLES / "grpo_loop.py").read_text(encoding="utf-8")
    assert " = 8, 4, 8, 12," in source
    exec(source.replace(" = 8, 4, 8, 12,", f" = {count}, 4, 8, 12,"), {"__name__": "__main__"})
    steps = steps_of(capsys.readouterr().out)
    assert len(steps) == count
    assert all(0 < replayed < without for _, without, replayed in steps)
    assert count < 8 or max(reward for reward, *_ in steps[-3:]) > 3 * steps[0][0]


@pytest.mark.full
@pytest.mark.process
def test_the_loop_under_fsdp2_on_two_ranks():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(EXAMPLES / "fsdp2_loop.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = steps_of(done.stdout)
    assert len(steps) == 8
    assert sum(step[2] for step in steps) < sum(step[1] for step in steps) / 2
    assert max(reward for reward, *_ in steps[-3:]) > 2 * steps[0][0]


@pytest.mark.full
def test_an_agent_with_a_tool(capsys):
    """Over turns the routes are still those of their tokens: replay leaves the smaller gap."""
    names = runpy.run_path(str(EXAMPLES / "agent_with_tool.py"))
    steps = steps_of(capsys.readouterr().out)
    assert len(steps) == 8
    assert sum(step[2] for step in steps) < sum(step[1] for step in steps) / 1.5
    assert max(reward for reward, *_ in steps) > steps[0][0] + 0.1  # eight steps, some go back
    for tokens, trace, logp, mask, _ in names["episodes"]:
        assert len(tokens) - 1 == len(trace) == len(logp) == len(mask)
        assert sum(mask) <= names["TURNS"] * names["NEW"]
        assert all(value < 0 for value, sampled in zip(logp, mask, strict=True) if sampled)
    assert names["call_tool"](names["encode"]("3*4=")) == (names["encode"]("12"), 1.0)
    assert names["call_tool"](names["encode"]("3*=")) == (names["encode"]("?"), 0.0)


@pytest.mark.full
@pytest.mark.process
def test_the_audit_of_a_dump_tells_a_gap_from_a_forgotten_temperature(tmp_path):
    command = [sys.executable, str(EXAMPLES / "audit_dump.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    right, forgotten = re.findall(r"^(?:right|forgotten): (\w+)$", done.stdout, re.MULTILINE)
    assert right in ("correct", "nothing")
    assert forgotten == "bug"
    (found,) = re.findall(r"temperature is about ([\d.]+) times", done.stdout)
    assert float(found) == pytest.approx(0.7, abs=0.05)  # that of one policy, by processor
    assert {path.name for path in tmp_path.iterdir()} == {"right.jsonl", "forgotten.jsonl"}


@pytest.mark.full
def test_the_notebook_draws_the_scatter_f_of_tau_and_the_routing():
    names = {}
    shown = []
    for source in cells():
        *statements, last = ast.parse(source).body
        exec(compile(ast.Module(statements, []), "figures.ipynb", "exec"), names)
        if isinstance(last, ast.Expr):  # what a notebook shows
            shown.append(eval(compile(ast.Expression(last.value), "figures.ipynb", "eval"), names))
        else:
            exec(compile(ast.Module([last], []), "figures.ipynb", "exec"), names)
    scatter, curve, routing = (names[name] for name in ("scatter", "curve", "routing"))
    tokens = names["mask"].sum()
    assert [len(points.x) for points in scatter.data] == [tokens, tokens, 2]
    without, replayed = (line.y for line in curve.data)
    assert list(without) == sorted(without, reverse=True)
    assert sum(replayed) < sum(without) / 2
    assert without[49] == names["found"]["without replay"].extreme(2)
    (bars,) = routing.data
    assert len(bars.y) == 6
    assert 0 < max(bars.y) < 1
    assert bars.y[-1] > bars.y[0]
    assert sum(figure in shown for figure in (scatter, curve, routing)) == 3
