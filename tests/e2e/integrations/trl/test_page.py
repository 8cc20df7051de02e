"""TRL in docs/trainers.md, followed: its code runs, with arguments in the place of `...`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from datasets import Dataset
from pyarrow import parquet
from trl import GRPOConfig, GRPOTrainer

import onepolicy as op
import onepolicy.integrations.trl as op_trl
from onepolicy.cli import main
from support.oracle.export_peers import tokenizer
from support.paths import ROOT
from support.trl.tiny import PROMPTS, SETTINGS, CopySampler, reward, tiny_moe

pytestmark = pytest.mark.trl
MORE = {"output_dir": "out", "max_steps": 2}
PAGE = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")
LOG, TRL = (re.split(r"^## ", PAGE, flags=re.MULTILINE)[at] for at in (1, 2))


def blocks():
    """Return the Python blocks of its part: the start, colocated vLLM, a rollout of one's own."""
    found = re.findall(r"^```python\n(.*?)^```$", TRL, re.DOTALL | re.MULTILINE)
    assert len(found) == 3
    return found


@pytest.fixture
def names(tmp_path, monkeypatch):
    """Return what a reader has before the page begins, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    data = {"train_dataset": Dataset.from_dict({"prompt": PROMPTS * 8})}
    return {
        **{"GRPOConfig": GRPOConfig, "GRPOTrainer": GRPOTrainer, "reward": reward, "op": op},
        **{"model": tiny_moe(), "op_trl": op_trl, "SETTINGS": SETTINGS | MORE},
        "GIVEN": data | {"processing_class": tokenizer()},
    }


def filled(source):
    """Put the reader's own arguments in the place of `...`."""
    source = source.replace("GRPOConfig(...,", "GRPOConfig(**SETTINGS,")
    source = source.replace("args, ...)", "args, **GIVEN)")
    assert "..." not in re.sub(r"#.*", "", source)
    return source


def logged(trainer):
    return [row for row in trainer.state.log_history if "mismatch/k3" in row]


def test_the_start_trains_replays_and_leaves_a_dump_that_the_audit_reads(names, capsys):
    """The whole of the page's first block, then the command that the page is a way to."""
    exec(compile(filled(blocks()[0]), "docs/trainers.md", "exec"), names)
    rows = logged(names["trainer"])
    assert len(rows) == 2
    table = re.findall(r"^\| (`[^|]+) \|", LOG, re.MULTILINE)
    keys = [key for cell in table for key in re.findall(r"`([\w/]+)`", cell)]
    assert {"mismatch/k3", "mismatch/f2", "routing/agreement", "replay/native_rows"} <= set(keys)
    assert all(key in row for row in rows for key in keys)
    files = sorted(Path("dump").glob("*.parquet"))
    assert len(files) == 2
    columns = parquet.read_table(files[0]).column_names
    assert {"logp_trainer", "logp_rollout", "routes_rollout", "routes_trainer"} <= set(columns)
    assert main(["audit", "dump"]) == 0
    assert capsys.readouterr().out.splitlines()[-1]


def test_a_rollout_of_ones_own_has_the_keys_of_the_page(names):
    """The page's third block has a function to fill in; ours returns the keys that it names."""
    tree = ast.parse(blocks()[2])
    [returned] = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    keys = {key.value for key in returned.keys}
    sampler, made = CopySampler(), []

    def rollout(prompts, trainer):
        made.append(sampler(prompts, trainer))
        return made[-1]

    start = filled(blocks()[0]).replace("**GIVEN", "rollout_func=rollout, **GIVEN")
    exec(
        compile(start, "docs/trainers.md", "exec"),
        names | {"rollout": rollout, "model": tiny_moe()},
    )
    assert {frozenset(each) for each in made} == {frozenset(keys)}


def test_the_call_beside_vllm_takes_vllms_keywords():
    """The page's second block: its context manager, without an engine inside."""
    [call] = re.findall(r"with (op_trl\.routed_vllm\(.*?\)):", blocks()[1])
    with eval(call, {"op_trl": op_trl}):
        pass
