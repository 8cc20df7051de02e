"""`onepolicy engine check`: a sound engine passes every check, and each planted fault fails its own
check alone."""

import asyncio
import contextlib
import dataclasses
import re

import pytest
import torch

from onepolicy.build.components import load_tokenizer_and_max_len
from onepolicy.build.measure import build_engine_and_scorer, measure_config
from onepolicy.cli import main
from onepolicy.config import TrainingError
from onepolicy.engine_check.checks import require_correct_logprobs
from onepolicy.engine_check.command import NAMES, check_pair, check_seeds
from onepolicy.models.load import load_model
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.support.trace import KeptSet, SupportTrace
from support.engine_runs import teacher_forced
from support.planted_engine import SETTINGS


class Faulty:
    """A proxy of a sound engine. A fault changes requests or completions on their way."""

    def __init__(self, engine):
        self.engine, self.caps = engine, engine.caps

    @property
    def version(self):
        return self.engine.version

    async def generate(self, prompt_ids, sampling, *, seed):
        return await self.engine.generate(prompt_ids, sampling, seed=seed)

    async def load_weights(self, weights, version):
        await self.engine.load_weights(weights, version)

    async def reset_cache(self):
        await self.engine.reset_cache()


def after(change):
    """Return a fault of completions: change(completion) -> completion."""

    class Changed(Faulty):
        async def generate(self, prompt_ids, sampling, *, seed):
            return change(await super().generate(prompt_ids, sampling, seed=seed))

    Changed.__name__ = change.__name__
    return Changed


def rerouted(completion, **fields):
    return dataclasses.replace(
        completion, routing=dataclasses.replace(completion.routing, **fields)
    )


def shifted_logp(done):
    return dataclasses.replace(done, logp=done.logp.roll(1))


def swapped_layers(done):
    return rerouted(done, ids=done.routing.ids[:, [1, 0, 2]])


def late_routes(done):
    return rerouted(done, ids=done.routing.ids.roll(1, 0))


def missing_rows(done):
    return dataclasses.replace(done, routing=done.routing.rows(0, len(done.routing) - 1))


def with_sets(done, change):
    """change: list of KeptSet -> list of KeptSet."""
    if done.support is None:
        return done
    return dataclasses.replace(done, support=SupportTrace.join(change(done.support.split())))


def shifted_sets(done):
    return with_sets(done, lambda sets: [*sets[1:], sets[0]])


def missing_set(done):
    return with_sets(done, lambda sets: [KeptSet(sets[0].ids[:0]), *sets[1:]])


def sets_without_their_values_sum(done):
    return with_sets(done, lambda sets: [KeptSet(each.ids, each.logp - 0.1) for each in sets])


def sets_of_everything(done):
    everything = KeptSet(torch.arange(32, dtype=torch.int32))
    return with_sets(done, lambda sets: [everything] * len(sets))


def stripped_stop(done):
    if done.finish != "stop" or len(done.token_ids) < 2:
        return done
    return dataclasses.replace(
        done, token_ids=done.token_ids[:-1], logp=done.logp[:-1], version=done.version[:-1]
    )


