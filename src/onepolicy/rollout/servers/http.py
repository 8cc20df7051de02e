"""JSON over HTTP to an engine in another process: retries with a bound, time limits, errors that say what to do.

A request is tried again after what may be over the next time: no connection, a connection that broke, a time-out, a 5xx
status, a body that is not what was asked for. Any other status is an answer, and ends it. All requests of ours can be
repeated: they name the seed, or set a state. A cancelled call closes its connection, which engines take as an abort.
"""

from __future__ import annotations

import asyncio
import importlib.util
import ipaddress
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from onepolicy.config import (
    ServerEngineConfig,
    ServiceUnavailable,
    TrainingError,
    UsageError,
    printable,
)
from onepolicy.config.address import check_url
from onepolicy.rollout.servers.replies import (
    MAX_REPLY_BYTES,
    MalformedReply,
    parse_json,
    read_body,
)
from onepolicy.rollout.servers.token import find_token, token_from_env


class RequestGate:
    """Of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, max_num_seqs: int) -> None:
        self.loop, self.running = loop, 0
        self.open, self.idle = asyncio.Event(), asyncio.Event()
        self.open.set()
        self.idle.set()
        self._sequences = asyncio.Semaphore(max_num_seqs)

    @asynccontextmanager
    async def admit_request(self) -> AsyncIterator[None]:
        """Held by a request; waits while all slots are taken, or it is not open."""
        async with self._sequences:
            await self.open.wait()
            self.running += 1
            self.idle.clear()
            try:
                yield
            finally:
                self.running -= 1
                if not self.running:
                    self.idle.set()


def for_running_loop(known: RequestGate | None, max_num_seqs: int) -> RequestGate:
    """`known`, if it is that of the running event loop; nothing of an earlier one can be running."""
    loop = asyncio.get_running_loop()
    return known if known is not None and known.loop is loop else RequestGate(loop, max_num_seqs)


if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")
TOKEN_ENV = "rollout.engine.token_env"
FIRST_WAIT, LONGEST_WAIT = 0.25, 8.0  # s, before the first retry; doubled until
SHOWN = 300  # characters of a body in an error


class EngineLost(TrainingError):
    """The server gives no usable reply, or is no longer the one that was given this run's weights."""


class EngineUnreachable(ServiceUnavailable):
    """No server gave a usable reply while the run started."""


class _NoReply(Exception):
    """An attempt that another one may mend."""


@dataclass(slots=True)
class RequestCounters:
    """Since the last take_counters."""

    requests: int = 0  # calls of get and post
    retried: int = 0  # attempts after the first
    dropped: int = 0  # calls that ended without a reply: out of retries, refused, or cancelled


