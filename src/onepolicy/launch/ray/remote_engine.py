"""`RemoteEngine`: an engine in a Ray actor, as the loop sees it. It outlives its process.

Requests are pure functions of their prompt, sampling and seed, so what a lost process was asked is asked again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray
import torch
from ray.exceptions import (
    ActorDiedError,
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RayTaskError,
)

from onepolicy.config import TrainingError, UsageError
from onepolicy.config.cluster import RayCluster
from onepolicy.interfaces import EngineCaps
from onepolicy.launch.ray.replica_actor import NotBuilt
from onepolicy.launch.ray.wire import GenerateRequest, decode_replies, encode_requests
from onepolicy.rollout.fleet.broadcast import Broadcast
from onepolicy.rollout.servers.http import EngineLost
from onepolicy.sync.weight_files import Written
from onepolicy.types import Completion, Sampling

LOG = logging.getLogger(__name__)
PROCESS_LOST = (RayActorError, ObjectLostError, NodeDiedError, NotBuilt, TimeoutError)
"""What a process that is not there, or does not answer, looks like."""
COLLECT_TIMEOUT_S = 5.0
"""Seconds after which a replica answers even if no request has ended: it is alive."""
REBUILD_INTERVAL_S = 0.5
"""Seconds between two looks at whether a replica is back."""
REPLY_CHECKS = 10
"""At an answer that does not come, before it is given up."""


class RemoteEngine:
    """actor: a ReplicaProcess that was built from `text`. version and caps: what it then has."""

    def __init__(
        self, name: str, actor: Any, text: str, caps: EngineCaps, config: RayCluster, host: str
    ) -> None:
        """host: this machine's address for the replica."""
        self.name, self.caps, self.version = name, caps, 0
        self._actor, self._text, self._config, self._host = actor, text, config, host
        self._numbers = itertools.count()
        self._asked: dict[int, tuple[GenerateRequest, asyncio.Future[Completion]]] = {}
        self._unsent: list[int] = []
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._incarnation = 0  # of the process that requests are sent to
        self._builds = itertools.count(1)
        self._taken: list[int] = []  # answers that the process does not know to have arrived
        self._loading = 0
        self._recovery_lock = asyncio.Lock()
        self._weights: Written | None = None  # of load_files; None: those it was built with
        self._restarts = self._repeated = 0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Completion:
        """EngineLost if its process is gone for good."""
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        prompt = torch.as_tensor(prompt_ids, dtype=torch.int64)
        self._asked[number] = (GenerateRequest(prompt, sampling, seed), future)
        self._unsent.append(number)
        self._more.set()
        if (
            self._task is None
        ):  # starts once all that are asked in this turn of the event loop have been noted
            self._start()
        try:
            return await future
        finally:
            self._asked.pop(number, None)

    async def load_files(self, written: Written, shared: Broadcast | None = None) -> None:
        """See rollout.replicas.Replica."""
        self.version, self._weights = -1, written
        if (
            self._recovery_lock.locked()
        ):  # a new process is being given them, perhaps after older ones
            if shared is not None:
                shared.give_up()
            shared = None
            async with self._recovery_lock:
                pass
        while self.version != written.version:
            life = self._incarnation
            try:
                self.version = await self._load(written, shared)
                return
            except PROCESS_LOST as error:
                await self._recover(life, error)
            except TrainingError as error:
                if shared is None:
                    raise
                LOG.warning("%s is sent the weights once more, alone: %s", self.name, error)
            shared = None

    async def reset_cache(self) -> None:
        await self._retry_on_loss(
            lambda: self._call("reset_cache", limit=self._config.reply_timeout)
        )

    def take_metrics(self) -> dict[str, float]:
        """What was lost and repeated since the last call; {} if nothing."""
        counts = {
            "rollout/replica_restarts": self._restarts,
            "rollout/requests_repeated": self._repeated,
        }
        self._restarts = self._repeated = 0
        return {name: count for name, count in counts.items() if count}

    def _start(self) -> None:
        self._task = asyncio.create_task(self._exchange())
        self._task.add_done_callback(self._ended)

    async def _exchange(self) -> None:
        """Send what is asked, take answers, until nothing is left to wait for."""
        while self._asked:
            life = self._incarnation
            collecting: asyncio.Task[None] | None = None
            try:
                while self._asked and life == self._incarnation:
                    if self._unsent:
                        await self._send()
                    collecting = collecting or asyncio.create_task(self._collect(life))
                    more = asyncio.create_task(self._more.wait())
                    await asyncio.wait((collecting, more), return_when=asyncio.FIRST_COMPLETED)
                    more.cancel()
                    if collecting.done():
                        done, collecting = collecting, None
                        done.result()
            except PROCESS_LOST as error:
                await self._recover(life, error)
            finally:
                if collecting is not None:
                    collecting.cancel()

    async def _send(self) -> None:
        life = self._incarnation
        self._more.clear()
        requests = {
            number: self._asked[number][0] for number in self._unsent if number in self._asked
        }
        await self._call(
            "submit", life, encode_requests(requests), limit=self._config.reply_timeout
        )
        if life == self._incarnation:  # a new process has been asked nothing yet
            self._unsent = [
                number
                for number in self._unsent
                if number in self._asked and number not in requests
            ]

    async def _collect(self, life: int) -> None:
        limit, taken = self._config.reply_timeout, list(self._taken)
        answers = decode_replies(
            await self._call("collect", life, min(COLLECT_TIMEOUT_S, limit / 2), taken, limit=limit)
        )
        self._taken = list(answers)
        self._settle(answers)

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

    async def _retry_on_loss(self, act: Any) -> None:
        """Do it, with a new process if need be."""
        while True:
            life = self._incarnation
            try:
                return await act()
            except PROCESS_LOST as error:
                await self._recover(life, error)

    async def _recover(self, life: int, error: Exception) -> None:
        """A process with the model, the current weights and nothing to do; all that is asked will be sent again.

        EngineLost if Ray has given it up, or it takes too long.
        """
        async with self._recovery_lock:
            if life != self._incarnation:
                return  # somebody else saw it first
            LOG.warning("%s is gone (%s); waiting for Ray to restart it", self.name, _words(error))
            begun = time.monotonic()
            if isinstance(error, TimeoutError):
                ray.kill(self._actor, no_restart=False)
            try:
                async with asyncio.timeout(self._config.restart_timeout):
                    self._incarnation = await self._rebuild(error)
            except TimeoutError:
                ray.kill(self._actor)
                raise EngineLost(
                    f"{self.name} did not come back within {self._config.restart_timeout:g} s (cluster.restart_timeout)"
                ) from error
            self._restarts += 1
            self._repeated += len(self._asked)
            self._unsent = list(self._asked)
            self._more.set()
            seconds = time.monotonic() - begun
            LOG.warning(
                "%s is back after %.1f s; %d requests are repeated",
                self.name,
                seconds,
                len(self._asked),
            )

    async def _rebuild(self, error: Exception) -> int:
        """The new process's life: requests under it are taken from now on."""
        while True:
            if isinstance(error, ActorDiedError):
                raise EngineLost(
                    f"{self.name} is gone for good (cluster.restarts = {self._config.restarts})"
                ) from error
            try:
                life = next(self._builds)
                await self._call("build", self._text, life, limit=self._config.restart_timeout)
                while (newest := self._weights) is not None:
                    version = await self._load(newest)
                    if newest is self._weights:  # no update came meanwhile
                        self.version = version
                        break
                return life
            except PROCESS_LOST as again:
                error = again
                await asyncio.sleep(REBUILD_INTERVAL_S)

    async def _load(self, written: Written, shared: Broadcast | None = None) -> int:
        """From files: read by the replica, or read here and sent. shared: to others too. The version it then holds."""
        limit = self._config.restart_timeout
        self._loading += 1
        try:
            if self._config.weights == "disk":
                about = written.folder, written.version, written.key, written.sums
                return await self._call("load", *about, limit=limit)
            if shared is not None:
                return await shared.to(partial(self._receive, written.version))
            async with Broadcast(written, 1, host=self._host, limit=limit) as alone:
                return await alone.to(partial(self._receive, written.version))
        finally:
            self._loading -= 1

    async def _receive(self, version: int, invitation: str, rank: int) -> int:
        return await self._call(
            "receive", invitation, rank, version, limit=math.inf
        )  # whose limit is the broadcast's

    async def _call(self, method: str, *args: Any, limit: float) -> Any:
        """One of GONE, or the error that the method raised. limit: seconds; while weights are loaded, which has a limit
        of its own, requests may wait longer."""
        answer = asyncio.ensure_future(getattr(self._actor, method).remote(*args))
        asking = method in ("submit", "collect")
        try:
            return await wait_for_reply(answer, limit, lambda: asking and self._loading > 0)
        except RayTaskError as error:
            if isinstance(error.cause, NotBuilt):
                raise error.cause from None
            raise remote_error(self.name, error) from None


async def wait_for_reply(
    answer: asyncio.Future[Any], limit: float, excused: Callable[[], bool] = lambda: False
) -> Any:
    """Its result. TimeoutError if there is none after `limit` seconds in which this event loop could have seen it.

    What holds the event loop up, for however long, takes one of LOOKS parts of the limit. excused(): this one does not
    count.
    """
    left = REPLY_CHECKS
    try:
        while not answer.done():
            if left == 0:
                raise TimeoutError
            await asyncio.wait(
                (answer,), timeout=None if limit == math.inf else limit / REPLY_CHECKS
            )
            left -= not excused()
        return answer.result()
    finally:
        answer.cancel()


def remote_error(name: str, error: RayTaskError) -> Exception:
    """What a method raised in its own process, as it would be here."""
    cause = error.cause
    if isinstance(cause, TrainingError | UsageError):
        return type(cause)(f"{name}: {cause}")
    return TrainingError(f"{name}: {type(cause).__name__}: {cause}")


def _words(error: Exception) -> str:
    return "no answer" if isinstance(error, TimeoutError) else type(error).__name__
