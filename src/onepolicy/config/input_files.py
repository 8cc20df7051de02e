"""Files that settings name, checked before torch is loaded."""

from __future__ import annotations

from pathlib import Path

from onepolicy.config.model_path import check_model_path
from onepolicy.config.problems import check_held_out, read_prompts, read_task
from onepolicy.config.run import RunConfig
from onepolicy.config.task import JsonlTask, PromptsTask, ReActTask, SearchTool, TaskConfig
from onepolicy.errors import UsageError


def check_input_files(config: RunConfig, *, evaluates: bool) -> None:
    """Raise UsageError for a model folder, a data file or a line that is missing or wrong.

    evaluates: the run needs eval.problems held-out problems.
    """
    check_model_path(config.model.path)
    evaluated = 0
    if evaluates:
        evaluated = config.eval.problems
    check_task_files(config.task, evaluated)


def check_task_files(task: TaskConfig, evaluated: int = 0) -> None:
    """Raise UsageError for a data file that is missing, or a line of it that is wrong.

    evaluated: held-out problems that the run needs.
    """
    if isinstance(task, PromptsTask):
        read_prompts(task.path)
    if isinstance(task, JsonlTask):
        _check_problems(task, evaluated, "task")
    if isinstance(task, ReActTask):
        if isinstance(task.problems, JsonlTask):
            _check_problems(task.problems, evaluated, "task.problems")
        for tool in task.tools:
            if isinstance(tool, SearchTool) and not Path(tool.corpus).is_file():
                raise UsageError(
                    f"task.tools: search cannot read its corpus {tool.corpus}: no such file; give "
                    "the path of a JSONL file"
                )


def _check_problems(task: JsonlTask, evaluated: int, section: str) -> None:
    train, held_out = read_task(task, section)
    check_held_out(task, evaluated, len(held_out), len(train) + len(held_out), section)
