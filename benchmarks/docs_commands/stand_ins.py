"""A folder in which the commands of README and guides can be run: small stand-ins by their names.

RECIPE is a recipe of two steps, MODEL a policy of this tree, RUN a finished run of two steps,
dump.parquet a dump of the conformance kit, and so on.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import tomlkit
from pyarrow import Table, parquet

from onepolicy.config.policy import PolicyConfig, cached_policy_path

ROOT = Path(__file__).parents[2]
POLICY = ROOT / "benchmarks" / "evidence" / "policies" / "one-of-8"
LINKED = ("conformance", "docs", "examples", "src", "tests", "Makefile")
LINKED += ("pyproject.toml", "constraints.txt")
SMALL = {
    "steps": 2,
    "rollout": {"prompts_per_step": 4, "group_size": 2},
    "eval": {"every": 2, "problems": 2, "k": 1},
    "checkpoint": {"every": 1},
}
"""What every recipe is cut to."""


def prepare(folder: Path) -> None:
    """Fill the folder. XDG_CACHE_HOME must be a folder in it."""
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    for name in ("MODEL", "POLICY", "runs/policies/one_of_eight"):
        link(folder / name, POLICY)
    link(cached_policy_path(PolicyConfig()), POLICY)
    write_recipes(folder)
    write_dumps(folder)
    write_own_problems(folder)
    write_dense(folder / "DENSE")
    (folder / "prompts.txt").write_text("1+2=\n3+4=\n5+1=\n2+2=\n")
    write_tools(folder)


def link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def write_recipes(folder: Path) -> None:
    """Write the recipes of the tree and of the study, cut; RECIPE is the quickstart on MODEL."""
    for path in ROOT.glob("recipes/**/*.toml"):
        write_cut(path, folder / path.relative_to(ROOT))
    for path in ROOT.glob("benchmarks/*.*"):
        link(folder / "benchmarks" / path.name, path)
    link(folder / "benchmarks" / "evidence" / "policies", POLICY.parent)
    study = "benchmarks/evidence/study.toml"
    write_cut(ROOT / study, folder / study)
    for name in ("RECIPE", "recipe.toml"):
        write_cut(ROOT / "recipes/quickstart.toml", folder / name, out=f"runs/{name}")


def write_cut(path: Path, target: Path, **changed: str) -> None:
    """Write the recipe with two steps. Those of clusters are for plans and stay as they are."""
    recipe = tomlkit.parse(path.read_text(encoding="utf-8"))
    if "cluster" not in path.parts:
        merge(recipe, SMALL)
    merge(recipe, changed)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(tomlkit.dumps(recipe), encoding="utf-8")


def merge(tree: dict, changes: dict) -> None:
    for key, value in changes.items():
        if isinstance(value, dict):
            merge(tree.setdefault(key, tomlkit.table()), value)
        else:
            tree[key] = value


def write_dumps(folder: Path) -> None:
    """Write dumps of the kit under the names of the pages, some with another trainer's columns."""
    healthy = ROOT / "conformance" / "embedded_bfloat16.parquet"
    broken = ROOT / "conformance" / "temperature.parquet"
    shutil.copy(healthy, folder / "dump.parquet")
    shutil.copy(healthy, folder / "before.parquet")
    shutil.copy(broken, folder / "after.parquet")
    for name, dump in {"A": healthy, "B": broken, "DUMP": broken, "dump": healthy}.items():
        (folder / name).mkdir()
        shutil.copy(dump, folder / name / "step_1.parquet")
    (folder / "folder").symlink_to(folder / "dump")
    theirs = renamed(parquet.read_table(broken), logp_trainer="old_log_probs")
    parquet.write_table(theirs, folder / "theirs.parquet")
    rows = renamed(theirs, mask="response_mask").to_pylist()
    (folder / "dump.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def renamed(table: Table, **names: str) -> Table:
    """Return the table with other names of some columns."""
    return table.rename_columns([names.get(name, name) for name in table.column_names])


def write_own_problems(folder: Path) -> None:
    """Write problems.jsonl and own.toml as docs/training.md prints them."""
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    [problems] = re.findall(r"^```json\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    recipe = re.findall(r"^```toml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[0]
    (folder / "problems.jsonl").write_text(problems)
    (folder / "own.toml").write_text(recipe)


def write_dense(path: Path) -> None:
    """Write a random dense model with the policy's tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shutil.copytree(POLICY, path, ignore=shutil.ignore_patterns("model*", "policy.json"))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=32, **sizes, **heads)).save_pretrained(path)


def write_tools(folder: Path) -> None:
    """Write bin/, which `make` and the commands find their programs in, and a venv of make's."""
    programs = folder / "bin"
    programs.mkdir()
    python = sys.executable
    scripts = {"onepolicy": "-m onepolicy", "torchrun": "-m torch.distributed.run"}
    scripts |= {"python": "", "python3": "", "pip": "-m pip"}
    for name, words in scripts.items():
        path = programs / name
        path.write_text(f'#!/bin/sh\nexec {python} {words} "$@"\n')
        path.chmod(0o755)
    (folder / ".venv").mkdir()
    (folder / ".venv" / ".train").touch()
    wheels = folder / "wheels"
    command = [python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels), str(ROOT)]
    subprocess.run(command, check=True)
