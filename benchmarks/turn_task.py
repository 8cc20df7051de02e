"""A retrieval task whose problems take as many turns as they have links, and a policy that knows it
(turn_curves.py).

A problem names an entry. `search[exyz]` finds the passage of entry xyz, which names the next entry
or, at the end of the chain, holds the answer: a problem of n links takes n searches, one a turn,
and a turn for the answer. Each step needs only the last reply, so turns and not reasoning are what
is scarce.
"""

from __future__ import annotations

import functools
import json
import string
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from onepolicy.config import JsonlTask, ModelConfig, ReActTask, SearchTool
from onepolicy.config.policy import PolicyConfig
from onepolicy.envs.multiturn.tool_formats import format_observations
from onepolicy.envs.warmup.examples import task_alphabet
from onepolicy.models.load import load_model, load_tokenizer
from onepolicy.tiny.model import Example, make_model, make_tokenizer, save_policy, warm_up

LINKS = 15  # of the longest problem: 16 turns
CHAINS = 300  # of LINKS passages each, every one of which is the start of a training problem
HELD_OUT = 64


def make_data(folder: Path) -> None:
    """Write FOLDER/corpus.jsonl and problems.jsonl: training problems of 1 to LINKS links, as many
    of each, and HELD_OUT on chains of their own. The files are the same every time."""
    if (folder / "problems.jsonl").exists():
        return
    rng = np.random.default_rng(0)
    lengths = [*[LINKS] * CHAINS, *(1 + i % LINKS for i in range(HELD_OUT))]
    codes = rng.choice(26**3, size=sum(lengths), replace=False).tolist()
    names = iter(
        "".join(string.ascii_lowercase[code // 26**i % 26] for i in range(3)) for code in codes
    )
    chains = [Chain([next(names) for _ in range(length)], rng) for length in lengths]
    passages = [passage for chain in chains for passage in chain.passages]
    training = [problem for chain in chains[:CHAINS] for problem in chain.problems]
    problems = [*training, *(chain.problems[0] for chain in chains[CHAINS:])]
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("corpus", [{"text": text} for text in passages]), ("problems", problems)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


class Chain:
    """Entries one after the other, and the answer that the last one holds."""

    def __init__(self, entries: list[str], rng: np.random.Generator) -> None:
        self.entries, self.answer = entries, str(rng.integers(10, 100))

    @property
    def passages(self) -> list[str]:
        """Return passages `exyz abc`: only one passage has the word that a search for an entry
        looks for."""
        following = [*self.entries[1:], self.answer]
        return [f"e{entry} {after}" for entry, after in zip(self.entries, following, strict=True)]

    @property
    def problems(self) -> list[dict[str, str]]:
        return [{"prompt": question(entry), "answer": self.answer} for entry in self.entries]

    def episode(self, searches: int, answer: str) -> Example:
        """Return prompt, turn, observation, turn, ...: after so many searches this answer."""
        texts = [f"{question(self.entries[0])}\n"]
        for entry, passage in list(zip(self.entries, self.passages, strict=True))[:searches]:
            texts += [search(entry), found(passage)]
        return (*texts, f"Answer: {answer}")


def question(entry: str) -> str:
    return f"Start: {entry}"


def search(entry: str) -> str:
    return f"Action: search[e{entry}]"


def found(passage: str) -> str:
    return format_observations([f"[1] {passage}"])


def random_chain(links: int, rng: np.random.Generator) -> Chain:
    """Draw a chain whose entries need not be different, nor in the corpus."""
    names = ["".join(rng.choice(list(string.ascii_lowercase), size=3)) for _ in range(links)]
    return Chain(names, rng)


def worked(mistakes: float, *, seed: int = 0, links: int = LINKS) -> Iterator[Example]:
    """Yield worked episodes of 1 to `links` links on entries of their own without end. A mistake is
    a guess for a search."""
    rng = np.random.default_rng(1 + seed)
    while True:
        chain = random_chain(int(rng.integers(1, links + 1)), rng)
        made = int(np.argmax([*(rng.random(len(chain.entries)) < mistakes), True]))
        guess = str(rng.integers(10, 100))
        yield chain.episode(made, chain.answer if made == len(chain.entries) else guess)


def policy_config(folder: Path) -> PolicyConfig:
    problems = JsonlTask(path=str(folder / "problems.jsonl"), held_out=HELD_OUT)
    tools = (SearchTool(corpus=str(folder / "corpus.jsonl"), passages=1),)
    task = ReActTask(problems=problems, tools=tools, max_turns=LINKS + 1, instructions="")
    return PolicyConfig(
        task=task,
        layers=4,
        max_len=8192,
        mistakes=0.1,
        mistakes_from=0.75,
        steps=800,
        tokens_per_step=2048,
    )


def make_policy(folder: Path) -> Path:
    """Make FOLDER/policy, warmed up on worked episodes; kept if it exists."""
    path = folder / "policy"
    if path.exists():
        return path
    config = policy_config(folder)
    torch.set_num_threads(1)
    tokenizer = make_tokenizer(task_alphabet(config.task))
    model = make_model(config, len(tokenizer))
    warm_up(model, tokenizer, functools.partial(worked, seed=config.seed), config, progress=_say)
    save_policy(model, tokenizer, config, path)
    return path


def make_long_policy(folder: Path) -> Path:
    """Make FOLDER/policy-long: the policy, warmed up further on episodes of up to 100 turns; kept
    if it exists. It hardly guesses, or no episode would become long."""
    path = folder / "policy-long"
    if path.exists():
        return path
    further = {
        "steps": 120,
        "tokens_per_step": 4096,
        "lr": 1e-3,
        "mistakes": 0.02,
        "mistakes_from": 0.0,
        "seed": 1,
    }
    config = policy_config(folder).model_copy(update=further)
    torch.set_num_threads(1)
    start = ModelConfig(path=str(make_policy(folder)))
    model, tokenizer = load_model(start, torch.float32, torch.device("cpu")), load_tokenizer(start)
    warm_up(
        model,
        tokenizer,
        functools.partial(worked, seed=config.seed, links=99),
        config,
        progress=_say,
    )
    save_policy(model, tokenizer, config, path)
    return path


def _say(step: int, loss: float, accuracy: float) -> None:
    if step % 20 == 0:
        print(
            f"warm-up step {step}: loss {loss:.3f}, next-token accuracy {accuracy:.3f}", flush=True
        )
