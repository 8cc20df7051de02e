"""Recurrent hybrids with on-policy numerics: rollout equals training to the last bit, in rows that
fork, go on and are fed in pieces, and after an update."""

import asyncio
import random

import pytest
import torch

from onepolicy.build.components import build_components
from onepolicy.cli import main
from onepolicy.config import TrainingError, UsageError, load
from onepolicy.config.policy import PolicyConfig
from onepolicy.envs.warmup.examples import task_alphabet
from onepolicy.invariant.delta_rule import delta_rule
from onepolicy.invariant.mode import Invariant
from onepolicy.models.load import cast_model
from onepolicy.models.recurrent.layers import Recurrent
from onepolicy.replay.layers import is_moe
from onepolicy.replay.routers import bind_routers
from onepolicy.rollout.hf import forward
from onepolicy.run.hooks import build_hooks
from onepolicy.run.step import StepRunner
from onepolicy.tiny.model import make_model, make_tokenizer, save_policy
from onepolicy.train.forward import forward as score
from onepolicy.types import Sampling
from support.engine_runs import run
from support.invariant_models import batch_of, differing, engine_of, trainer_of
from support.metrics import rows
from support.recurrent_models import hybrid
from support.small_policy import SMALL
from support.small_recipe import write_recipe

VOCAB = 60


def policy():
    """Return a policy in the layout of `make-policy recurrent=3`, with random weights."""
    return make_model(PolicyConfig(recurrent=3, layers=4), VOCAB).eval()


def pair(model, dtype, **settings):
    cast_model(model, getattr(torch, dtype))
    trained, routers = trainer_of(model), None
    if is_moe(model.config):
        routers = bind_routers(trained)
    return engine_of(model, **settings), trained, routers


def siblings(count, group, tokens, *, low=3, high=50, seed=0):
    """Return requests of `count` prompts, each `group` times: (prompt, sampling, seed)."""
    rng = random.Random(seed)
    lengths = [rng.randrange(low, high) for _ in range(count)]
    prompts = [[rng.randrange(2, VOCAB) for _ in range(length)] for length in lengths]
    return [
        (prompt, Sampling(rng.choice([1.0, 0.8]), rng.randint(1, tokens)), seed * 1000 + i)
        for i, prompt in enumerate(p for p in prompts for _ in range(group))
    ]


def next_turn(requests, completions, seed):
    """Return requests that go on from these, after three tokens of an environment."""
    return [
        ([*prompt, *done.token_ids.tolist(), 7, 8, 9], sampling, 5000 * seed + i)
        for i, ((prompt, sampling, _), done) in enumerate(zip(requests, completions, strict=True))
    ]


def episodes(engine, requests, turns):
    """Play several turns. Return all requests with their completions."""
    asked, done = [], []
    for turn in range(turns):
        completions = run(engine, requests)
        asked, done = asked + requests, done + completions
        requests = next_turn(requests, completions, turn + 1)
    return asked, done


def one_update(trained, engine, batch):
    """Take a step of the trainer on this batch, and push the weights."""
    trained.train()
    logp = score(trained, batch).logp[batch.trainable]
    logp.mean().backward()
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.grad is not None:
                parameter -= 0.3 * parameter.grad
    trained.zero_grad()
    trained.eval()
    asyncio.run(engine.load_weights(list(trained.state_dict().items()), 1))
    asyncio.run(engine.reset_cache())


