"""`ActorEngine`: an engine in a Ray actor, which keeps working when Ray restarts the actor.

A completion is a function of the prompt, the sampling settings and the seed. So requests that a
lost process did not answer are sent again to its successor.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
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
from onepolicy.rollout.remote.broadcast import ReplicaBroadcast
from onepolicy.rollout.remote.client import EngineLost
from onepolicy.sync.weight_files import WrittenWeights
from onepolicy.types import Completion, Sampling

LOG = logging.getLogger(__name__)
PROCESS_LOST = (RayActorError, ObjectLostError, NodeDiedError, NotBuilt, TimeoutError)
"""Errors of a call to a process that is gone or does not reply."""
COLLECT_TIMEOUT_S = 5.0
"""Seconds after which a replica replies even if no request has finished: it is alive."""
REBUILD_INTERVAL_S = 0.5
"""Seconds between two attempts to build the engine in a restarted process."""
REPLY_CHECKS = 10
"""Number of checks for a reply before the caller gives up."""


class ActorEngine:
    """A rollout engine in a ReplicaProcess that was built from the JSON `settings`.

    Every process of the replica has an incarnation number. A message to an earlier incarnation is
    refused, so that a request which was sent twice is not run twice.
    """

    def __init__(
        self, name: str, actor: Any, settings: str, caps: EngineCaps, config: RayCluster, host: str
    ) -> None:
        """Connect to an engine that has been built.

        caps: those of that engine. host: address of this machine as the replica sees it.
        """
        self.name, self.caps, self.version = name, caps, 0
        self._actor, self._settings, self._config, self._host = actor, settings, config, host
        self._numbers = itertools.count()  # one for each request
        self._pending: dict[int, tuple[GenerateRequest, asyncio.Future[Completion]]] = {}
        self._unsent: list[int] = []
        self._new_request = asyncio.Event()
        self._exchange_task: asyncio.Task[None] | None = None
        self._incarnation = 0  # of the process that requests are sent to
        self._next_incarnation = itertools.count(1)
        self._unacknowledged: list[
            int
        ] = []  # replies that the process does not know to have arrived
        self._loading = 0  # running calls of _load
        self._recovery_lock = asyncio.Lock()
        self._loaded: WrittenWeights | None = (
            None  # by load_files; None: the weights it was built with
        )
        self._restart_count = self._repeated_count = 0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Completion:
        """Return the completion of one request.

        Raises EngineLost if the process is gone for good.
        """
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        prompt = torch.as_tensor(prompt_ids, dtype=torch.int64)
        self._pending[number] = (GenerateRequest(prompt, sampling, seed), future)
        self._unsent.append(number)
        self._new_request.set()
        # The exchange starts in the next turn of the event loop, so that all requests of this turn
        # are sent in one message.
        if self._exchange_task is None:
            self._start_exchange()
        try:
            return await future
        finally:
            self._pending.pop(number, None)

    async def load_files(
        self, written: WrittenWeights, shared: ReplicaBroadcast | None = None
    ) -> None:
        """Load weights. See rollout.remote.replicas.Replica."""
        self.version, self._loaded = -1, written
        if self._recovery_lock.locked():
            # A new process is being built. It may be loading older weights.
            if shared is not None:
                shared.cancel()
            shared = None
            async with self._recovery_lock:
                pass
        while self.version != written.version:
            incarnation = self._incarnation
            try:
                self.version = await self._load(written, shared)
                return
            except PROCESS_LOST as error:
                await self._recover(incarnation, error)
            except TrainingError as error:
                if shared is None:
                    raise
                LOG.warning("%s is sent the weights once more, alone: %s", self.name, error)
            shared = None

    async def reset_cache(self) -> None:
        """Discard the engine's cached prefixes, in a new process if the present one is lost."""
        reset = partial(self._call, "reset_cache", limit=self._config.reply_timeout)
        await self._retry_on_loss(reset)

    def take_metrics(self) -> dict[str, float]:
        """Return the counts of restarts and repeated requests since the last call, if not 0."""
        counts = {
            "rollout/replica_restarts": self._restart_count,
            "rollout/requests_repeated": self._repeated_count,
        }
        self._restart_count = self._repeated_count = 0
        return {name: count for name, count in counts.items() if count}

    def _start_exchange(self) -> None:
        self._exchange_task = asyncio.create_task(self._exchange())
        self._exchange_task.add_done_callback(self._exchange_ended)

    async def _exchange(self) -> None:
        """Send requests and collect replies until no request is pending."""
        while self._pending:
            await self._exchange_with(self._incarnation)

    async def _exchange_with(self, incarnation: int) -> None:
        """Send requests and collect replies until no request is pending or the process is lost."""
        collecting: asyncio.Task[None] | None = None
        try:
            while self._pending and incarnation == self._incarnation:
                if self._unsent:
                    await self._submit_unsent()
                collecting = collecting or asyncio.create_task(self._collect_replies(incarnation))
                new_request = asyncio.create_task(self._new_request.wait())
                await asyncio.wait((collecting, new_request), return_when=asyncio.FIRST_COMPLETED)
                new_request.cancel()
                if collecting.done():
                    finished, collecting = collecting, None
                    finished.result()
        except PROCESS_LOST as error:
            await self._recover(incarnation, error)
        finally:
            if collecting is not None:
                collecting.cancel()

    async def _submit_unsent(self) -> None:
        incarnation = self._incarnation
        self._new_request.clear()
        numbers = [number for number in self._unsent if number in self._pending]
        requests = {number: self._pending[number][0] for number in numbers}
        data = encode_requests(requests)
        await self._call("submit_requests", incarnation, data, limit=self._config.reply_timeout)
        if incarnation == self._incarnation:  # else the new process has none of these requests
            self._unsent = [
                number
                for number in self._unsent
                if number in self._pending and number not in requests
            ]

    async def _collect_replies(self, incarnation: int) -> None:
        limit, acknowledged = self._config.reply_timeout, list(self._unacknowledged)
        timeout = min(COLLECT_TIMEOUT_S, limit / 2)
        data = await self._call("collect_replies", incarnation, timeout, acknowledged, limit=limit)
        replies = decode_replies(data)
        self._unacknowledged = list(replies)
        self._resolve_futures(replies)

    def _resolve_futures(self, replies: dict[int, Completion | Exception]) -> None:
        for number, reply in replies.items():
            if number not in self._pending:  # its caller has been cancelled
                continue
            _, future = self._pending.pop(number)
            if future.done():
                continue
            if isinstance(reply, Exception):
                future.set_exception(reply)
            else:
                future.set_result(reply)

    def _exchange_ended(self, task: asyncio.Task[None]) -> None:
        """Fail all pending requests if the exchange ended with an error.

        Start it again if requests have come since.
        """
        self._exchange_task = None
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            if self._pending:  # they came between the exchange's last check and this call
                self._start_exchange()
            return
        for _, future in self._pending.values():
            if not future.done():
                future.set_exception(error)
        self._pending.clear()
        self._unsent.clear()

    async def _retry_on_loss(self, action: Callable[[], Awaitable[Any]]) -> None:
        """Run `action` until it succeeds, with a new process after each loss."""
        while True:
            incarnation = self._incarnation
            try:
                await action()
                return
            except PROCESS_LOST as error:
                await self._recover(incarnation, error)

    async def _recover(self, incarnation: int, error: Exception) -> None:
        """Wait until a new process has the newest weights, and mark all pending requests unsent.

        Raises EngineLost if Ray does not restart the process any more, or not within
        cluster.restart_timeout.
        """
        async with self._recovery_lock:
            if incarnation != self._incarnation:
                return  # another caller has recovered it
            reason = _describe_loss(error)
            LOG.warning("%s is gone (%s); waiting for Ray to restart it", self.name, reason)
            begun = time.monotonic()
            if isinstance(error, TimeoutError):
                ray.kill(self._actor, no_restart=False)
            try:
                async with asyncio.timeout(self._config.restart_timeout):
                    self._incarnation = await self._rebuild(error)
            except TimeoutError:
                ray.kill(self._actor)
                raise EngineLost(
                    f"{self.name} did not come back within {self._config.restart_timeout:g} s "
                    "(cluster.restart_timeout)"
                ) from error
            self._restart_count += 1
            self._repeated_count += len(self._pending)
            self._unsent = list(self._pending)
            self._new_request.set()
            LOG.warning(
                "%s is back after %.1f s; %d requests are repeated",
                self.name,
                time.monotonic() - begun,
                len(self._pending),
            )

    async def _rebuild(self, error: Exception) -> int:
        """Build the engine in the restarted process and load the newest weights.

        Return the new incarnation.
        """
        while True:
            if isinstance(error, ActorDiedError):
                raise EngineLost(
                    f"{self.name} is gone for good (cluster.restarts = {self._config.restarts})"
                ) from error
            try:
                incarnation = next(self._next_incarnation)
                limit = self._config.restart_timeout
                await self._call("build", self._settings, incarnation, limit=limit)
                await self._load_newest()
                return incarnation
            except PROCESS_LOST as next_error:
                error = next_error
                await asyncio.sleep(REBUILD_INTERVAL_S)

    async def _load_newest(self) -> None:
        """Load the weights of the newest `load_files`.

        If `load_files` is called meanwhile, load its weights too.
        """
        while self._loaded is not None:
            newest = self._loaded
            version = await self._load(newest)
            if newest is self._loaded:
                self.version = version
                return

    async def _load(self, written: WrittenWeights, shared: ReplicaBroadcast | None = None) -> int:
        """Load weights and return their version.

        The replica reads the files, or this process reads and sends them. shared: a broadcast to
        other replicas too.
        """
        limit = self._config.restart_timeout
        self._loading += 1
        try:
            if self._config.sync == "disk":
                files = written.folder, written.version, written.key, written.sums
                return await self._call("load_weight_files", *files, limit=limit)
            receive = partial(self._receive, written.version)
            if shared is not None:
                return await shared.send_to(receive)
            async with ReplicaBroadcast(written, 1, host=self._host, limit=limit) as single:
                return await single.send_to(receive)
        finally:
            self._loading -= 1

    async def _receive(self, version: int, invitation: str, rank: int) -> int:
        # The broadcast has a time limit of its own.
        return await self._call("receive_weights", invitation, rank, version, limit=math.inf)

    async def _call(self, method: str, *args: Any, limit: float) -> Any:
        """Call a method of the actor.

        Raises one of PROCESS_LOST, or the error that the method raised. limit: seconds. While
        weights are loaded, which has a limit of its own, requests and replies may wait longer.
        """
        reply = asyncio.ensure_future(getattr(self._actor, method).remote(*args))
        waits_for_loading = method in ("submit_requests", "collect_replies")
        try:
            return await wait_for_reply(
                reply, limit, lambda: waits_for_loading and self._loading > 0
            )
        except RayTaskError as error:
            if isinstance(error.cause, NotBuilt):
                raise error.cause from None
            raise remote_error(self.name, error) from None


async def wait_for_reply(
    reply: asyncio.Future[Any], limit: float, paused: Callable[[], bool] = lambda: False
) -> Any:
    """Return the result of `reply`. Raises TimeoutError if there is none after `limit` seconds.

    The limit is divided into REPLY_CHECKS checks. A blocked event loop costs one check, however
    long it is blocked, so a reply that arrived meanwhile is not lost. A check during which paused()
    is true does not count.
    """
    checks_left = REPLY_CHECKS
    interval = None if limit == math.inf else limit / REPLY_CHECKS
    try:
        while not reply.done():
            if checks_left == 0:
                raise TimeoutError
            await asyncio.wait((reply,), timeout=interval)
            checks_left -= not paused()
        return reply.result()
    finally:
        reply.cancel()


def remote_error(name: str, error: RayTaskError) -> Exception:
    """Return the error that a method of process `name` raised, as an error of this process."""
    cause = error.cause
    if isinstance(cause, TrainingError | UsageError):
        return type(cause)(f"{name}: {cause}")
    return TrainingError(f"{name}: {type(cause).__name__}: {cause}")


def _describe_loss(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    return type(error).__name__