class EngineClient:
    """One engine's HTTP API. May be used from one event loop after another; connections live as long as their loop."""

    def __init__(
        self,
        url: str,
        *,
        token_env: str | None = None,
        timeout_s: float = 600.0,
        retries: int = 5,
        server: str,
    ) -> None:
        """token_env: environment variable with a bearer token; None: what a server of this machine has left in its file
        (rollout/servers/token.py). timeout_s: of one attempt. server: its name in errors.

        UsageError for a URL that is none, a variable that is not set or holds no token, or without httpx2.
        """
        parts = check_url(url)
        if importlib.util.find_spec("httpx2") is None:
            raise UsageError(
                "rollout.engine: an engine over HTTP needs httpx2; pip install 'onepolicy[server]'"
            )
        self.url, self.server, self.counters = url.rstrip("/"), server, RequestCounters()
        self._timeout_s, self._retries = timeout_s, retries
        self._token_env, self._token = (
            token_env,
            None if token_env is None else token_from_env(token_env, TOKEN_ENV),
        )
        if token_env is None and not is_loopback(parts.hostname or ""):
            raise UsageError(
                f"{TOKEN_ENV}: the server is on another machine; protect it with a token and name the environment "
                "variable that holds it"
            )
        self._error: type[EngineUnreachable] | type[EngineLost] = EngineLost
        self._in_flight = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened: AsyncGenerator[httpx2.AsyncClient] | None = None
        self._client: httpx2.AsyncClient | None = None

    @contextmanager
    def startup_errors(self) -> Iterator[None]:
        """While a run starts, what goes wrong is a UsageError (no reply: NoEngine); afterwards it is a TrainingError
        (no reply: EngineLost)."""
        before, self._error = self._error, EngineUnreachable
        try:
            yield
        finally:
            self._error = before

    async def get(self, path: str, *, parse: Callable[[Any], T] = lambda reply: reply) -> T:
        """The reply as JSON (None if empty, text if it is no JSON), through `parse`."""
        return await self._ask("GET", path, parse, self._timeout_s, MAX_REPLY_BYTES)

    async def post(
        self,
        path: str,
        body: Any = None,
        *,
        params: Mapping[str, str] | None = None,
        parse: Callable[[Any], T] = lambda reply: reply,
        timeout_s: float | None = None,
        max_bytes: int = MAX_REPLY_BYTES,
        confirm: Callable[[], Awaitable[None]] | None = None,
    ) -> T:
        """body: sent as JSON. timeout_s: of one attempt, if other than the client's. most: bytes of the reply.

        confirm: awaited after a reply that took more than one attempt: the server may have been another one by then.
        """
        limit = timeout_s or self._timeout_s
        return await self._ask(
            "POST", path, parse, limit, max_bytes, confirm, json=body, params=params
        )

    def take_counters(self) -> RequestCounters:
        taken, self.counters = self.counters, RequestCounters()
        return taken

    def take_metrics(self) -> dict[str, float]:
        """Since the last call, as a run logs them (run/metric_names.py)."""
        taken = self.take_counters()
        return {
            "rollout/requests": taken.requests,
            "rollout/requests_retried": taken.retried,
            "rollout/requests_dropped": taken.dropped,
        }

    async def _ask(
        self,
        method: str,
        path: str,
        parse: Callable[[Any], T],
        timeout_s: float,
        max_bytes: int,
        confirm: Callable[[], Awaitable[None]] | None = None,
        **content: Any,
    ) -> T:
        self.counters.requests += 1
        self._in_flight += 1
        answered = False
        try:
            for attempt in range(self._retries + 1):
                if attempt:
                    self.counters.retried += 1
                    await asyncio.sleep(min(FIRST_WAIT * 2 ** (attempt - 1), LONGEST_WAIT))
                try:
                    reply = parse(await self._try(method, path, timeout_s, max_bytes, content))
                    if attempt and confirm is not None:
                        await confirm()
                    answered = True
                    return reply
                except MalformedReply as error:
                    problem = f"a reply that cannot be used: {error}"
                except _NoReply as error:
                    problem = str(error)
            raise self._error(self._words(method, path, problem, f"{self._retries + 1} times"))
        finally:
            self._in_flight -= 1
            self.counters.dropped += not answered

    def _refused(self, method: str, path: str, problem: str) -> UsageError | TrainingError:
        kind = TrainingError if self._error is EngineLost else UsageError
        return kind(self._words(method, path, problem, ""))

    async def _try(
        self, method: str, path: str, timeout_s: float, max_bytes: int, content: dict[str, Any]
    ) -> Any:
        """One attempt. _NoReply or Malformed if another may help; UsageError or TrainingError for a refusal."""
        import httpx2

        client = await self._connected()
        try:
            async with asyncio.timeout(timeout_s):
                async with client.stream(method, self.url + path, **content) as response:
                    body = await read_body(response, max_bytes)
        except TimeoutError:
            raise _NoReply(f"no answer within {timeout_s:g} s (rollout.engine.timeout_s)") from None
        except httpx2.RequestError as error:
            raise _NoReply(f"{type(error).__name__}: {error}".rstrip(".")) from error
        if response.status_code >= 500:
            raise _NoReply(_status(response, body, self._token))
        if response.status_code != 200:
            raise self._refused(method, path, _status(response, body, self._token))
        return _content(response, body)

    def _words(self, method: str, path: str, problem: str, times: str) -> str:
        others = self._in_flight - 1
        dropped = f" {others} other requests in flight were dropped." if others else ""
        if problem.startswith("status 401"):
            mend = f"Name the variable that holds the server's token in {TOKEN_ENV}"
        elif self._error is EngineLost:
            mend = "See its log; when it runs again, continue with `onepolicy train --resume RUN`"
        elif problem.startswith("Connect"):
            mend = f"Is {self.server} running there, and is that the right url?"
        else:
            mend = f"See its log; is that {self.server}?"
        asked = f"{method} {self.url}{path}" + (f", {times}" if times else "")
        if self._token is not None:  # a server may repeat what it was sent
            problem = problem.replace(self._token, "(the token)")
        problem = printable(problem)
        return f"rollout.engine.url: asked {self.server}: {asked}; got {problem}.{dropped} {mend}"

    def _authorize(self, request: httpx2.Request) -> httpx2.Request:
        """The request with the token. Without a variable the file is read anew: a server that was started again has
        another token."""
        if self._token_env is None:
            self._token = find_token(*host_and_port(self.url))
        if self._token is not None:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request

    async def _connected(self) -> httpx2.AsyncClient:
        """The client of the running event loop. asyncio.run closes it with the loop, as it does every generator."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._loop, self._opened = loop, self._open()
            self._client = await anext(self._opened)
        return self._client

    async def _open(self) -> AsyncGenerator[httpx2.AsyncClient]:
        import httpx2

        async with httpx2.AsyncClient(
            auth=self._authorize,
            headers={"Accept-Encoding": "gzip"},  # what read_body can bound
            verify=self.url.startswith(
                "https:"
            ),  # reading the system's certificates takes a tenth of a second
            timeout=None,  # asyncio.timeout bounds the whole attempt
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,  # a proxy of the environment is not meant for an engine on this machine
        ) as client:
            yield client


def make_clients(config: ServerEngineConfig, *, server: str) -> tuple[EngineClient, EngineClient]:
    """With the settings' retries, and without any. server: its name in errors."""
    client = partial(
        EngineClient,
        config.url,
        token_env=config.token_env,
        timeout_s=config.timeout_s,
        server=server,
    )
    return client(retries=config.retries), client(retries=0)


def host_and_port(url: str) -> tuple[str, int]:
    """Host and port."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _content(response: httpx2.Response, body: bytes) -> Any:
    if not body:
        return None
    if not response.headers.get("content-type", "").startswith("application/json"):
        return body.decode(errors="replace")
    return parse_json(body)


def _status(response: httpx2.Response, body: bytes, token: str | None) -> str:
    """token: not repeated if the server sends back what it was sent."""
    text = body.decode(errors="replace").strip()
    if token is not None:
        text = text.replace(token, "(the token)")
    return f"status {response.status_code}" + (f": {text[:SHOWN]}" if text else "")
