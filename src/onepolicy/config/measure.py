"""What `--engine` and `--prompts` of `onepolicy measure` stand for, as settings. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from onepolicy.config.base import UsageError
from onepolicy.config.engine import EngineConfig
from onepolicy.config.load import parse_value, read_recipe, resolve
from onepolicy.config.near import did_you_mean
from onepolicy.config.problems import read_prompts
from onepolicy.config.run import RunConfig
from onepolicy.config.task import PromptsTask, TaskConfig


def kinds(union: Any) -> dict[str, Any]:
    """Config classes of a union of sections by their `kind`."""
    return {each.model_fields["kind"].default: each for each in get_args(get_args(union)[0])}


def engine_settings(text: str) -> list[str]:
    """`KIND` or `KIND:URL` as overrides of rollout.engine."""
    kind, colon, url = text.partition(":")
    known = kinds(EngineConfig)
    if kind not in known:
        raise UsageError(
            f"--engine: {kind!r} is none of {', '.join(known)}{did_you_mean(kind, known)}"
        )
    if colon and "url" not in known[kind].model_fields:
        raise UsageError(
            f"--engine: {kind} runs in this process and takes no address; leave out {colon}{url}"
        )
    return [f"rollout.engine.kind={kind}", *([f"rollout.engine.url={url}"] if colon else [])]


def prompt_settings(text: str) -> dict[str, Any]:
    """The `task` section: a recipe's own, prompts of a file, a task that needs no settings, or a reasoning-gym name."""
    path, known = Path(text), kinds(TaskConfig)
    if path.suffix == ".toml":
        recipe = read_recipe(path)
        if "task" not in recipe:
            raise UsageError(f"--prompts: recipe {text} has no section task")
        task: dict[str, Any] = recipe["task"]
        return task
    if path.is_file():
        return {"kind": "prompts", "path": text}
    if text in known and not any(f.is_required() for f in known[text].model_fields.values()):
        return {"kind": text}
    if path.suffix or len(path.parts) > 1:
        raise UsageError(
            f"--prompts: {text} is not a file; give lines of text, JSONL with a field prompt, or a task"
        )
    return {"kind": "gym", "name": parse_value(text)}


def measure_settings(
    tree: dict[str, Any], overrides: list[str], path: str | None
) -> tuple[dict[str, Any], RunConfig]:
    """A run's settings, as a tree too; what only training uses is left out. path: of the model, if not the tree's own.

    Without other settings: 10 problems, 2 samples of each; of a file of prompts all of them.
    """
    tree = (
        dict[str, Any]({"task": {"kind": "chain"}, "rollout": {}, "replay": {"mode": "r3"}}) | tree
    )
    tree |= {
        "out": "unused",
        "steps": 1,
        "eval": {"every": 0},
        "log": {"report": False, "tensorboard": False},
    }
    tree["objective"] = {
        "baseline": "none",
        "normalise": "none",
    }  # unused, but a baseline refuses groups of 1
    if path is not None:
        tree["model"] = tree.get("model", {}) | {"path": path}
    asked = tree["rollout"]
    tree["rollout"] = {
        "prompts_per_step": 10,
        "group_size": 2,
        "sampling": {"max_tokens": 96},
    } | asked
    config = resolve(tree, overrides)
    if isinstance(config.task, PromptsTask):
        tree["rollout"] |= {
            "prompts_per_step": len(read_prompts(config.task.path)),
            "group_size": 1,
        } | asked
        config = resolve(tree, overrides)
    return tree, config
