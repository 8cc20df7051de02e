"""Rollout equals training to the last bit, whatever the engine's batch and the trainer's micro-batches are."""

import random

import pytest
import torch
from engine_support import run
from invariant_support import batch_of, differing, engine_of, pair, trainer_of
from models import CONFIGS, make
from transformers import AutoModelForCausalLM

from onepolicy.models.load import cast
from onepolicy.types import Sampling


def requests_of(count, *, low=2, high=60, new=40, seed=0):
    rng = random.Random(seed)
    made = []
    for i in range(count):
        prompt = [rng.randrange(2, 64) for _ in range(rng.randrange(low, high))]
        made.append((prompt, Sampling(rng.choice([1.0, 0.7]), rng.randrange(1, new)), i))
    return made


def shuffled(count, size, seed=0):
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return [order[i : i + size] for i in range(0, count, size)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_rollout_is_training(name, dtype):
    engine, trained, routers = pair(name, dtype)
    requests = requests_of(9)
    batch = batch_of(requests, run(engine, requests))
    assert differing(trained, routers, batch, shuffled(9, 4)) == (0, 0)
    assert differing(trained, routers, batch, [range(9)]) == (0, 0)


def test_fast_numerics_differ():
    """The control: without the mode the same comparison finds differences."""
    model = make("qwen3_moe")
    requests = requests_of(9)
    batch = batch_of(requests, run(engine_of(model), requests))
    assert differing(trainer_of(model, fast=True), None, batch, [range(9)])[0] > 0


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe"])
def test_cast_is_what_a_checkpoint_opened_in_bfloat16_holds(name, tmp_path):
    """Not rotary frequencies, not selection biases: rounded in the engine alone, they were a mismatch of their own."""
    model = make(name)
    model.save_pretrained(tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ours = dict([*cast(model, torch.bfloat16).named_parameters(), *model.named_buffers()])
    theirs = dict([*opened.named_parameters(), *opened.named_buffers()])
    assert {n: t.dtype for n, t in ours.items()} == {n: t.dtype for n, t in theirs.items()}
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)
    assert {t.dtype for t in theirs.values()} == {torch.bfloat16, torch.float32}
