"""A Ray actor without Ray, around a real ReplicaProcess and an engine without a model."""

import asyncio

import torch
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ObjectLostError,
    RayTaskError,
    TaskCancelledError,
)

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
        self.started, self.loaded, self.running = [], [], 0
        self.running_at_load = []  # requests, at the begin of each load
        self.may_load = asyncio.Event()
        if self.ready_to_load:
            self.may_load.set()

    async def generate(self, prompt_ids, sampling, *, seed):
        self.started.append(seed)
        self.running += 1
        try:
            for _ in range(sampling.max_tokens):
                await asyncio.sleep(0.001)
        finally:
            self.running -= 1
        if sampling.temperature == 9.0:
            raise UsageError("too hot")
        tokens = torch.tensor([prompt_ids[0]] * sampling.max_tokens, dtype=torch.int32)
        return Completion(
            tokens, torch.zeros(len(tokens)), torch.full_like(tokens, self.version), "length"
        )

    async def load_weights(self, weights, version):
        self.running_at_load.append(self.running)
        await self.may_load.wait()
        ((name, tensor),) = weights
        assert name == "w"
        self.loaded.append(tensor.item())
        self.version = version

    async def reset_cache(self):
        pass


class Reference:
    """A value in the object store. lost: times that it does not arrive. stuck: it is on its way
    until `arrive`."""

    def __init__(self, value, lost=0, stuck=False):
        self.value, self.lost, self.fetched = value, lost, 0
        self.arrive = asyncio.Event()
        if not stuck:
            self.arrive.set()

    def __await__(self):
        self.fetched += 1
        yield from self.arrive.wait().__await__()
        if self.lost:
            self.lost -= 1
            raise ObjectLostError("ref", None, "")
        return self.value


class Reply:
    """A reference to the answer of a call. Whoever awaits it may be cancelled, the call is not."""

    def __init__(self, actor):
        self.actor, self.answer = actor, asyncio.get_running_loop().create_future()

    def __await__(self):
        return asyncio.shield(self.answer).__await__()


class Actor:
    """A Ray actor without Ray. `die` loses its process and its memory; the next process gets the
    calls that were not answered, in their order, but for pings.

    chance: a random.Random; now and then an answer is lost on its way. unreachable: pings find no
    process, though there is one, and `miss` says so. death: the error of a process without another.
    """

    death = ActorDiedError()
    miss = ActorUnavailableError("it cannot be reached", None)

    def __init__(self, restarts=1, chance=None):
        self.chance = chance
        self.restarts, self.calls, self.pending, self.hung = restarts, [], {}, False
        self.pauses = []  # that pings asked for
        self.unreachable = False
        self.process = replica_actor.ReplicaProcess()

    def __getattr__(self, method):
        own = {"remote": lambda _, *args: self.call(method, args), "options": lambda it, **_: it}
        return type("Method", (), own)()

    def call(self, method, args):
        self.calls.append(method)
        if method == "ping":
            self.pauses += args
        reply = Reply(self)
        answer = reply.answer
        self.pending[answer] = method, args, None
        answer.add_done_callback(self.forget)
        if self.restarts < 0:
            answer.set_exception(self.death)
        elif self.unreachable and method == "ping":
            answer.set_exception(self.miss)
        elif self.process is not None:
            self.start(answer)
        return reply

    def forget(self, answer):
        self.pending.pop(answer, None)
        if not answer.cancelled():
            answer.exception()  # it is not missed if nobody waits for it any more

    def cancel(self, reply):
        """End a call a little later, unless it has ended."""

        def end():
            if reply.answer.done():
                return
            _, _, task = self.pending[reply.answer]
            if task is not None:
                task.cancel()
            reply.answer.set_exception(RayTaskError("method", "trace", TaskCancelledError()))

        asyncio.get_running_loop().call_later(0.02, end)

    def start(self, answer):
        method, args, _ = self.pending[answer]
        task = asyncio.ensure_future(self.run(getattr(self.process, method), args, answer))
        self.pending[answer] = method, args, task

    async def run(self, method, args, answer):
        (result,) = await asyncio.gather(method(*args), return_exceptions=True)
        if self.hung:
            await asyncio.sleep(3600)
        if answer.done():
            return
        if self.chance and self.chance.random() < 0.05:
            answer.set_exception(ObjectLostError("ref", None, ""))
        elif isinstance(result, Exception):
            answer.set_exception(RayTaskError("method", "trace", result))
        else:
            answer.set_result(result)

    def die(self):
        self.restarts -= 1
        self.process = None
        for answer, (method, _, task) in list(self.pending.items()):
            if task is not None:
                task.cancel()
            if self.restarts < 0 and not answer.done():
                answer.set_exception(self.death)
            elif method == "ping" and task is not None and not answer.done():
                answer.set_exception(ActorUnavailableError("its process died", None))
        if self.restarts >= 0:
            asyncio.get_running_loop().call_later(0.05, self.restart)

    def restart(self):
        self.process, self.hung = replica_actor.ReplicaProcess(), False
        for answer in list(self.pending):
            if not answer.done():
                self.start(answer)
