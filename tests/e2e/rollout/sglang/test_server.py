"""SGLang 0.5.23 itself on this CPU behind the RolloutEngine protocol: one server for all tests.
`make test-sglang`."""

import asyncio

import httpx2
import pytest
import torch

from onepolicy.cli import main
from onepolicy.config import ModelConfig
from onepolicy.config.policy import PolicyConfig
from onepolicy.envs.warmup.examples import task_alphabet
from onepolicy.models.load import load_model
from onepolicy.replay.checks import RouteSpec, check_completion
from onepolicy.sync.push import checked_push
from onepolicy.tiny.model import make_tokenizer
from onepolicy.types import Sampling
from support.metrics import rows
from support.sglang_live import (
    RULES,
    agreement,
    checksums,
    greedy,
    make_glm,
    open_engine,
    play,
    prompts,
    recipe,
    serving,
    stock,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sglang,
    pytest.mark.process,
    pytest.mark.timeout(900),
]
CPU = torch.device("cpu")
TASK = PolicyConfig().task


@pytest.fixture(scope="session")
def models(folders):
    return [load_model(ModelConfig(path=str(folder)), torch.float32, CPU) for folder in folders]


@pytest.fixture(scope="session")
def server(folders, tmp_path_factory):
    with serving(folders[0], tmp_path_factory.mktemp("sglang") / "server.log") as url:
        yield url


@pytest.fixture(scope="session")
def fresh(server, folders):
    """Return checksums of the server's initial weights, and greedy log-probabilities under them."""
    engine = open_engine(server, folders[0])
    assert engine.has_initial_checkpoint(str(folders[0]))
    asyncio.run(engine.attach(str(folders[0])))
    return checksums(server), greedy(engine)


@pytest.fixture
def engine(fresh, server, folders):
    """Return the engine with the first policy and nothing cached."""
    found = open_engine(server, folders[0])
    asyncio.run(found.load_checkpoint(None, 0))
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logp_and_routes_are_those_of_the_tokens(engine, models, temperature):
    lengths = enumerate(prompts(8))
    asked = [(p, Sampling(temperature, 5 + 3 * i, top_logprobs=2)) for i, p in lengths]
    for (prompt, sampling), done in zip(asked, play(engine, asked), strict=True):
        logp, routes = stock(models[0], prompt, done, temperature)
        torch.testing.assert_close(done.logp, logp, atol=2e-4, rtol=0)
        assert (len(done.token_ids), done.finish) == (sampling.max_tokens, "length")
        assert done.top_logp.shape == done.top_ids.shape == (sampling.max_tokens, 2)
        check_completion(done, prompt, RULES, "sample")
        assert agreement(done.routing.ids, routes) > 0.97
        assert {(span.source, span.version) for span in done.routing.spans[-1:]} == {("decode", 0)}


def test_narrowed_and_greedy_logp(engine, models):
    prompt = prompts(1)[0]
    (few,) = play(engine, [(prompt, Sampling(1.0, 20, top_k=2))])
    path = torch.tensor([[*prompt, *few.token_ids.tolist()]])
    with torch.no_grad():
        best = models[0](input_ids=path, use_cache=False).logits[0, len(prompt) - 1 : -1].topk(2)
    where = (best.indices == few.token_ids.long()[:, None]).int().argmax(-1)
    assert (best.indices.gather(-1, where[:, None])[:, 0] == few.token_ids).all()
    kept = torch.log_softmax(best.values, -1).gather(-1, where[:, None])[:, 0]
    torch.testing.assert_close(few.logp, kept, atol=2e-4, rtol=0)
    (nucleus,) = play(engine, [(prompt, Sampling(1.0, 20, top_p=1e-6))])
    (likeliest,) = play(engine, [(prompt, Sampling(0.0, 20))])
    assert torch.equal(nucleus.token_ids, likeliest.token_ids)
    assert (nucleus.logp == 0).all()
    expected, _ = stock(models[0], prompt, likeliest)
    torch.testing.assert_close(likeliest.logp, expected, atol=2e-4, rtol=0)


