"""Merged adapters: every completion of every engine has the adapter's name and version."""

import asyncio
import contextlib
from functools import cache

import pytest
import torch

from onepolicy.interfaces import EngineCaps
from onepolicy.launch.ray.replicas import Replicas
from onepolicy.rollout.remote.servers import ServerFleet
from onepolicy.sync.push import push_weights
from onepolicy.types import Completion, Sampling
from support import fake_vllm, sglang_engines
from support.adapter_learner import Learner
from support.fake_sglang import FakeSGLang
from support.fake_sglang_adapters import TAKES_ADAPTERS
from support.fake_vllm import HF, FakeVLLM, model_shape


class Replica:
    """An engine in another process: it names no adapter, because messages to it have none."""

    def __init__(self, name):
        self.name, self.version, self.caps = name, 0, EngineCaps(False, 64)

    async def generate(self, prompt_ids, sampling, *, seed):
        tokens = torch.tensor(prompt_ids[-1:], dtype=torch.int32)
        return Completion(tokens, torch.zeros(1), torch.full_like(tokens, self.version), "length")

    async def load(self, weights, version):
        self.version = version

    async def reset_cache(self):
        pass


@cache
def first(make, folder):
    """Return the first of the models that `make` writes into the folder."""
    return make(folder)[0]


@contextlib.contextmanager
def vllm_server(folder, count=1):
    path, model = first(fake_vllm.make_checkpoints, folder)
    with contextlib.ExitStack() as stack:
        told = {"adapters": {"rank": 8, "layers": ["q_proj"]}}  # it could load them by name
        fakes = [FakeVLLM(path, model_shape(HF), told=told) for _ in range(count)]
        for fake in fakes:
            stack.enter_context(fake.server)
        yield path, model, {f.server.url: lambda f=f: fake_vllm.engine_of(f) for f in fakes}


@contextlib.contextmanager
def sglang(folder, count=1):
    model, path = first(sglang_engines.make_models, folder)
    with contextlib.ExitStack() as stack:
        made = [FakeSGLang(path, info=dict(TAKES_ADAPTERS)) for _ in range(count)]
        fakes = [stack.enter_context(fake) for fake in made]
        made = {f.url: lambda f=f: sglang_engines.open_engine(f, connect=False) for f in fakes}
        yield path, model, made


@contextlib.contextmanager
def one_server(folder, serve):
    with serve(folder) as (_, model, clients):
        (make,) = clients.values()
        engine = make()
        asyncio.run(engine.connect())
        yield engine, model


@contextlib.contextmanager
def several(folder, serve):
    with serve(folder, 2) as (path, model, clients):
        fleet = ServerFleet(lambda url: clients[url](), lambda: list(clients))
        asyncio.run(fleet.start(path))
        yield fleet, model


@contextlib.contextmanager
def replicas(folder, _):
    model = torch.nn.Linear(2, 2)
    yield Replicas([Replica("a"), Replica("b")], lambda value: value), model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


SERVED = [(one_server, vllm_server), (several, vllm_server), (one_server, sglang)]


@pytest.mark.few(2)
@pytest.mark.parametrize(("build", "serve"), [*SERVED, (replicas, None)])
def test_every_completion_has_name_and_version(folder, build, serve):
    prompts = [[i, i + 1, 5] for i in range(3, 9)]

    async def sample():
        calls = (engine.generate(p, Sampling(1.0, 3), seed=i) for i, p in enumerate(prompts))
        return await asyncio.gather(*calls)

    with build(folder, serve) as (engine, model):
        assert {done.adapter for done in asyncio.run(sample())} == {None}
        assert not engine.caps.takes_adapter
        learner = Learner(model)
        for version in (0, 1):
            learner.version = version
            asyncio.run(push_weights(learner, engine))
            for done in asyncio.run(sample()):
                assert (done.adapter, set(done.version.tolist())) == ("lora-run", {version})
