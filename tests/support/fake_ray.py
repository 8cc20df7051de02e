"""A Ray actor without Ray, around a real ReplicaProcess and an engine without a model."""

import asyncio

import torch
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from onepolicy.config import UsageError
from onepolicy.interfaces import EngineCaps
from onepolicy.launch.ray import replica_actor
from onepolicy.types import Completion


class Engine:
    """An engine of the replica's process that samples the prompt's first token, one event loop turn
    per requested token."""

    ready_to_load = True

    def __init__(self):
        self.caps, self.version = EngineCaps(False, 64), 0
        self.started, self.may_load = [], asyncio.Event()
        if self.ready_to_load:
            self.may_load.set()

    async def generate(self, prompt_ids, sampling, *, seed):
        self.started.append(seed)
        for _ in range(sampling.max_tokens):
            await asyncio.sleep(0.001)
        if sampling.temperature == 9.0:
            raise UsageError("too hot")
        tokens = torch.tensor([prompt_ids[0]] * sampling.max_tokens, dtype=torch.int32)
        return Completion(
            tokens, torch.zeros(len(tokens)), torch.full_like(tokens, self.version), "length"
        )

    async def load_weights(self, weights, version):
        await self.may_load.wait()
        assert [name for name, _ in weights] == ["w"]
        self.version = version

    async def reset_cache(self):
        pass


class Actor:
    """A Ray actor without Ray. `die` loses its process, its memory and its requests.

    chance: a random.Random; now and then a message to the actor is lost, or its answer, while its
    process lives.
    """

    def __init__(self, restarts=1, chance=None):
        self.chance = chance
        self.restarts, self.calls, self.pending, self.hung = restarts, [], [], False
        self.process = replica_actor.ReplicaProcess()

    def __getattr__(self, method):
        return type("Method", (), {"remote": lambda _, *args: self.call(method, args)})()

    def call(self, method, args):
        self.calls.append(method)
        if self.process is None:
            return self.failed(
                ActorDiedError() if self.restarts < 0 else ActorUnavailableError("restarting", None)
            )
        lost = self.chance.random() if self.chance else 1.0
        if lost < 0.05:
            return self.failed(ActorUnavailableError("never arrived", None))
        answer = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(self.run(getattr(self.process, method), args, answer))
        self.pending.append((task, answer))
        if lost < 0.1:
            answer.cancel()
            return self.failed(ActorUnavailableError("its answer is lost", None))
        return answer

    async def run(self, method, args, answer):
        (result,) = await asyncio.gather(method(*args), return_exceptions=True)
        if self.hung:
            await asyncio.sleep(3600)
        if answer.done():
            return
        if isinstance(result, Exception):
            answer.set_exception(RayTaskError("method", "trace", result))
        else:
            answer.set_result(result)

    async def failed(self, error):
        raise error

    def die(self):
        self.restarts -= 1
        self.process = None
        for task, answer in self.pending:
            task.cancel()
            if not answer.done():
                answer.set_exception(ActorUnavailableError("its process died", None))
        if self.restarts >= 0:
            asyncio.get_running_loop().call_later(0.05, self.restart)

    def restart(self):
        self.process, self.pending, self.hung = replica_actor.ReplicaProcess(), [], False