def test_cached_prefix_brings_its_routes(engine, models):
    (first,) = play(engine, [(prompts(1)[0], Sampling(1.0, 40))])
    prompt = prompts(1)[0] + first.token_ids.tolist()
    some = Sampling(1.0, 8, routes_from=len(prompt) - 4)
    whole, part = play(engine, [(prompt, Sampling(1.0, 8)), (prompt, some)])
    cached = whole.routing.spans[0]
    assert (cached.source, cached.start) == ("cache", 0)
    assert cached.length >= len(prompt) - 2
    rows = min(cached.length, len(first.routing))
    assert torch.equal(whole.routing.ids[:rows], first.routing.ids[:rows])
    assert part.first_slot == len(prompt) - 4
    for done in (whole, part):
        check_completion(done, prompt, RULES, "sample")
        logp, routes = stock(models[0], prompt, done)
        torch.testing.assert_close(done.logp, logp, atol=2e-4, rtol=0)
        assert agreement(done.routing.ids, routes[done.first_slot :]) > 0.97


def test_stops_at_our_token(engine):
    prompt = prompts(1)[0]
    (whole,) = play(engine, [(prompt, Sampling(0.0, 20))])
    stop = whole.token_ids[5].item()
    (done,) = play(engine, [(prompt, Sampling(0.0, 20, stop=(stop,)))])
    tokens = whole.token_ids.tolist()
    assert (done.token_ids.tolist(), done.finish) == (tokens[: tokens.index(stop) + 1], "stop")


class Learner:
    version = 5

    def __init__(self, model):
        self.model = model

    def named_weights(self, dtype=None):
        yield from self.model.state_dict().items()


@pytest.mark.parametrize("way", ["gloo", "disk"])
def test_updated_server_equals_one_that_loaded_the_checkpoint(fresh, server, folders, models, way):
    """Checksums of all tensors and log-probabilities equal those at the server's start and after
    its own load, to the bit."""
    engine = open_engine(server, folders[0], sync=way)
    asyncio.run(engine.load_checkpoint(str(folders[1]), 0))
    expected = checksums(server), greedy(engine)
    assert expected[0] != fresh[0]
    asyncio.run(engine.load_checkpoint(None, 0))
    assert checksums(server) == fresh[0]
    asyncio.run(checked_push(Learner(models[0]), engine, vocab=engine.caps.top_logprobs))
    assert (engine.version, checksums(server)) == (5, fresh[0])
    assert all(torch.equal(a, b) for a, b in zip(greedy(engine), fresh[1], strict=True))
    asyncio.run(engine.load_weights(models[1].state_dict().items(), 6))
    assert checksums(server) == expected[0]
    found = greedy(engine)
    assert all(torch.equal(a, b) for a, b in zip(found, expected[1], strict=True))
    (done,) = play(engine, [(prompts(1)[0], Sampling(1.0, 9))])
    assert done.version.tolist() == [6] * 9


