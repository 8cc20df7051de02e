"""What the policy is asked and how its responses are graded."""

from __future__ import annotations

import string
from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from onepolicy.config import ChainTask, GymTask, JsonlTask, PromptsTask, TaskConfig, UsageError
from onepolicy.envs import chain, gym, jsonl
from onepolicy.envs.chain import Chain
from onepolicy.envs.gym import Gym
from onepolicy.envs.jsonl import Jsonl
from onepolicy.envs.prompts import Prompts
from onepolicy.envs.single_turn import SingleTurn

ASCII = "".join(sorted(string.digits + string.ascii_letters + string.punctuation + " \n"))


def build(config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> SingleTurn:
    match config:
        case ChainTask():
            return SingleTurn(Chain(config), tokenizer)
        case GymTask():
            return SingleTurn(Gym(config), tokenizer)
        case JsonlTask():
            return SingleTurn(Jsonl(config), tokenizer)
        case PromptsTask():
            return SingleTurn(Prompts(config), tokenizer)


def alphabet(config: TaskConfig) -> str:
    """The characters a tokenizer made for this task must know, sorted, each once."""
    match config:
        case ChainTask():
            return "".join(sorted(chain.ALPHABET))
        case GymTask():
            return "".join(sorted(set(ASCII).union(*Gym(config).texts())))
        case JsonlTask():
            return "".join(sorted(set(ASCII).union(*Jsonl(config).texts())))
        case PromptsTask():
            return "".join(sorted(set(ASCII).union(*Prompts(config).prompts)))


def warmup_examples(config: TaskConfig, *, mistakes: float, seed: int) -> Iterator[tuple[str, str]]:
    """Endless (prompt, response without the end token) pairs of training problems for supervised warm-up.

    `mistakes` is the share of planted errors: in the chain task of step results (a random digit, and the chain goes on
    from it), elsewhere of the answer's letters and digits (a random one of their kind).
    """
    match config:
        case ChainTask():
            return chain.warmup_examples(config, mistakes=mistakes, seed=seed)
        case GymTask():
            return gym.warmup_examples(config, mistakes=mistakes, seed=seed)
        case JsonlTask():
            return jsonl.warmup_examples(config, mistakes=mistakes, seed=seed)
        case PromptsTask():
            raise UsageError("task.kind: prompts have no answers to learn from; give a task with answers")


__all__ = ["SingleTurn", "alphabet", "build", "warmup_examples"]
