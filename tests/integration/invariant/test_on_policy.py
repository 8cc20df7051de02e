"""Rollout equals training to the last bit, for any batch of the engine and any micro-batches of the
trainer."""

import asyncio
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from onepolicy.invariant import attention, experts, ops
from onepolicy.models.load import cast_model
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.types import Sampling
from support.engine_runs import run
from support.invariant_models import batch_of, differing, engine_of, pair, trainer_of
from support.models import CONFIGS, make


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


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", CONFIGS)
def test_rollout_is_training(family, dtype):
    engine, trained, routers = pair(family, dtype)
    requests = requests_of(9)
    batch = batch_of(requests, run(engine, requests))
    assert differing(trained, routers, batch, shuffled(9, 4)) == (0, 0)
    assert differing(trained, routers, batch, [range(9)]) == (0, 0)


def test_a_sync_that_torch_does_not_count_leaves_no_old_copy(monkeypatch):
    """Writes through `.data` do not change a weight's version, by which old copies were told."""

    def copy_weights(self, weights):
        for name, tensor in weights:
            self.model.get_parameter(name).data.copy_(tensor)
        return []

    engine, trained, routers = pair("qwen3_moe", "bfloat16")
    requests = requests_of(4)
    run(engine, requests)  # with prefills and decode steps, so that all copies are made
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.25)
    monkeypatch.setattr(HFEngine, "_copy_weights", copy_weights)
    asyncio.run(engine.load_weights(trained.named_parameters(), 1))
    batch = batch_of(requests, run(engine, requests))
    assert differing(trained, routers, batch, [range(4)]) == (0, 0)


async def interrupted(engine, requests, aborted):
    """Run all requests at once and cancel the first `aborted` of them on the way."""
    plays = [engine.generate(p, sampling, seed=seed) for p, sampling, seed in requests]
    tasks = [asyncio.create_task(play) for play in plays]
    for i in range(3 * aborted):
        await asyncio.sleep(0)
        if i % 3 == 2:
            tasks[i // 3].cancel()
    await asyncio.wait(tasks)
    return [task.result() for task in tasks[aborted:]]


def resumed(requests, completions, new):
    """Return requests that continue where these ended. All or part of each path is in the cache."""
    return [
        (prompt + done.token_ids.tolist(), Sampling(sampling.temperature, new), 1000 + seed)
        for (prompt, sampling, seed), done in zip(requests, completions, strict=True)
    ]


def through_everything(name, dtype, *, sequences, tokens, max_num_seqs):
    """Sample with refilled rows, groups of one prompt, prompts cut short of others, aborts and
    resumption. Then score in parts."""
    engine, trained, routers = pair(name, dtype, max_num_seqs=max_num_seqs, max_len=60 + 2 * tokens)
    rng = random.Random(0)
    prompts = [
        [rng.randrange(2, 64) for _ in range(rng.randrange(3, 50))] for _ in range(sequences // 4)
    ]
    prompts += prompts + [p[: len(p) // 2 + 1] for p in prompts] + [p + p[:7] for p in prompts]
    requests = [(p, Sampling(rng.choice([1.0, 0.8]), tokens), i) for i, p in enumerate(prompts)]
    aborted = sequences // 10
    first = asyncio.run(interrupted(engine, requests, aborted))
    more = [r for r in resumed(requests[aborted:], first, tokens) if rng.random() < 0.3]
    second = run(engine, more)
    if routers is not None:  # some of it was not computed but found
        assert any(span.source == "cache" for done in first + second for span in done.routing.spans)
    batch = batch_of(requests[aborted:] + more, first + second)
    splits = [*shuffled(batch.num_samples, 7), list(range(0, batch.num_samples, 3))]
    return differing(trained, routers, batch, splits), int(batch.trainable.sum())


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.full), "bfloat16"])
def test_through_refills_prefixes_aborts_and_resumption(dtype):
    found, slots = through_everything("qwen3_moe", dtype, sequences=24, tokens=30, max_num_seqs=5)
    assert found == (0, 0)
    assert slots > 600


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_as_other_devices_compute_it(family, monkeypatch):
    """One shape for every call and no tables, as a GPU would compute, on the CPU."""
    for module in (ops, attention):
        monkeypatch.setattr(module, "fixed_shapes", lambda device: True)
    monkeypatch.setattr(attention, "reads_as_table", lambda *_: False)
    monkeypatch.setattr(experts, "_by_rows_is_faster", lambda *_: False)
    engine, trained, routers = pair(family, "float32", max_num_seqs=3)
    requests = requests_of(3, high=90, new=5)
    batch = batch_of(requests, run(engine, requests))
    assert differing(trained, routers, batch, [range(3), [2]]) == (0, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_dense"])
def test_rollout_is_training_on_cuda(family, dtype):
    """The start-up check of this device and build passes, and no value differs."""
    engine, trained, routers = pair(family, dtype, device=torch.device("cuda"))
    requests = requests_of(9)
    batch = batch_of(requests, run(engine, requests))
    assert differing(trained, routers, batch, shuffled(9, 4)) == (0, 0)


@pytest.mark.full
def test_rollout_and_training_on_other_thread_counts():
    engine, trained, routers = pair("qwen3_moe", "float32")
    requests = requests_of(3, new=6)
    torch.set_num_threads(2)
    try:
        batch = batch_of(requests, run(engine, requests))
    finally:
        torch.set_num_threads(1)
    assert differing(trained, routers, batch, [range(3)]) == (0, 0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral", "qwen3_dense"]
)
def test_sequences_of_256_tokens(family, dtype, monkeypatch):
    sequences = 256 if family == "qwen3_moe" else 48
    monkeypatch.setattr(CONFIGS[family], "max_position_embeddings", 1024)
    found, slots = through_everything(
        family, dtype, sequences=sequences, tokens=256, max_num_seqs=48
    )
    assert found == (0, 0)
    assert slots > 256 * sequences


def test_fast_numerics_differ():
    """As a control, the same comparison without the mode finds differences."""
    model = make("qwen3_moe")
    requests = requests_of(9)
    batch = batch_of(requests, run(engine_of(model), requests))
    assert differing(trainer_of(model, fast=True), None, batch, [range(9)])[0] > 0


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_the_cast_equals_a_checkpoint_opened_in_bfloat16(family, tmp_path):
    """Rotary frequencies and selection biases stay unrounded. Rounded in the engine alone, they
    would be a mismatch."""
    model = make(family)
    model.save_pretrained(tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    cast_model(model, torch.bfloat16)
    ours, theirs = (
        {**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (model, opened)
    )
    assert {n: t.dtype for n, t in ours.items()} == {n: t.dtype for n, t in theirs.items()}
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)
    assert {t.dtype for t in theirs.values()} == {torch.bfloat16, torch.float32}