@pytest.fixture
def slow(server):
    """Make requests of 300 tokens, which take at least 6 s."""
    httpx2.post(f"{server}/slow_down", json={"forward_sleep_time": 0.02})
    yield
    httpx2.post(f"{server}/slow_down", json={"forward_sleep_time": None})


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_requests_that_span_an_update(fresh, server, folders, models, slow, mode):
    engine = open_engine(server, folders[0], pause=mode)
    asyncio.run(engine.load_checkpoint(None, 0))
    paths = prompts(3)

    async def updated():
        asked = (engine.generate(p, Sampling(1.0, 300), seed=i) for i, p in enumerate(paths))
        running = [asyncio.create_task(each) for each in asked]
        # begun after them, ended long before them
        await engine.generate(paths[0], Sampling(1.0, 2), seed=8)
        await engine.load_weights(models[1].state_dict().items(), 1)
        later = await engine.generate(paths[0], Sampling(1.0, 3), seed=9)
        return await asyncio.gather(*running), later

    completions, later = asyncio.run(updated())
    for prompt, done in zip(paths, completions, strict=True):
        assert len(done.token_ids) == 300
        changed = done.version.tolist().index(1)
        assert changed
        assert done.version.tolist() == [0] * changed + [1] * (300 - changed)
        check_completion(done, prompt, RULES, mode)
        (before, old), (after, new) = stock(models[0], prompt, done), stock(models[1], prompt, done)
        torch.testing.assert_close(done.logp[:changed], before[:changed], atol=2e-4, rtol=0)
        first = len(prompt) - 1 + changed  # slot that sampled the first token of the new weights
        assert done.routing.ids.shape[0] == len(prompt) + 299
        if mode != "in_place":  # which goes on from keys and values of the old weights
            torch.testing.assert_close(done.logp[changed:], after[changed:], atol=2e-4, rtol=0)
            assert agreement(done.routing.ids[first:], new[first:]) > 0.97
        if mode == "retract":
            missing = (~done.routing.valid).nonzero()[:, 0].tolist()
            assert missing == list(range(len(prompt) - 1, first))
            assert agreement(done.routing.ids[: len(prompt) - 1], new[: len(prompt) - 1]) > 0.9
        else:
            assert done.routing.valid.all()
            assert agreement(done.routing.ids[:first], old[:first]) > 0.97
    assert later.version.tolist() == [1] * 3
    # also if a resumed request has its prompt cached by now
    assert later.routing.spans[0].version == 1
    expected, _ = stock(models[1], paths[0], later)
    torch.testing.assert_close(later.logp, expected, atol=2e-4, rtol=0)


def test_training_on_rollouts_with_replayed_routes(fresh, server, folders, tmp_path):
    """The run includes the sync check, R3, the detector, an evaluation and a checkpoint. A resumed
    run uses the same server."""
    assert main(["train", recipe(folders[0], server, tmp_path)]) == 0
    assert main(["train", "--resume", str(tmp_path / "run"), "steps=4"]) == 0
    steps = [row for row in rows(tmp_path / "run") if "mismatch/k3" in row]
    assert len(steps) == 4
    for row in steps:
        assert row["mismatch/k3"] < 1e-6
        assert row["replay/missing_samples"] == row["replay/native_rows"] == 0


def test_engine_check_passes(fresh, server, folders, tmp_path, capsys):
    status = main(["engine", "check", recipe(folders[0], server, tmp_path)])
    assert status == 0, capsys.readouterr().out


def test_a_family_with_dense_layers_and_other_names_is_synced(tmp_path):
    """GLM-4 MoE has a dense first layer, a sigmoid router with a bias, and other names for its
    fused experts."""
    model = make_glm()
    model.save_pretrained(tmp_path)
    make_tokenizer(task_alphabet(TASK)).save_pretrained(tmp_path)
    rules = RouteSpec((1, 2), 8, 2, "error")
    with serving(tmp_path, tmp_path / "server.log") as server:
        engine = open_engine(server, tmp_path, rules)
        for version in (0, 1):
            completions = play(engine, [(p, Sampling(1.0, 20)) for p in prompts(3)])
            for prompt, done in zip(prompts(3), completions, strict=True):
                check_completion(done, prompt, rules, "sample")
                logp, routes = stock(model, prompt, done)
                torch.testing.assert_close(done.logp, logp, atol=2e-4, rtol=0)
                assert done.version.tolist() == [version] * 20
                assert done.routing.layers == (1, 2)
                assert agreement(done.routing.ids, routes) > 0.97
            with torch.no_grad():
                for tensor in model.parameters():
                    tensor += 0.05 * torch.randn_like(tensor)
            asyncio.run(engine.load_weights(model.state_dict().items(), 1))
