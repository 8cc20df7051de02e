"""`RemoteEngine`: an engine in a Ray actor, as the loop sees it. It outlives its process.

Requests are pure functions of their prompt, sampling and seed, so what a lost process was asked is asked again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence
from typing import Any

import ray
import torch
from ray.exceptions import ActorDiedError, NodeDiedError, ObjectLostError, RayActorError, RayTaskError

from onepolicy.cluster.replica import NotBuilt
from onepolicy.cluster.wire import Request, decode_answers, encode_requests
from onepolicy.config import TrainingError, UsageError
from onepolicy.config.cluster import RayCluster
from onepolicy.interfaces import EngineCaps
from onepolicy.rollout.broadcast import Broadcast
from onepolicy.rollout.http import EngineLost
from onepolicy.sync.checksum import Sums
from onepolicy.types import Completion, Sampling

LOG = logging.getLogger(__name__)
GONE = (RayActorError, ObjectLostError, NodeDiedError, NotBuilt, TimeoutError)
"""What a process that is not there, or does not answer, looks like."""
POLL = 5.0
"""Seconds after which a replica answers even if no request has ended: it is alive."""
AGAIN = 0.5
"""Seconds between two looks at whether a replica is back."""
GRACE = 10.0
"""Seconds in which a replica whose broadcast took too long can say so itself."""


class RemoteEngine:
    """actor: a ReplicaProcess that was built from `text`. version and caps: what it then has."""

    def __init__(self, name: str, actor: Any, text: str, caps: EngineCaps, config: RayCluster, host: str) -> None:
        """host: this machine's address for the replica."""
        self.name, self.caps, self.version = name, caps, 0
        self._actor, self._text, self._config, self._host = actor, text, config, host
        self._numbers = itertools.count()
        self._asked: dict[int, tuple[Request, asyncio.Future[Completion]]] = {}
        self._unsent: list[int] = []
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._lives = 0  # processes that were given up
        self._mending = asyncio.Lock()
        self._weights: tuple[str, int, Sums] | None = None  # of load_files; None: those it was built with
        self._restarts = self._repeated = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int) -> Completion:
        """EngineLost if its process is gone for good."""
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        prompt = torch.as_tensor(prompt_ids, dtype=torch.int64)
        self._asked[number] = (Request(prompt, sampling, seed), future)
        self._unsent.append(number)
        self._more.set()
        if self._task is None:  # starts once all that are asked in this turn of the event loop have been noted
            self._start()
        try:
            return await future
        finally:
            self._asked.pop(number, None)

    async def load_files(self, folder: str, version: int, sums: Sums, shared: Broadcast | None = None) -> None:
        self.version, self._weights = -1, (folder, version, sums)
        while True:
            life = self._lives
            try:
                return await self._load(shared)
            except GONE as error:
                await self._mend(life, error)
                if self.version == version:  # a new process has been given them
                    return
            except TrainingError as error:
                if shared is None:
                    raise
                LOG.warning("%s is sent the weights once more, alone: %s", self.name, error)
            shared = None

    async def reset_cache(self) -> None:
        await self._insist(lambda: self._call("reset_cache", limit=self._config.reply_timeout))

    def take_metrics(self) -> dict[str, float]:
        """What was lost and repeated since the last call; {} if nothing."""
        counts = {"rollout/replica_restarts": self._restarts, "rollout/requests_repeated": self._repeated}
        self._restarts = self._repeated = 0
        return {name: count for name, count in counts.items() if count}

    def _start(self) -> None:
        self._task = asyncio.create_task(self._exchange())
        self._task.add_done_callback(self._ended)

    async def _exchange(self) -> None:
        """Send what is asked, take answers, until nothing is left to wait for."""
        collecting: asyncio.Task[bytes] | None = None
        wait = min(POLL, self._config.reply_timeout / 2)
        while self._asked:
            life = self._lives
            try:
                if self._unsent:
                    await self._send()
                if collecting is None:
                    collecting = asyncio.create_task(self._call("collect", wait, limit=self._config.reply_timeout))
                more = asyncio.create_task(self._more.wait())
                await asyncio.wait((collecting, more), return_when=asyncio.FIRST_COMPLETED)
                more.cancel()
                if collecting.done():
                    done, collecting = collecting, None
                    self._settle(decode_answers(done.result()))
            except GONE as error:
                if collecting is not None:
                    collecting.cancel()
                    collecting = None
                await self._mend(life, error)
        if collecting is not None:
            collecting.cancel()

    async def _send(self) -> None:
        self._more.clear()
        numbers = [number for number in self._unsent if number in self._asked]
        await self._call(
            "submit", encode_requests({n: self._asked[n][0] for n in numbers}), limit=self._config.reply_timeout
        )
        self._unsent = [number for number in self._unsent if number not in numbers]

    def _settle(self, answers: dict[int, Completion | Exception]) -> None:
        for number, answer in answers.items():
            if number not in self._asked:  # nobody waits for it any more
                continue
            _, future = self._asked.pop(number)
            if future.done():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """However the exchange ended, nobody is left waiting for it."""
        self._task = None
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            if self._asked:  # came between the exchange's last look and this call
                self._start()
            return
        for _, future in self._asked.values():
            if not future.done():
                future.set_exception(error)
        self._asked.clear()
        self._unsent.clear()

    async def _insist(self, act: Any) -> None:
        """Do it, with a new process if need be."""
        while True:
            life = self._lives
            try:
                return await act()
            except GONE as error:
                await self._mend(life, error)

    async def _mend(self, life: int, error: Exception) -> None:
        """A process with the model, the current weights and nothing to do; all that is asked will be sent again.

        EngineLost if Ray has given it up, or it takes too long.
        """
        async with self._mending:
            if life != self._lives:
                return  # somebody else saw it first
            LOG.warning("%s is gone (%s); waiting for Ray to restart it", self.name, _words(error))
            begun = time.monotonic()
            if isinstance(error, TimeoutError):
                ray.kill(self._actor, no_restart=False)
            try:
                async with asyncio.timeout(self._config.restart_timeout):
                    await self._come_back(error)
            except TimeoutError:
                ray.kill(self._actor)
                raise EngineLost(
                    f"{self.name} did not come back within {self._config.restart_timeout:g} s (cluster.restart_timeout)"
                ) from error
            self._lives += 1
            self._restarts += 1
            self._repeated += len(self._asked)
            self._unsent = list(self._asked)
            seconds = time.monotonic() - begun
            LOG.warning("%s is back after %.1f s; %d requests are repeated", self.name, seconds, len(self._asked))

    async def _come_back(self, error: Exception) -> None:
        limit = self._config.restart_timeout
        while True:
            if isinstance(error, ActorDiedError):
                raise EngineLost(
                    f"{self.name} is gone for good (cluster.restarts = {self._config.restarts})"
                ) from error
            try:
                await self._call("build", self._text, limit=limit)
                if self._weights is not None:
                    await self._load()
                return
            except GONE as again:
                error = again
                await asyncio.sleep(AGAIN)

    async def _load(self, shared: Broadcast | None = None) -> None:
        """The newest weights, from their files: read by the replica, or read here and sent. shared: to others too."""
        assert self._weights is not None
        folder, version, sums = self._weights
        limit = self._config.restart_timeout
        if self._config.weights == "disk":
            self.version = await self._call("load", folder, version, sums, limit=limit)
        elif shared is not None:
            self.version = await self._receive(shared, version)
        else:
            async with Broadcast(folder, version, 1, host=self._host, limit=limit) as alone:
                self.version = await self._receive(alone, version)

    async def _receive(self, broadcast: Broadcast, version: int) -> int:
        limit = broadcast.limit + GRACE
        return await broadcast.to(lambda *seat: self._call("receive", *seat, version, limit=limit))

    async def _call(self, method: str, *args: Any, limit: float) -> Any:
        """One of GONE, or the error that the method raised."""
        reference = getattr(self._actor, method).remote(*args)
        try:
            async with asyncio.timeout(limit):
                return await reference
        except RayTaskError as error:
            if isinstance(error.cause, NotBuilt):
                raise error.cause from None
            raise told(self.name, error) from None


def told(name: str, error: RayTaskError) -> Exception:
    """What a method raised in its own process, as it would be here."""
    cause = error.cause
    if isinstance(cause, TrainingError | UsageError):
        return type(cause)(f"{name}: {cause}")
    return TrainingError(f"{name}: {type(cause).__name__}: {cause}")


def _words(error: Exception) -> str:
    return "no answer" if isinstance(error, TimeoutError) else type(error).__name__
