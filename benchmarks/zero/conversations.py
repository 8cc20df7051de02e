"""What the policy of `make zero` is warmed up on: the program's conversations, by a teacher.

The teacher's turns go through the gateway's own history, so a prompt here is the prompt that the
program's request becomes. The policy is `onepolicy make-policy` on these lines: the first prompt of
a conversation, and all that follows. The held-out ones are single turns, which can be graded.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from onepolicy.envs.multiturn.prompt_checks import ASCII
from onepolicy.gateway.history import History
from onepolicy.gateway.messages import Message, Request, Tool
from onepolicy.gateway.rendering import Renderer
from onepolicy.tiny.model import make_tokenizer
from onepolicy.types import Completion

HERE = Path(__file__).parent
TEMPLATE = HERE / "template.jinja"
HELD_OUT = 64
GUESSES = 0.1
"""Share of the helper's answers that are guessed without the tool: what training takes off."""
TERMS = 8
"""Numbers of a problem. Those of the warm-up have 4 to so many."""
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


def play(teacher: Teacher, terms: Sequence[int], rng: random.Random, guesses: float) -> None:
    """Play what program/agent.py does with a question."""
    question = Message("user", "+".join(map(str, terms)))
    teacher.turn([Message("system", "title"), question], None, "sum")
    total, items = str(terms[0]), [question]
    for term in terms[1:]:
        asked = f"{total}+{term}"
        text = f"<think>\n{asked}\n</think>\n" + written("ask", input=asked)
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


def episodes(count: int, guesses: float, seed: int = 0) -> Iterator[Teacher]:
    """Play so many episodes."""
    tokenizer = make_tokenizer(ASCII)
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    renderer, rng = Renderer(tokenizer), random.Random(seed)
    for _ in range(count):
        teacher = Teacher(renderer)
        play(teacher, draw_terms(rng, rng.randint(4, TERMS)), rng, guesses)
        yield teacher


def write_conversations(path: Path, count: int) -> None:
    """Write the conversations of `count` episodes for make-policy; the last HELD_OUT are graded."""
    rows = [row for each in episodes(count, GUESSES) for row in each.conversations()]
    prompts, held_out = {prompt for prompt, _ in rows}, []
    for teacher in episodes(HELD_OUT, 0.0, seed=1):
        held_out += [(prompt, text) for prompt, text in teacher.turns if prompt not in prompts]
    held_out = list(dict(held_out).items())[:HELD_OUT]
    _write(path, [*rows, *held_out])


def write_problems(path: Path, count: int) -> None:
    """Write sums of TERMS numbers."""
    rng = random.Random(2)
    drawn = [draw_terms(rng, TERMS) for _ in range(count)]
    _write(path, [("+".join(map(str, terms)), str(sum(terms))) for terms in drawn])


def _write(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
