"""Routing pressure: noise changes the engine's routes and nothing else, and replaying them undoes
it."""

import asyncio
import copy

import pytest
import torch

from onepolicy.config import HFEngineConfig, RoutingPressure, UsageError
from onepolicy.divergence.logprob import mismatch
from onepolicy.replay.routers import bind_routers
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.rollout.hf.pressure import Pressure, check_pressure
from onepolicy.rollout.hf.runner_up import uniform_of
from support.engine_runs import prompts, ragged, run
from support.families import TABLE
from support.models import CONFIGS, make

REFUSED = {
    "phimoe": "PhimoeTopKRouter selects expert after expert with one max each",
    "inkling_text": "InklingTopkRouter .* has 0 weights with a row per expert",
}
NO_COMBINE_WEIGHTS = ("dbrx", "jamba", "jetmoe", "llama4_text")
"""Families whose combine weights cannot be recorded."""
DECODERS = ("qwen3_moe", "gpt_oss", "deepseek_v3")
"""Families whose whole requests are run, too: by plain layers, with windows, with biases."""
REQUESTS = ragged(prompts(4), spread=10)


def pressed_engine(name="qwen3_moe", *, model=None, combine_weights=False, **settings):
    config = HFEngineConfig(dtype="float32", max_num_seqs=4)
    pressure = RoutingPressure(**settings) if settings else None
    options = {"combine_weights": combine_weights, "pressure": pressure}
    return HFEngine(model or make(name), config, return_routes=True, max_len=64, **options)


def same(a, b):
    """Return whether tokens, log-probabilities, routes and combine weights are equal to the bit."""
    return all(
        torch.equal(x.token_ids, y.token_ids)
        and torch.equal(x.logp, y.logp)
        and torch.equal(x.routing.ids, y.routing.ids)
        and (x.routing.weights is None or torch.equal(x.routing.weights, y.routing.weights))
        for x, y in zip(a, b, strict=True)
    )


@torch.no_grad()
def k3(model, done, replay=None):
    """Return k3 of the completions against this model. replay: arguments of `Routers.replay`."""
    trainer, rollout = [], []
    for (prompt, _, _), completion in zip(REQUESTS, done, strict=True):
        path = torch.tensor([[*prompt, *completion.token_ids.tolist()]])[:, :-1]
        if replay is None:
            logits = model(input_ids=path, use_cache=False).logits
        else:
            with bind_routers(model).replay(completion.routing, check=False, **replay):
                logits = model(input_ids=path, use_cache=False).logits
        logp = torch.log_softmax(logits[0, len(prompt) - 1 :], -1)
        trainer.append(logp.gather(-1, completion.token_ids.long()[:, None])[:, 0])
        rollout.append(completion.logp)
    logp = torch.cat(trainer)
    return mismatch(logp, torch.cat(rollout), torch.ones(len(logp), dtype=torch.bool)).k3


@pytest.mark.few(1)
@pytest.mark.parametrize("name", DECODERS)
def test_scale_0_is_no_pressure_to_the_bit(name):
    plain = run(pressed_engine(name, combine_weights=True), REQUESTS)
    for weights in (False, True):
        engine = pressed_engine(name, combine_weights=True, scale=0.0, weights=weights)
        assert same(run(engine, REQUESTS), plain)


@pytest.mark.parametrize("kind", ["routing", "runner-up"])
@pytest.mark.parametrize("name", DECODERS)
def test_replay_undoes_pressure_on_the_choice(name, kind):
    scale = {"routing": 1.0, "runner-up": 0.3}[kind]
    model, done = make(name), run(pressed_engine(name, kind=kind, scale=scale), REQUESTS)
    assert k3(model, done) > 1e-4
    assert k3(model, done, {}) < 1e-9


def test_pressure_on_the_weights_needs_the_weights():
    model = make("qwen3_moe")
    done = run(pressed_engine(scale=1.0, weights=True, combine_weights=True), REQUESTS)
    assert k3(model, done, {}) > 1e-4
    assert k3(model, done, {"weights": True}) < 1e-9


def inputs(model):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, model.config.get_text_config().vocab_size, (2, 9), generator=generator)


@torch.no_grad()
def recorded(model, tokens, *, weights=False):
    with bind_routers(model).record(weights=weights) as tape:
        logits = model(input_ids=tokens, use_cache=False).logits
    return logits, tape.trace()


def kinds_of(family):
    """Return (settings, scale) of each kind of pressure that the family takes."""
    if family not in REFUSED:
        yield {"weights": False}, 2.0
        if family not in NO_COMBINE_WEIGHTS:
            yield {"weights": True}, 2.0
    yield {"kind": "runner-up"}, 1.0