def retokenised(done):
    ids = done.token_ids.clone()
    ids[len(ids) // 2 : -1] = ids[len(ids) // 2 : -1].flip(0)  # the last may be a stop token
    return dataclasses.replace(done, token_ids=ids)


def nan_logp(done):
    logp = done.logp.clone()
    logp[0] = float("nan")
    return dataclasses.replace(done, logp=logp)


def sampling_as(name, change):
    """Return a fault of requests: change(sampling) -> the fields that are other ones."""

    class Changed(Faulty):
        async def generate(self, prompt_ids, sampling, *, seed):
            sampling = dataclasses.replace(sampling, **change(sampling))
            return await super().generate(prompt_ids, sampling, seed=seed)

    Changed.__name__ = name
    return Changed


HiddenTopK = sampling_as("HiddenTopK", lambda asked: {"top_k": 5})
IgnoresTopK = sampling_as("IgnoresTopK", lambda asked: {"top_k": 0})
IgnoresTemperature = sampling_as(
    "IgnoresTemperature", lambda asked: {"temperature": min(1.0, asked.temperature)}
)
SamplesWhenGreedy = sampling_as(
    "SamplesWhenGreedy", lambda asked: {"temperature": asked.temperature or 1.0}
)


class IgnoresSeeds(Faulty):
    drawn = 0

    async def generate(self, prompt_ids, sampling, *, seed):
        self.drawn += 1
        return await super().generate(prompt_ids, sampling, seed=self.drawn)


class OneSeed(Faulty):
    async def generate(self, prompt_ids, sampling, *, seed):
        return await super().generate(prompt_ids, sampling, seed=7)


class Untempered(Faulty):
    """An engine that samples at the temperature and reports the model's own log-probabilities."""

    def __init__(self, engine):
        super().__init__(engine)
        self.model = load_model(engine.source, torch.float32, torch.device("cpu"))

    async def generate(self, prompt_ids, sampling, *, seed):
        done = await super().generate(prompt_ids, sampling, seed=seed)
        logp, _ = teacher_forced(self.model, prompt_ids, dataclasses.replace(done, routing=None))
        return dataclasses.replace(done, logp=logp.gather(-1, done.token_ids.long()[:, None])[:, 0])

    async def load_weights(self, weights, version):
        weights = list(weights)
        self.model.load_state_dict(dict(weights))
        await super().load_weights(weights, version)


class KeepsItsWeights(Faulty):
    async def load_weights(self, weights, version):
        self.engine.version = version


class DamagesExperts(Faulty):
    async def load_weights(self, weights, version):
        await super().load_weights(weights, version)
        with torch.no_grad():
            self.engine.model.model.layers[0].mlp.experts.down_proj.mul_(1.01)


class KeepsItsCache(Faulty):
    async def load_weights(self, weights, version):
        runner = self.engine._runner
        abort, runner.abort_requests = runner.abort_requests, lambda taken: None
        try:
            await super().load_weights(weights, version)
        finally:
            runner.abort_requests = abort


class Recorded(Faulty):
    """An engine that generates every request once: all checks ask the same, and scoring takes long
    enough."""

    def __init__(self, engine, source, memory):
        super().__init__(engine)
        self.source, self.memory, self.loads = source, memory, 0

    async def generate(self, prompt_ids, sampling, *, seed):
        place = (self.loads, tuple(prompt_ids), sampling, seed)
        if place not in self.memory:
            self.memory[place] = await super().generate(prompt_ids, sampling, seed=seed)
        return self.memory[place]

    async def load_weights(self, weights, version):
        self.loads += 1
        await super().load_weights(weights, version)


@pytest.fixture(scope="module")
def sound(policy):
    """Return engine and trainer, tokenizer, and the recorded completions."""
    settings = [f"model.path={policy}", *SETTINGS, "rollout.engine.dtype=float32"]
    settings.append("rollout.engine.max_len=32")
    config = measure_config({}, settings, None)
    tokenizer, max_len = load_tokenizer_and_max_len(config, config.model)
    return build_engine_and_scorer(config, config.model, max_len), tokenizer, {}


def checked(sound, kind=Faulty, *, live=False):
    """Run the checks. live: the fault is in the weights or the cache, so recorded completions are
    not valid."""
    pair, tokenizer, memory = sound
    source = pair.config.model
    engine = kind(pair.engine if live else Recorded(pair.engine, source, memory))
    pair.scorer.version = 0

    async def run():
        await pair.engine.load_weights(pair.scorer.named_weights(), 0)
        return await check_pair(dataclasses.replace(pair, engine=engine), tokenizer, source)

    found = asyncio.run(run())
    assert [check.name for check in found] == list(NAMES)
    return {check.name: check for check in found}


def test_a_sound_engine_passes_every_check(sound):
    found = checked(sound)
    assert all(check.passed for check in found.values()), found
    assert not any(check.fix for check in found.values())
    own = re.search(r"(\d+) of (\d+) returned sets are the trainer's own", found["support"].found)
    assert int(own[1]) >= 0.98 * int(own[2]) > 0


@pytest.mark.parametrize("cut", [False, True])
def test_an_engine_without_supports(sound, cut):
    """It is at fault only if the run samples with top-p."""
    pair = sound[0]
    if cut:
        rollout = pair.config.rollout
        sampling = rollout.sampling.model_copy(update={"top_p": 0.8})
        rollout = rollout.model_copy(update={"sampling": sampling})
        pair = dataclasses.replace(pair, config=pair.config.model_copy(update={"rollout": rollout}))
    found = checked((pair, *sound[1:]), after(lambda done: dataclasses.replace(done, support=None)))
    assert found["support"].passed is not cut
    assert "no supports are returned" in found["support"].found


def test_an_engine_without_seeds_is_not_asked_for_them(sound):
    engine = Faulty(sound[0].engine)
    engine.caps = dataclasses.replace(engine.caps, seeded=False)
    found = asyncio.run(check_seeds(dataclasses.replace(sound[0], engine=engine), [[1]], None))
    assert (found.name, found.passed) == ("seeds", None)
    assert "does not draw random numbers from seeds" in found.found


def slow(*parameters):
    return pytest.param(*parameters, marks=pytest.mark.slow)


OUTPUT = [
    (after(shifted_logp), "log-probabilities", "one token apart"),
    (after(nan_logp), "log-probabilities", "NaN"),
    (after(swapped_layers), "layers", "layer 0 holds the routes of layer 1"),
    (after(late_routes), "routes", "one row late"),
    (after(missing_rows), "routes", "it must return"),
    (after(stripped_stop), "tokens", "finish is stop, but the last token is not"),
    (after(retokenised), "tokens", "scored different tokens"),
    (IgnoresSeeds, "seeds", "0 of"),
    slow(OneSeed, "seeds", "with another"),
    (HiddenTopK, "support", "outside top_k=5"),
    slow(IgnoresTopK, "support", "asked for with top_k=3"),
    (after(shifted_sets), "support", "not in their own support"),
    (after(missing_set), "support", "sampled tokens have no support"),
    (after(sets_without_their_values_sum), "support", "add up to 0.9"),
    (after(sets_of_everything), "support", "of the probability apart"),
    (Untempered, "temperature", "they are not tempered"),
    slow(IgnoresTemperature, "temperature", "they are not tempered"),
    slow(SamplesWhenGreedy, "temperature", "likeliest token in"),
]
WEIGHTS = [
    (KeepsItsWeights, "nats from the weights just pushed"),
    slow(DamagesExperts, "moved the log-probabilities"),
    (KeepsItsCache, "where prefixes were cached"),
]


def names(value):
    return getattr(value, "__name__", None)


@pytest.mark.few(6)
@pytest.mark.parametrize(("kind", "name", "words"), OUTPUT, ids=names)
def test_an_output_fault_fails_its_own_check_alone(sound, kind, name, words):
    found = checked(sound, kind)
    assert [n for n in NAMES if found[n].passed is False] == [name], found
    assert words in found[name].found
    assert found[name].fix


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "words"), WEIGHTS, ids=names)
def test_a_fault_of_the_weights_fails_the_sync_alone(sound, kind, words):
    found = checked(sound, kind, live=True)
    assert [n for n in NAMES if found[n].passed is False] == ["weight sync"], found
    assert words in found["weight sync"].found


