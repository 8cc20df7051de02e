"""Damaged recipes and overrides: refused as `UsageError`, or read as settings that a run folder
keeps."""

from __future__ import annotations

import datetime
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from onepolicy.config import RunConfig, UsageError, read_recipe, resolve
from support.fuzz import FAST, SLOW, Damage, survives
from support.paths import ROOT

INPUTS = [pytest.param(FAST // 5, id="fast"), pytest.param(SLOW, id="slow", marks=pytest.mark.slow)]
RECIPES = [path.read_bytes() for path in sorted((ROOT / "recipes").rglob("*.toml"))]
OVERRIDES = (
    *(b"optim.lr=1e-4", b"rollout.engine.url=http://127.0.0.1:8000", b"correction.preset=tis"),
    *(b"rollout.engine.kind=vllm-server", b"replay.mode=off", b"cluster.kind=ray", b"steps=3"),
    *(b'cluster.address="10.0.0.1:6379"', b"task={kind='jsonl', train='x', held_out=3}"),
)


def check(config: RunConfig) -> None:
    """Check that the settings come back from the folder of a run."""
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.full
@pytest.mark.parametrize("inputs", INPUTS)
def test_recipes(tmp_path: Path, inputs: int) -> None:
    path = tmp_path / "recipe [b]\x1b.toml"

    def make(damage: Damage) -> tuple[Any, list[str]]:
        good = damage.random.choice(RECIPES)
        recipe: Any = good
        if damage.random.random() < 0.5:
            recipe = damage.tree(tomllib.loads(good.decode()))
            recipe = recipe if isinstance(recipe, dict) else {"task": recipe}
        elif damage.random.random() < 0.8:
            recipe = damage.data(good)
        overrides = damage.random.sample(OVERRIDES, damage.random.randrange(3))
        if overrides and damage.random.random() < 0.5:
            overrides[0] = damage.data(overrides[0])
        return recipe, [each.decode(errors="surrogateescape") for each in overrides]

    def read(given: tuple[Any, list[str]]) -> RunConfig:
        tree, overrides = given
        if isinstance(tree, bytes):
            path.write_bytes(tree)
            tree = read_recipe(path)
        return resolve({"out": "unused", "steps": 1} | tree, overrides)

    survives("recipe", inputs, make, read, check, UsageError)


def deep() -> list:
    tree: list = []
    for _ in range(70):
        tree = [tree]
    return tree


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (math.nan, "finite number"),
        (datetime.date(2026, 1, 1), "not a valid JSON value"),
        (deep(), "nested more than 64 levels deep"),
    ],
)
def test_parameters_are_what_config_json_can_hold(value: Any, said: str) -> None:
    task = {"kind": "gym", "name": "chain_sum", "params": {"a": value}}
    with pytest.raises(UsageError, match=rf"task\.params\.a.*{said}"):
        resolve({"out": "x", "steps": 1, "model": {"path": "tiny"}, "task": task})
