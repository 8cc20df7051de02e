"""What the policy is asked and how its responses are graded. Each kind of task is imported when a run uses it."""

from __future__ import annotations

import pkgutil

from transformers import PreTrainedTokenizerBase

from onepolicy.config import ReActTask, RowPolicy, TaskConfig
from onepolicy.envs.tasks.single_turn import SingleTurn, Task
from onepolicy.interfaces import Environment

TASKS = {
    "chain": "onepolicy.envs.tasks.chain:Chain",
    "gym": "onepolicy.envs.tasks.reasoning_gym:Gym",
    "jsonl": "onepolicy.envs.tasks.jsonl:Jsonl",
    "prompts": "onepolicy.envs.tasks.jsonl:Prompts",
}
"""task.kind of one question and one response -> class (config, section)."""
EPISODES = {
    "react": "onepolicy.envs.multiturn.react:ReAct",
    "gymnasium": "onepolicy.envs.adapters.gymnasium:Gymnasium",
    "textarena": "onepolicy.envs.adapters.textarena:TextArena",
    "verifiers": "onepolicy.envs.adapters.verifiers:Verifiers",
}
"""task.kind of several turns -> class (config, [task,] tokenizer, max_len=, rows=)."""


def build(
    config: TaskConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_len: int,
    rows: RowPolicy = "as-sampled",
) -> Environment:
    """max_len: tokens of a path. rows: see `Trajectory`."""
    if config.kind in TASKS:
        return SingleTurn(task_of(config), tokenizer)
    episodes = pkgutil.resolve_name(EPISODES[config.kind])
    given = [task_of(config.problems, "task.problems")] if isinstance(config, ReActTask) else []
    environment: Environment = episodes(config, *given, tokenizer, max_len=max_len, rows=rows)
    return environment


def task_of(config: TaskConfig, section: str = "task") -> Task:
    """section: where these settings stand in a recipe."""
    task: Task = pkgutil.resolve_name(TASKS[config.kind])(config, section)
    return task


__all__ = ["EPISODES", "TASKS", "build", "task_of"]
