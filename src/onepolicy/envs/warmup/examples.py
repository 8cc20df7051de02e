"""Alphabet and worked examples of a task, for making a tiny policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from onepolicy.config import (
    ChainTask,
    GymnasiumTask,
    GymTask,
    JsonlTask,
    ProgramTask,
    PromptsTask,
    ReActTask,
    SearchTool,
    TaskConfig,
    TextArenaTask,
    UsageError,
    VerifiersTask,
)
from onepolicy.envs.multiturn.prompt_checks import ASCII
from onepolicy.envs.tasks import jsonl, reasoning_gym
from onepolicy.envs.tasks.chain import ALPHABET, draw_prompt, parse, work_out
from onepolicy.envs.tasks.jsonl import Jsonl, Prompts
from onepolicy.envs.tasks.reasoning_gym import ReasoningGym
from onepolicy.envs.tasks.seeding import seeded_rng
from onepolicy.envs.tools.search import read_corpus
from onepolicy.envs.warmup import gridworlds, react


def task_alphabet(config: TaskConfig, section: str = "task") -> str:
    """Return the characters of a task that a tokenizer made for it must know, sorted, each once."""
    match config:
        case ChainTask():
            return _sorted_characters(ALPHABET)
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
        case TextArenaTask() | VerifiersTask() | ProgramTask():
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
            return _chain_examples(config, mistakes, seed)
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
        case TextArenaTask() | VerifiersTask() | ProgramTask():
            raise _no_worked_episodes(config.kind)


def corrupted_solution(prompt: str, rng: np.random.Generator, rate: float) -> str:
    """Return a worked response whose step results are wrong with probability `rate`.

    A wrong result is a uniformly random digit, and the chain continues from it. One digit in ten is
    right by chance, so a solution of k operations has no mistake with probability
    (1 - 0.9 rate)^k. A policy warmed up on these responses makes mistakes at that rate when sampled
    at temperature 1.
    """
    count = len(parse(prompt)[1])
    planted = rng.random(count) < rate
    digits = rng.integers(10, size=count)
    mistakes = {i: int(digits[i]) for i in planted.nonzero()[0].tolist()}
    return work_out(prompt, mistakes)


def _chain_examples(task: ChainTask, mistakes: float, seed: int) -> Iterator[tuple[str, str]]:
    """Yield (prompt, response) pairs without end, none of the held-out split.

    Prompts have 2 to `task.ops` operations, or 1 if `task.ops` is 1.
    """
    index = 0
    while True:
        rng = seeded_rng("chain warm-up", task.seed, seed, index)
        ops = int(rng.integers(min(2, task.ops), task.ops + 1))
        prompt = draw_prompt(rng, ops, "train")
        yield prompt, corrupted_solution(prompt, rng, mistakes)
        index += 1


def _no_worked_episodes(kind: str) -> UsageError:
    return UsageError(
        f"task.kind: {kind} has no worked episodes to warm up on; train a model that can play"
    )