START = [(Faulty, None), (after(shifted_logp), "one token apart"), (after(nan_logp), "NaN")]
START += [(Untempered, "not tempered"), (HiddenTopK, "outside top_k=5")]


@pytest.mark.parametrize(("kind", "words"), START, ids=names)
def test_a_run_starts_only_with_the_sampled_probabilities(sound, kind, words):
    pair, tokenizer, _ = sound
    asyncio.run(pair.engine.load_weights(pair.scorer.named_weights(), 0))
    engine = kind(Recorded(pair.engine, pair.config.model, {}))
    stops = contextlib.nullcontext()
    if words:
        stops = pytest.raises(TrainingError, match=f"{kind.__name__}.*{words}")
    with stops:
        asyncio.run(require_correct_logprobs(engine, pair.scorer, tokenizer, pair.config))
    assert not pair.engine._runner.batch.rows.length.any()  # nothing stays cached


def test_a_run_with_such_an_engine_does_not_start(recipe, tmp_path, monkeypatch, capsys):
    sound = HFEngine.generate

    async def shifted(self, *request, **seed):
        return shifted_logp(await sound(self, *request, **seed))

    monkeypatch.setattr(HFEngine, "generate", shifted)
    assert main(["train", str(recipe), f"out={tmp_path / 'run'}"]) == 1
    assert "Every importance ratio would be wrong" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.full
def test_the_command_prints_the_table_and_sets_its_exit_status(policy, capsys):
    command = ["engine", "check", str(policy), "--engine", "hf", *SETTINGS]
    assert main([*command, "rollout.engine.lm_head=float32"]) == 0
    printed = capsys.readouterr().out
    assert all(name.split()[0] in printed for name in NAMES)
    assert "FAIL" not in printed


def test_bad_input_ends_with_one_message(capsys):
    for words, message in [
        ("rollout.engine.kind=hf", "give a recipe or a model before"),
        ("nowhere.toml", "no such recipe"),
        ("./nowhere", "no folder"),
        ("./nowhere --url http://localhost:1", "engine.url: unknown setting with kind=hf"),
    ]:
        assert main(["engine", "check", *words.split()]) == 2
        assert message in capsys.readouterr().err
