"""What settings name must be there: data files, model folders. Loads no torch, so what is missing is said at once."""

from __future__ import annotations

import os
from pathlib import Path

from onepolicy.config.base import UsageError
from onepolicy.config.policy import PolicyConfig, cached_path
from onepolicy.config.problems import check_held_out, read_prompts, read_task
from onepolicy.config.run import RunConfig
from onepolicy.config.task import JsonlTask, PromptsTask, ReActTask, SearchTool, TaskConfig


def check_present(config: RunConfig, *, evaluates: bool) -> None:
    """UsageError for a model folder, a data file or a line that is missing or wrong.

    evaluates: eval.problems are asked for.
    """
    check_model(config.model.path)
    check_task(config.task, config.eval.problems if evaluates else 0)


def check_model(path: str) -> None:
    """UsageError for a folder that holds no model. What may be a hub id passes."""
    if path == "tiny":
        if not cached_path(PolicyConfig()).is_dir():
            raise UsageError(
                "model.path: the tiny policy has not been made yet; run `onepolicy make-policy` once"
            )
        return
    folder = Path(path)
    if os.path.lexists(folder) and not (folder / "config.json").is_file():
        raise UsageError(
            f"model.path: {path} has no config.json; give a folder saved by transformers' save_pretrained"
        )
    if not folder.exists() and not may_be_hub_id(path):
        raise UsageError(
            f"model.path: no folder {path}; give a saved model, a hub id (org/name) or `tiny`"
        )


def may_be_hub_id(path: str) -> bool:
    return not Path(path).is_absolute() and not path.startswith(".") and path.count("/") == 1


def check_task(task: TaskConfig, evaluated: int = 0) -> None:
    """UsageError for a data file that is missing, or a line of it that is wrong. evaluated: problems held out."""
    if isinstance(task, PromptsTask):
        read_prompts(task.path)
    if isinstance(task, JsonlTask):
        train, held_out = read_task(task)
        check_held_out(task, evaluated, len(held_out), len(train) + len(held_out))
    if isinstance(task, ReActTask):
        if isinstance(task.problems, JsonlTask):
            train, held_out = read_task(task.problems, "task.problems")
            lines = len(train) + len(held_out)
            check_held_out(task.problems, evaluated, len(held_out), lines, "task.problems")
        for tool in task.tools:
            if isinstance(tool, SearchTool) and not Path(tool.corpus).is_file():
                raise UsageError(
                    f"task.tools: search cannot read its corpus {tool.corpus}: no such file"
                )
