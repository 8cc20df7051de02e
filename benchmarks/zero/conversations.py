"""What the policy of `make zero` is warmed up on: the program's conversations, by a teacher.

The teacher's turns go through the gateway's own history, so a prompt here is the prompt that the
program's request becomes. The policy learns every conversation from its first prompt on.

    python benchmarks/zero/conversations.py FOLDER

It is in the tree, benchmarks/zero/policy: another CPU rounds differently and makes another one.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from onepolicy.config.load import resolve_as
from onepolicy.config.policy import PolicyConfig
from onepolicy.envs.multiturn.prompt_checks import ASCII
from onepolicy.gateway.history import History
from onepolicy.gateway.messages import Message, Request, Tool
from onepolicy.gateway.rendering import Renderer
from onepolicy.tiny import model as tiny
from onepolicy.types import Completion

HERE = Path(__file__).parent
TEMPLATE = HERE / "template.jinja"
WORDS = (
    *("<tool ", "<system>", "<user>", "<tool>", "<bot>", "<call>", "</call>"),
    *("<think>", "</think>", "title", "lead", "help", "sum", "ask", "add", "name", "arguments"),
    *("input", ' {"', '": "', '", "', '": {"', '": ', ', "', '"}} ', "}} "),
)
"""Tokens beside the characters: the template's marks, and the parts of a call."""
GUESSES = 0.1
"""Share of the helper's answers that are guessed without the tool: what training takes off."""
TERMS = 8
"""Digits of a problem, all different. Those of the warm-up have 3 to so many."""
POLICY = (
    *("recurrent=1", "layers=4", "hidden_size=64", "heads=2", "kv_heads=2", "head_dim=32"),
    *("experts=8", "top_k=2", "expert_size=64", "max_len=768"),
    *("mistakes=0", "steps=1000", "tokens_per_step=1024", "lr=3e-3"),
)
"""Two layers of the gated delta rule and two of attention, each with 2 of 8 experts a token."""
Row = tuple[str, str]


class Teacher:
    """One episode of the program, whose turns are written here."""

    def __init__(self, renderer: Renderer) -> None:
        self.history = History(renderer, max_len=4096, max_tokens=4096)
        self.tokenizer = renderer.tokenizer
        self.turns: list[Row] = []  # each with its whole prompt

    def turn(self, messages: Sequence[Message], tool: str | None, text: str) -> Message:
        """Answer a request with this text. Return the turn as the program keeps it."""
        tools: tuple[Tool, ...] = ()
        if tool is not None:
            tools = ({"type": "function", "function": {"name": tool}},)
        plan = self.history.plan(Request(tuple(messages), tools))
        self.turns.append((self.tokenizer.decode(plan.tokens), text))
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        sampled = torch.tensor(ids, dtype=torch.int32)
        done = Completion(sampled, torch.zeros(len(ids)), torch.zeros_like(sampled), "stop")
        message = self.history.record(plan, done, None).message
        return Message("assistant", message.text, calls=message.calls)  # clients drop thoughts

    def conversations(self) -> Iterator[Row]:
        """Yield every path as its first prompt and the rest, without the last end token."""
        ends = {id(turn.path): turn for turn in self.history.turns}
        for turn in ends.values():
            start = len(turn.root.prompt)
            texts = turn.path.tokens[:start], turn.path.tokens[start : turn.length - 1]
            yield tuple(map(self.tokenizer.decode, texts))  # type: ignore[misc]


def written(name: str, **arguments: object) -> str:
    """Return a call as the template writes it."""
    return f'<call> {{"name": "{name}", "arguments": {json.dumps(arguments)}}} </call>'


def add(teacher: Teacher, question: str, rng: random.Random, guesses: float) -> str:
    """Play the helper's conversation, and return its answer."""
    first, second = map(int, question.split("+"))
    messages = [Message("system", "help"), Message("user", question)]
    if rng.random() < guesses:
        return teacher.turn(messages, "add", str(rng.randint(2, 45))).text
    called = teacher.turn(messages, "add", written("add", a=first, b=second))
    result = Message("tool", str(first + second), call_id=called.calls[0].id)
    return teacher.turn([*messages, called, result], "add", result.text).text


def play(
    teacher: Teacher,
    terms: Sequence[int],
    rng: random.Random,
    guesses: float,
    gives_up: float = 0.0,
) -> None:
    """Play what program/agent.py does with a question.

    The lead's thoughts are the digits that are left.

    gives_up: probability of each turn of the lead that it guesses the sum instead of asking.
    """
    question = Message("user", "".join(map(str, terms)))
    teacher.turn([Message("system", "title"), question], None, "sum")
    total, items = str(terms[0]), [question]
    for done, term in enumerate(terms[1:], 1):
        if gives_up and rng.random() < gives_up:
            total = str(rng.randint(2, 45))
            break
        left = "".join(map(str, terms[done:]))
        asked = f"{total}+{term}"
        text = f"<think>\n{left}\n</think>\n" + written("ask", input=asked)
        called = teacher.turn([Message("system", "lead"), *shortened(items)], "ask", text)
        total = add(teacher, asked, rng, guesses)
        items += [called, Message("tool", total, call_id=called.calls[0].id)]
    teacher.turn([Message("system", "lead"), *shortened(items)], "ask", total)


def shortened(items: list[Message]) -> list[Message]:
    """Return the history as the program's filter leaves it, which counts thoughts as items."""
    if len(items) > 3:
        return [items[0], *items[-2:]]
    return items


def draw_terms(rng: random.Random, count: int) -> list[int]:
    return rng.sample(range(1, 10), count)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the policy's tokenizer, with its chat template."""
    tokenizer = tiny.make_tokenizer(ASCII, WORDS)
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    return tokenizer


def episodes(guesses: float, seed: int = 0) -> Iterator[Teacher]:
    """Play episodes without end."""
    renderer, rng = Renderer(make_tokenizer()), random.Random(seed)
    while True:
        teacher = Teacher(renderer)
        play(teacher, draw_terms(rng, rng.randint(3, TERMS)), rng, guesses)
        yield teacher


def make_policy(path: Path) -> None:
    """Make a tiny hybrid that is warmed up on the conversations."""
    config = resolve_as(PolicyConfig, {}, POLICY)
    torch.set_num_threads(config.threads)
    tokenizer = make_tokenizer()
    model = tiny.make_model(config, len(tokenizer))
    rows = (row for each in episodes(GUESSES, config.seed) for row in each.conversations())
    tiny.warm_up(model, tokenizer, lambda _: rows, config, progress=say)
    tiny.save_policy(model, tokenizer, config, path)


def say(step: int, loss: float, accuracy: float) -> None:
    if step % 100 == 0:
        print(f"warm-up, step {step}: loss {loss:.3f}, right {accuracy:.1%}", flush=True)


def write_problems(path: Path, count: int, digits: int = TERMS) -> None:
    """Write different problems of so many digits."""
    rng = random.Random(2)
    drawn: dict[tuple[int, ...], None] = {}
    while len(drawn) < count:
        drawn[tuple(draw_terms(rng, digits))] = None
    rows = [("".join(map(str, terms)), str(sum(terms))) for terms in drawn]
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    make_policy(Path(sys.argv[1]))
