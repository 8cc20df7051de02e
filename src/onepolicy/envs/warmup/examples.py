"""Alphabet and worked examples of a task, for making a tiny policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from onepolicy.config import (
    ChainTask,
    GymnasiumTask,
    GymTask,
    JsonlTask,
    PromptsTask,
    ReActTask,
    SearchTool,
    TaskConfig,
    TextArenaTask,
    UsageError,
    VerifiersTask,
)
from onepolicy.envs.multiturn.prompt_checks import ASCII
from onepolicy.envs.tasks import chain, jsonl, reasoning_gym
from onepolicy.envs.tasks.jsonl import Jsonl, Prompts
from onepolicy.envs.tasks.reasoning_gym import ReasoningGym
from onepolicy.envs.tools.search import read_corpus
from onepolicy.envs.warmup import gridworlds, react


def task_alphabet(config: TaskConfig, section: str = "task") -> str:
    """Return the characters of a task that a tokenizer made for it must know, sorted, each once."""
    match config:
        case ChainTask():
            return _sorted_characters(chain.ALPHABET)
        case GymTask():
            return _sorted_characters(ASCII, *ReasoningGym(config, section).problem_texts())
        case JsonlTask():
            return _sorted_characters(ASCII, *Jsonl(config, section).problem_texts())
        case PromptsTask():
            return _sorted_characters(ASCII, *Prompts(config).prompts)
        case ReActTask():
            problems = task_alphabet(config.problems, "task.problems")
            searches = [tool for tool in config.tools if isinstance(tool, SearchTool)]
            passages = [text for tool in searches for text in read_corpus(Path(tool.corpus))]
            return _sorted_characters(problems, config.instructions or "", *passages)
        case GymnasiumTask():
            return _sorted_characters(ASCII, config.instructions or "", *(config.actions or ()))
        case TextArenaTask() | VerifiersTask():
            raise _no_worked_episodes(config.kind)


def _sorted_characters(*texts: str) -> str:
    return "".join(sorted(set().union(*texts)))


def warmup_examples(config: TaskConfig, *, mistakes: float, seed: int) -> Iterator[tuple[str, ...]]:
    """Yield worked examples of training problems without end, for supervised warm-up.

    An example is (prompt, response without the end token), or of an episode (prompt, turn,
    observation, turn, ...). mistakes: share of wrong parts. In the chain task these are step
    results (a random digit, from which the chain continues), in gymnasium environments turns (a
    random action), with tools calls (a guess instead), elsewhere the answer's letters and digits (a
    random one of their class). Raises UsageError for a task without worked examples.
    """
    match config:
        case ChainTask():
            return chain.warmup_examples(config, mistakes=mistakes, seed=seed)
        case GymTask():
            return reasoning_gym.warmup_examples(config, mistakes=mistakes, seed=seed)
        case JsonlTask():
            return jsonl.warmup_examples(config, mistakes=mistakes, seed=seed)
        case PromptsTask():
            raise UsageError(
                "task.kind: prompts have no answers to learn from; give a task with answers"
            )
        case ReActTask():
            return react.warmup_examples(config, mistakes=mistakes, seed=seed)
        case GymnasiumTask():
            return gridworlds.warmup_examples(config, mistakes=mistakes, seed=seed)
        case TextArenaTask() | VerifiersTask():
            raise _no_worked_episodes(config.kind)


def _no_worked_episodes(kind: str) -> UsageError:
    return UsageError(
        f"task.kind: {kind} has no worked episodes to warm up on; train a model that can play"
    )