@pytest.mark.full
@torch.no_grad()
@pytest.mark.parametrize("family", [name for name in TABLE if name != "phimoe"])
def test_every_family_is_pressed_where_it_chooses(family, subtests):
    """A pressed forward has the bits of a clean one that replays its routes, and with scale = 0
    those of a clean one. By a runner-up at share 1 every row has one other expert."""
    clean = TABLE[family].model().eval()
    tokens = inputs(clean)
    logits, trace = recorded(clean, tokens)
    for settings, scale in kinds_of(family):
        with subtests.test(**settings):
            idle, pressed = copy.deepcopy(clean), copy.deepcopy(clean)
            Pressure(idle, RoutingPressure(scale=0, **settings)).refresh(0)
            same_logits, same_trace = recorded(idle, tokens)
            assert torch.equal(same_logits, logits)
            assert torch.equal(same_trace.ids, trace.ids)
            pressure = Pressure(pressed, RoutingPressure(scale=scale, **settings))
            pressure.refresh(0)
            state = {name: tensor.clone() for name, tensor in pressed.state_dict().items()}
            weights = settings.get("weights", False)
            other_logits, other = recorded(pressed, tokens, weights=weights)
            assert not torch.equal(other.ids, trace.ids)
            with bind_routers(clean).replay(other, weights=weights, check=False):
                replayed = clean(input_ids=tokens, use_cache=False).logits
            assert torch.equal(replayed, other_logits)
            assert all(torch.equal(state[name], x) for name, x in clean.state_dict().items())
            with pressure.lifted():
                assert torch.equal(recorded(pressed, tokens)[0], logits)
            assert torch.equal(recorded(pressed, tokens)[0], other_logits)
            if "kind" in settings:  # the first router's inputs are the unpressed model's
                first = int(family == "jetmoe")
                same = other.ids[:, first, :, None] == trace.ids[:, first, None, :]
                assert (same.any(-1).sum(-1) == trace.ids.shape[-1] - 1).all()


@pytest.mark.parametrize("family", REFUSED)
def test_other_families_are_refused_by_name(family):
    with pytest.raises(UsageError, match=rf"rollout\.pressure: {REFUSED[family]}"):
        Pressure(TABLE[family].model().eval(), RoutingPressure(scale=1))


@torch.no_grad()
def test_noise_is_of_the_size_that_is_set():
    """scale times the rms of the row, element by element; other rows and layers have other
    noise."""
    model = make("qwen3_moe")
    pressure = Pressure(model, RoutingPressure(scale=0.5, seed=3))
    pressure.refresh(0)
    noise = []
    for router in pressure._pressed.values():
        weight = router._weight
        rms = weight.square().mean(1, keepdim=True).sqrt()
        noise.append((router._noisy - weight) / (0.5 * rms))
    flat = torch.stack(noise).flatten()
    assert flat.mean().abs() < 4 / len(flat) ** 0.5
    assert flat.std() == pytest.approx(1, abs=0.1)
    assert len({round(float(each[0, 0]), 3) for each in noise}) == len(noise)


@torch.no_grad()
def noisy_weights(settings, versions):
    pressure = Pressure(make("qwen3_moe"), settings)
    found = []
    for version in versions:
        pressure.refresh(version)
        found.append(torch.cat([each._noisy for each in pressure._pressed.values()]))
    return found


def test_redraw_depends_on_seed_and_version_only():
    drawn = noisy_weights(RoutingPressure(scale=1, redraw="sync"), [0, 1, 2, 1])
    assert torch.equal(drawn[1], drawn[3])
    assert len({float(each[0, 0]) for each in drawn}) == 3
    (again,) = noisy_weights(RoutingPressure(scale=1, redraw="sync"), [2])
    assert torch.equal(again, drawn[2])
    once = noisy_weights(RoutingPressure(scale=1), [0, 1])
    assert torch.equal(once[0], once[1])
    assert torch.equal(once[0], drawn[0])
    (other,) = noisy_weights(RoutingPressure(scale=1, seed=1), [0])
    assert not torch.equal(other, once[0])


def test_some_layers():
    """Layer 1 has the noise that it has when all have it; the others choose as without."""
    every = Pressure(make("qwen3_moe"), RoutingPressure(scale=1))
    some = Pressure(make("qwen3_moe"), RoutingPressure(scale=1, layers=(1,)))
    every.refresh(0)
    some.refresh(0)
    assert list(some._pressed) == [1]
    assert torch.equal(some._pressed[1]._noisy, every._pressed[1]._noisy)
    plain = run(pressed_engine(), REQUESTS)
    done = run(pressed_engine(scale=1.0, layers=(2,)), REQUESTS)
    first = min(len(done[1].routing), len(plain[1].routing))  # the prompt is the same at least
    assert torch.equal(done[1].routing.ids[:3, :2], plain[1].routing.ids[:3, :2])
    assert not torch.equal(done[1].routing.ids[:first, 2], plain[1].routing.ids[:first, 2])


