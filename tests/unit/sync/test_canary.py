"""The canary as it is by default: what it asks an engine, and the smallest fault that it sees."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from onepolicy.config import TrainingError
from onepolicy.sync import push


def test_a_fault_of_one_of_sixteen_prompts_is_seen(monkeypatch):
    """Each prompt has 24 tokens of its own and is asked for before, again, and after the push."""
    asked, moved = [], []

    async def generate(prompt_ids, sampling, *, seed):
        asked.append(tuple(prompt_ids))
        return SimpleNamespace(logp=torch.tensor([-1.5 if moved == [seed] else -1.0]))

    async def nothing(*_):
        pass

    async def wrong_push(*_):
        moved.append(15)

    caps = SimpleNamespace(max_len=64, inexact_dtype=None)
    engine = SimpleNamespace(generate=generate, reset_cache=nothing, caps=caps)
    monkeypatch.setattr(push, "push_weights", wrong_push)
    with pytest.raises(TrainingError, match="moved the log-probabilities"):
        asyncio.run(push.checked_push(SimpleNamespace(), engine, vocab=1000))
    assert len(asked) == 3 * 16
    assert len(set(asked)) == 16
    assert {len(prompt) for prompt in asked} == {24}
