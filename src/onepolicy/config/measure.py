"""Settings of `onepolicy measure`, with its options `--engine` and `--prompts`. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from onepolicy.config.engine import EngineConfig
from onepolicy.config.load import parse_value, read_recipe, resolve
from onepolicy.config.presets import objective_presets
from onepolicy.config.problems import read_prompts
from onepolicy.config.run import RunConfig
from onepolicy.config.spelling import did_you_mean
from onepolicy.config.task import PromptsTask, TaskConfig
from onepolicy.errors import UsageError

Tree = dict[str, Any]


def classes_by_kind(union: Any) -> dict[str, Any]:
    """Return the config classes of a union of sections by their `kind`."""
    return {each.model_fields["kind"].default: each for each in get_args(get_args(union)[0])}


def engine_overrides(text: str) -> list[str]:
    """Return `KIND` or `KIND:URL` as overrides of rollout.engine. Raises UsageError."""
    kind, colon, url = text.partition(":")
    known = classes_by_kind(EngineConfig)
    if kind not in known:
        raise UsageError(
            f"--engine: {kind!r} is none of {', '.join(known)}{did_you_mean(kind, known)}"
        )
    if colon and "url" not in known[kind].model_fields:
        raise UsageError(
            f"--engine: {kind} runs in this process and takes no address; leave out {colon}{url}"
        )
    overrides = [f"rollout.engine.kind={kind}"]
    if colon:
        overrides.append(f"rollout.engine.url={url}")
    return overrides


def task_settings(text: str) -> Tree:
    """Return the `task` section that `--prompts` names.

    A recipe's own, prompts of a file, a task without required settings, or a reasoning-gym data
    set. Raises UsageError for a file that is missing.
    """
    path, known = Path(text), classes_by_kind(TaskConfig)
    if path.suffix == ".toml":
        recipe = read_recipe(path)
        if "task" not in recipe:
            raise UsageError(f"--prompts: recipe {text} has no section task; give another one")
        task: Tree = recipe["task"]
        return task
    if path.is_file():
        return {"kind": "prompts", "path": text}
    if text in known and not any(f.is_required() for f in known[text].model_fields.values()):
        return {"kind": text}
    if path.suffix or len(path.parts) > 1:
        raise UsageError(
            f"--prompts: {text} is not a file; give lines of text, JSONL with a field prompt, or a "
            "task"
        )
    return {"kind": "gym", "name": parse_value(text)}


def measure_settings(tree: Tree, overrides: list[str], path: str | None) -> tuple[Tree, RunConfig]:
    """Return a run's settings for measuring, as a tree too. Settings of training are left out.

    path: of the model, if not the tree's own. Without other settings: 10 problems, 2 samples of
    each, or all prompts of a file.
    """
    defaults: Tree = {"task": {"kind": "chain"}, "rollout": {}, "replay": {"mode": "r3"}}
    tree = defaults | tree
    tree |= {
        "out": "unused",
        "steps": 1,
        "eval": {"every": 0},
        "log": {"report": False, "tensorboard": False},
        # unused, but a group baseline refuses groups of 1
        "objective": {"baseline": "none", "normalise": "none"} | _surrogate(tree, overrides),
    }
    if not all(isinstance(tree.get(name, {}), dict) for name in ("model", "rollout")):
        resolve(tree, overrides)  # raises: it names what is no section
    if path is not None:
        tree["model"] = tree.get("model", {}) | {"path": path}
    given = tree["rollout"]
    tree["rollout"] = {
        "prompts_per_step": 10,
        "group_size": 2,
        "sampling": {"max_tokens": 96},
    } | given
    tree["rollout"].pop("min_group_size", None)  # of training
    config = resolve(tree, overrides)
    if isinstance(config.task, PromptsTask):
        prompts = len(read_prompts(config.task.path))
        tree["rollout"] |= {"prompts_per_step": prompts, "group_size": 1}
        config = resolve(tree, overrides)
    return tree, config


def _surrogate(tree: Tree, overrides: list[str]) -> Tree:
    """Return the surrogate that the recipe's objective sets: some corrections ask for theirs."""
    objective = tree.get("objective")
    typed = any(each.startswith(("objective=", "objective.preset=")) for each in overrides)
    if typed or not isinstance(objective, dict):
        return {}
    preset = objective_presets().get(str(objective.get("preset")), {}).get("settings", {})
    return {name: value for name, value in (preset | objective).items() if name == "surrogate"}