def test_a_sync_presses_the_new_weights():
    """The engine that got other weights is the one that was built with them."""
    engine, other = pressed_engine(scale=1.0), make("qwen3_moe", seed=1)
    asyncio.run(engine.load_weights(other.state_dict().items(), 1))
    built = pressed_engine(model=other, scale=1.0)
    assert same(run(engine, REQUESTS), run(built, REQUESTS))


def test_a_recorder_takes_the_short_way():
    """The router's output holds the very ids that were selected, so that a decode loop needs no
    function mode around every step."""
    model = make("qwen3_moe")
    Pressure(model, RoutingPressure(scale=1)).refresh(0)
    with torch.no_grad(), bind_routers(model).record() as tape:
        for _ in range(2):
            model(input_ids=inputs(model), use_cache=False)
    assert [recorder._position for recorder in tape.recorders] == [2, 2, 2]


def test_models_that_cannot_be_pressed_are_refused_without_weights():
    whole, chosen = RoutingPressure(scale=1), RoutingPressure(scale=1, layers=(0, 1))
    with pytest.raises(UsageError, match=r"model_type='qwen3' has no routed experts"):
        check_pressure(whole, CONFIGS["qwen3_dense"])
    with pytest.raises(UsageError, match=r"layers: \[0\] are no MoE layers .* in \[1, 2\]"):
        check_pressure(chosen, CONFIGS["deepseek_v3"])
    with pytest.raises(UsageError, match=r"layers: \[7\] are no MoE layers"):
        Pressure(make("qwen3_moe"), RoutingPressure(scale=1, layers=(7,)))
    with pytest.raises(UsageError, match="selects all of its 8 experts and leaves out none"):
        Pressure(make("qwen3_moe", num_experts_per_tok=8), runner_up(scale=1))


def runner_up(**settings):
    return RoutingPressure(kind="runner-up", **settings)


@torch.no_grad()
def test_the_runner_up_takes_the_place_of_the_last():
    """Of the first router, whose scores are those of the unpressed model."""
    clean = make("qwen3_moe")
    tokens = inputs(clean)
    router = clean.model.layers[0].mlp.gate
    seen = []
    handle = router.register_forward_hook(lambda _, args, out: seen.append(out[0]))
    _, trace = recorded(clean, tokens)
    handle.remove()
    pressed = copy.deepcopy(clean)
    Pressure(pressed, runner_up(scale=1)).refresh(0)
    _, other = recorded(pressed, tokens)
    order = seen[0].view(-1, 8).argsort(-1, descending=True)
    assert torch.equal(trace.ids[:, 0].sort(-1).values.long(), order[:, :2].sort(-1).values)
    assert torch.equal(other.ids[:, 0].sort(-1).values.long(), order[:, [0, 2]].sort(-1).values)


def test_the_runner_up_depends_on_position_and_token_and_not_on_the_batch():
    """The same requests one after the other, in smaller batches, give the same completions."""
    together = run(pressed_engine(kind="runner-up", scale=0.3), REQUESTS)
    alone = pressed_engine(kind="runner-up", scale=0.3)
    for request, expected in zip(REQUESTS, together, strict=True):
        (done,) = run(alone, [request])
        assert torch.equal(done.token_ids, expected.token_ids)
        assert torch.equal(done.routing.ids, expected.routing.ids)


def drawn(settings, version, positions, ids):
    """Return which tokens of the first router lose an expert."""
    pressure = Pressure(make("qwen3_moe"), settings)
    pressure.refresh(version)
    return uniform_of(pressure._pressed[0]._keys, positions, ids) < settings.scale


def test_the_share_of_tokens_is_the_one_that_is_set():
    """And over all pairs of 200 positions and ids, the next position or id is independent."""
    positions, ids = torch.arange(200).repeat_interleave(200), torch.arange(200).repeat(200)
    shares = []
    for seed in range(20):
        lost = drawn(runner_up(scale=0.3, seed=seed), 0, positions, ids)
        shares.append(float(lost.double().mean()))
    assert sum(shares) / len(shares) == pytest.approx(0.3, abs=0.01)


def test_the_runner_up_is_drawn_anew_by_seed_and_with_sync_by_version():
    positions, ids = torch.arange(50), torch.arange(50) % 7
    first = drawn(runner_up(scale=0.5), 0, positions, ids)
    assert torch.equal(first, drawn(runner_up(scale=0.5), 3, positions, ids))
    assert not torch.equal(first, drawn(runner_up(scale=0.5, seed=1), 0, positions, ids))
    synced = drawn(runner_up(scale=0.5, redraw="sync"), 3, positions, ids)
    assert not torch.equal(first, synced)
    assert torch.equal(synced, drawn(runner_up(scale=0.5, redraw="sync"), 3, positions, ids))
