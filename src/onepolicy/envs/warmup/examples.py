"""Characters and worked examples of a task, from which a tiny policy is made."""

from __future__ import annotations

import itertools
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
from onepolicy.envs.multiturn.render import ASCII
from onepolicy.envs.tasks import chain, jsonl, reasoning_gym
from onepolicy.envs.tasks.jsonl import Jsonl, Prompts
from onepolicy.envs.tasks.reasoning_gym import Gym
from onepolicy.envs.tools.search import read_corpus
from onepolicy.envs.warmup import gridworlds, react


def alphabet(config: TaskConfig, section: str = "task") -> str:
    """The characters a tokenizer made for this task must know, sorted, each once."""
    match config:
        case ChainTask():
            return "".join(sorted(chain.ALPHABET))
        case GymTask():
            return "".join(sorted(set(ASCII).union(*Gym(config, section).texts())))
        case JsonlTask():
            return "".join(sorted(set(ASCII).union(*Jsonl(config, section).texts())))
        case PromptsTask():
            return "".join(sorted(set(ASCII).union(*Prompts(config).prompts)))
        case ReActTask():
            corpora = (
                read_corpus(Path(tool.corpus))
                for tool in config.tools
                if isinstance(tool, SearchTool)
            )
            given = [config.instructions or "", *itertools.chain.from_iterable(corpora)]
            return "".join(sorted(set(alphabet(config.problems, "task.problems")).union(*given)))
        case GymnasiumTask():
            return "".join(
                sorted(set(ASCII).union(config.instructions or "", *(config.actions or ())))
            )
        case TextArenaTask() | VerifiersTask():
            raise _nothing_to_learn_from(config.kind)


def warmup_examples(config: TaskConfig, *, mistakes: float, seed: int) -> Iterator[tuple[str, ...]]:
    """Endless (prompt, response without the end token) pairs of training problems for supervised warm-up; of episodes
    with tools (prompt, turn, observation, turn, ...).

    `mistakes` is the share of planted errors: in the chain task of step results (a random digit, and the chain goes on
    from it), in gymnasium environments of turns (a random
    action), elsewhere of the answer's letters and digits (a random one of their kind).
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
            raise _nothing_to_learn_from(config.kind)


def _nothing_to_learn_from(kind: str) -> UsageError:
    return UsageError(
        f"task.kind: {kind} has no worked episodes to warm up on; train a model that can play"
    )