def through_everything(model, dtype, *, prompts, group, tokens, turns, rows):
    """Return differing log-probabilities and routes, and all log-probabilities.

    Siblings fork, rows are refilled and compacted, turns go on, a second round follows an update.
    """
    longest = 60 + turns * (tokens + 4)
    engine, trained, routers = pair(model, dtype, max_num_seqs=rows, max_len=longest)
    logps = routes = slots = 0
    for update in range(2):
        requests = siblings(prompts, group, tokens, seed=update)
        batch = batch_of(*episodes(engine, requests, turns))
        order = list(range(batch.num_samples))
        random.Random(0).shuffle(order)
        splits = [order[i : i + 16] for i in range(0, len(order), 16)]
        found = differing(trained, routers, batch, splits)
        logps, routes = logps + found[0], routes + found[1]
        slots += int(batch.trainable.sum())
        assert any(span.source == "cache" for span in batch.routing.spans)  # copied, not computed
        if not update:
            one_update(trained, engine, batch.select(order[:4]))
    return logps, routes, slots


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rollout_is_training_through_forks_turns_and_an_update(dtype, monkeypatch):
    monkeypatch.setattr(forward, "MAX_TOKENS", 40)  # long prompts are prefilled in pieces
    size = {"prompts": 3, "group": 3, "tokens": 24, "turns": 2, "rows": 5}
    logps, routes, slots = through_everything(policy(), dtype, **size)
    assert (logps, routes) == (0, 0)
    assert slots > 300


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_none_of_50_000_log_probabilities_differs(dtype):
    size = {"prompts": 24, "group": 8, "tokens": 96, "turns": 3, "rows": 48}
    model = make_model(PolicyConfig(recurrent=3), VOCAB).eval()
    logps, routes, slots = through_everything(model, dtype, **size)
    print(f"{dtype}: {logps} of {slots} log-probabilities and {routes} routed slots differ")
    assert (logps, routes) == (0, 0)
    assert slots >= 50_000


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["qwen3_next", "qwen3_5_moe_text", "qwen3_5_text", "olmo_hybrid", "lfm2_moe", "lfm2"]
)
def test_families_of_the_delta_rule_and_of_short_convolutions(name, dtype):
    engine, trained, routers = pair(hybrid(name), dtype, max_len=100)
    requests = siblings(4, 2, 20, high=40)
    batch = batch_of(requests, run(engine, requests))
    assert differing(trained, routers, batch, [[0, 5, 2], [1, 3], [4, 7, 6]]) == (0, 0)


def test_fast_numerics_differ():
    """As a control, the same comparison without the mode finds differences."""
    model = policy()
    requests = siblings(3, 2, 20)
    batch = batch_of(requests, run(engine_of(model), requests))
    assert differing(trainer_of(model, fast=True), None, batch, [range(6)])[0] > 0


@pytest.mark.parametrize("name", ["kimi_linear", "nemotron_h", "jamba"])
def test_operators_that_decode_by_another_algorithm_are_refused(name):
    operators = r"numerics: .* has recurrent layers \((chunk_kimi|mamba).*; use numerics = fast"
    with pytest.raises(UsageError, match=operators):
        Invariant(hybrid(name))


def test_leaving_the_mode_restores_the_layers():
    model = trainer_of(policy(), fast=True)
    before = [type(module) for module in model.modules()]
    with Invariant(model):
        mixers = [m for m in model.modules() if isinstance(m, Recurrent)]
        assert len(mixers) == 3
        assert all(mixer.replaced for mixer in mixers)
    assert [type(module) for module in model.modules()] == before


@pytest.fixture(scope="module")
def hybrid_recipe(tmp_path_factory):
    """Write a recipe of two steps on a policy of two recurrent layers and one of attention."""
    folder = tmp_path_factory.mktemp("hybrid")
    config = SMALL.model_copy(update={"recurrent": 2})
    tokenizer = make_tokenizer(task_alphabet(config.task))
    save_policy(make_model(config, len(tokenizer)), tokenizer, config, folder / "policy")
    quiet = "log = { counterfactual_every = 1, tensorboard = false, report = false }"
    lines = ('numerics = "on-policy"', "steps = 2", "train = { threads = 1 }")
    return write_recipe(folder / "policy", *lines, "eval = { every = 0 }", quiet, folder=folder)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_step_of_a_run_is_exact(hybrid_recipe, tmp_path, dtype):
    out = tmp_path / "run"
    assert main(["train", str(hybrid_recipe), f"out={out}", f"model.dtype={dtype}"]) == 0
    found = [row for row in rows(out) if "mismatch/k3" in row]
    assert len(found) == 2
    for row in found:
        assert (row["mismatch/k3"], row["mismatch/differing"]) == (0.0, 0.0)
        assert row.get("routing/routers", 0.0) == 0.0
        assert row["counterfactual/mismatch/differing"] == 0.0


def test_one_bit_of_one_layer_stops_the_run_before_the_optimiser(hybrid_recipe):
    parts = build_components(load(str(hybrid_recipe), []))[0]
    mixer = parts.engine.model.get_submodule("model.layers.1.linear_attn")

    def off(row, *args, **settings):
        """Return the rule's outputs, each one bit larger."""
        out, states = delta_rule(row, *args, **settings)
        return out.nextafter(torch.tensor(torch.inf)), states

    mixer.replaced = mixer.replaced | {"torch_chunk_gated_delta_rule": off}
    policy = parts.learner.scorer.model
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    words = r"step 1: \d+ of \d+ log-probabilities differ, first problem 0, sample"
    with pytest.raises(TrainingError, match=words):
        asyncio.run(StepRunner(parts, build_hooks(parts)).rl_step(0))
    assert all(torch.equal(before[name], t) for name, t in policy.state_dict().items())
    assert not parts.learner.optimizer.state
