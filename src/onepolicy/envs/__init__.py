"""Environments: problems for the policy and graders of its responses.

Every kind of task is imported when a run uses it.
"""

from __future__ import annotations

import pkgutil
from typing import Any

from transformers import PreTrainedTokenizerBase

from onepolicy.config import DuplicateRoutes, ReActTask, TaskConfig
from onepolicy.envs.tasks.single_turn import SingleTurn, Task
from onepolicy.interfaces import Environment

SINGLE_TURN = {
    "chain": "onepolicy.envs.tasks.chain:Chain",
    "gym": "onepolicy.envs.tasks.reasoning_gym:ReasoningGym",
    "jsonl": "onepolicy.envs.tasks.jsonl:Jsonl",
    "prompts": "onepolicy.envs.tasks.jsonl:Prompts",
}
"""task.kind of one question and one response -> class(config, section)."""
MULTI_TURN = {
    "react": "onepolicy.envs.multiturn.react:ReAct",
    "gymnasium": "onepolicy.envs.adapters.gymnasium:build",
    "textarena": "onepolicy.envs.adapters.textarena:build",
    "verifiers": "onepolicy.envs.adapters.verifiers:Verifiers",
}
"""task.kind of several turns -> builder(config, [task,] tokenizer, max_len=, duplicate_routes=)."""


def make_environment(
    config: TaskConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_len: int,
    duplicate_routes: DuplicateRoutes = "as-sampled",
) -> Environment:
    """Build the environment of a task.

    max_len: tokens of a path. duplicate_routes: see `RouteBuffer.merge`.
    """
    if config.kind in SINGLE_TURN:
        return SingleTurn(make_task(config), tokenizer)
    make = pkgutil.resolve_name(MULTI_TURN[config.kind])
    arguments: list[Any] = [config, tokenizer]
    if isinstance(config, ReActTask):
        arguments.insert(1, make_task(config.problems, "task.problems"))
    environment: Environment = make(*arguments, max_len=max_len, duplicate_routes=duplicate_routes)
    return environment


def make_task(config: TaskConfig, section: str = "task") -> Task:
    """Build a task of one question and one response. section: its place in the recipe."""
    task: Task = pkgutil.resolve_name(SINGLE_TURN[config.kind])(config, section)
    return task


__all__ = ["MULTI_TURN", "SINGLE_TURN", "make_environment", "make_task"]
