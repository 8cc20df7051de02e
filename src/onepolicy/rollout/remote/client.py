"""JSON over HTTP to an engine in another process, with bounded retries and time limits.

A request is retried after a fault that may be transient: no connection, a broken connection, a
time-out, a 5xx status, or a malformed body. All attempts together have a limit, so that a server
that hangs is not waited for many times. Any other status ends the request. Every request can be
repeated, because it names its seed or sets a state. Cancelling a call closes its connection, and
the engine then aborts the request.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from onepolicy.config import (
    ServerEngineConfig,
    ServiceUnavailable,
    TrainingError,
    UsageError,
    printable,
)
from onepolicy.config.address import check_url, is_loopback
from onepolicy.rollout.remote.bodies import (
    MAX_REPLY_BYTES,
    MalformedReply,
    parse_json,
    read_body,
)
from onepolicy.rollout.remote.token import find_token, token_from_env

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")
TOKEN_ENV = "rollout.engine.token_env"
FIRST_WAIT, LONGEST_WAIT = 0.25, 8.0  # s; the wait before a retry doubles from first to longest
ANSWER_S = 5.0  # most that a server takes to answer if it is there
ANSWER_PATHS = {"vllm-server": "/weight_info", "sglang": "/server_info"}
"""Path that asks whether a server is there, by rollout.engine.kind. The process with the engine
answers it, also while it is paused.

vLLM answers `/health` while its engine hangs. SGLang samples a token for it, which a pause holds
up.
"""
SHOWN_CHARS = 300  # characters of a body in an error
HIDDEN_TOKEN = "(the token)"
COUNTED = ("requests", "requests_retried", "requests_dropped")
"""Counts of calls, of attempts after the first, and of calls without a reply: out of retries,
refused, or cancelled."""
SLOWEST_TOKEN_S = 0.2
"""Seconds a token. An engine that lives but samples slower than this has stopped.

30 ms a token is slow for a loaded engine, and this is six times as much. An engine that is stuck
in a server that answers is held for it: 1.8 hours for an answer of 32k tokens.
"""


class EngineLost(TrainingError):
    """The server gives no usable reply, or it no longer has this run's weights."""


class OtherWeights(EngineLost):
    """The server answers, but has other weights than this run loaded last."""


class EngineUnreachable(ServiceUnavailable):
    """No server gave a usable reply while the run started."""


class _NoReplyError(Exception):
    """An attempt failed, and a retry may succeed."""


class RequestGate:
    """The limit on one event loop's requests in flight. A weight update may close it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, max_num_seqs: int) -> None:
        self.loop, self.running = loop, 0
        self.is_open, self.all_done = asyncio.Event(), asyncio.Event()
        self.is_open.set()
        self.all_done.set()
        self._sequences = asyncio.Semaphore(max_num_seqs)

    @classmethod
    def for_running_loop(cls, gate: RequestGate | None, max_num_seqs: int) -> RequestGate:
        """Return `gate` if it belongs to the running event loop, else a new gate.

        An earlier loop has no running requests.
        """
        loop = asyncio.get_running_loop()
        if gate is not None and gate.loop is loop:
            return gate
        return cls(loop, max_num_seqs)

    @asynccontextmanager
    async def admit_request(self) -> AsyncIterator[None]:
        """Wait until the gate is open and fewer than max_num_seqs requests run.

        Count the request as running inside the context.
        """
        async with self._sequences:
            await self.is_open.wait()
            self.running += 1
            self.all_done.clear()
            try:
                yield
            finally:
                self.running -= 1
                if not self.running:
                    self.all_done.set()


@dataclass(frozen=True, slots=True)
class _Call:
    """An HTTP request and the limits of each attempt."""

    method: str
    path: str
    timeout_s: float
    max_bytes: int = MAX_REPLY_BYTES
    json: Any = None
    params: Mapping[str, str] | None = None
    tokens: int = 0  # that the server may sample before it answers

    @property
    def longest_s(self) -> float:
        """Seconds after which an attempt ends although the server shows signs of life."""
        return self.timeout_s + self.tokens * SLOWEST_TOKEN_S

    @property
    def total_s(self) -> float:
        """Seconds after which the last attempt ends: one that has waited long is repeated once."""
        return self.longest_s + self.timeout_s


class EngineClient:
    """A client of one engine's HTTP API.

    It may be used from one event loop after another. Connections end with their loop.
    """

    def __init__(
        self,
        url: str,
        *,
        token_env: str | None = None,
        timeout_s: float = 600.0,
        retries: int = 5,
        server: str,
        answer_path: str = "/health",
    ) -> None:
        """Check the arguments. Connect at the first request.

        token_env: environment variable with the bearer token. None: the token file of a server on
        this machine (rollout/remote/token.py). timeout_s: of one attempt, or of a server's
        silence while it samples. server: its name in errors. answer_path: of `ANSWER_PATHS`.

        Raises UsageError for a malformed URL, for a variable without a valid token, or without
        httpx2.
        """
        parts = check_url(url)
        if importlib.util.find_spec("httpx2") is None:
            raise UsageError(
                "rollout.engine: an engine over HTTP needs httpx2; pip install 'onepolicy[server]'"
            )
        self.url, self.server, self._answer_path = url.rstrip("/"), server, answer_path
        self._counts: Counter[str] = Counter()
        self._timeout_s, self._retries = timeout_s, retries
        self._token_env = token_env
        self._token: str | None = None
        if token_env is not None:
            self._token = token_from_env(token_env, TOKEN_ENV)
        elif not is_loopback(parts.hostname or ""):
            raise UsageError(
                f"{TOKEN_ENV}: the server is on another machine; protect it with a token and name "
                "the environment variable that holds it"
            )
        self._no_reply_error: type[EngineUnreachable] | type[EngineLost] = EngineLost
        self._in_flight = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened: AsyncGenerator[httpx2.AsyncClient] | None = None
        self._client: httpx2.AsyncClient | None = None

    @contextmanager
    def startup_errors(self) -> Iterator[None]:
        """Raise UsageError inside the context: EngineUnreachable if there is no reply.

        Outside of it the errors are TrainingError, and EngineLost if there is no reply.
        """
        before, self._no_reply_error = self._no_reply_error, EngineUnreachable
        try:
            yield
        finally:
            self._no_reply_error = before

    async def get(self, path: str, *, parse: Callable[[Any], T] = lambda reply: reply) -> T:
        """Return parse(reply). The reply is JSON, None if empty, or else a string."""
        return await self._request(_Call("GET", path, self._timeout_s), parse)

    async def post(
        self,
        path: str,
        body: Any = None,
        *,
        params: Mapping[str, str] | None = None,
        parse: Callable[[Any], T] = lambda reply: reply,
        timeout_s: float | None = None,
        max_bytes: int = MAX_REPLY_BYTES,
        tokens: int = 0,
        confirm: Callable[[], Awaitable[None]] | None = None,
    ) -> T:
        """Send `body` as JSON and return parse(reply).

        timeout_s: of one attempt; None is the client's. max_bytes: of the reply. tokens: that are
        sampled before the reply. An attempt then goes on while `answer_path` is answered, up to
        SLOWEST_TOKEN_S per token. All attempts together end `timeout_s` later. confirm: awaited
        after a reply that took several attempts, because the server may have been replaced.
        """
        limit = timeout_s or self._timeout_s
        call = _Call("POST", path, limit, max_bytes, body, params, tokens)
        return await self._request(call, parse, confirm)

    async def answers(self) -> bool:
        """Return whether the server answers within ANSWER_S."""
        call = _Call("GET", self._answer_path, min(self._timeout_s, ANSWER_S))
        try:
            with self.startup_errors():
                await self._request(call, lambda reply: None)
        except EngineUnreachable:
            return False
        except UsageError:
            return True  # it refuses, so it is there
        return True

    def take_metrics(self) -> dict[str, float]:
        """Return the run's metrics since the last call (run/metrics.toml)."""
        taken, self._counts = self._counts, Counter()
        return {f"rollout/{name}": taken[name] for name in COUNTED}

    async def _request(
        self,
        call: _Call,
        parse: Callable[[Any], T],
        confirm: Callable[[], Awaitable[None]] | None = None,
    ) -> T:
        self._counts["requests"] += 1
        self._in_flight += 1
        answered = False
        try:
            reply = await self._attempt_until_reply(call, parse, confirm)
            answered = True
            return reply
        finally:
            self._in_flight -= 1
            self._counts["requests_dropped"] += not answered

    async def _attempt_until_reply(
        self,
        call: _Call,
        parse: Callable[[Any], T],
        confirm: Callable[[], Awaitable[None]] | None,
    ) -> T:
        loop = asyncio.get_running_loop()
        end = loop.time() + call.total_s
        problems: list[str] = []  # one of each attempt
        for attempt in range(self._retries + 1):
            if attempt:
                pause = min(FIRST_WAIT * 2 ** (attempt - 1), LONGEST_WAIT)
                if loop.time() + pause >= end:
                    break
                self._counts["requests_retried"] += 1
                await asyncio.sleep(pause)
            try:
                reply = parse(await self._attempt(call, end))
                if attempt and confirm is not None:
                    await confirm()
                return reply
            except MalformedReply as error:
                problems.append(f"a reply that cannot be used: {error}")
            except _NoReplyError as error:
                problems.append(str(error))
        attempts = f", {len(problems)} times"
        if len(problems) <= self._retries:
            attempts += f" in {call.total_s:g} s, the limit of all attempts together"
        problem = problems[-1]
        if problems[0] != problem:
            problem += f"; the first time: {problems[0]}"
        raise self._no_reply_error(self._describe_failure(call, problem, attempts))

    async def _attempt(self, call: _Call, end: float) -> Any:
        """Send the request once and return the reply.

        end: the event loop's time at which the attempt ends at the latest.

        Raises _NoReplyError or MalformedReply if a retry may succeed. Raises UsageError or
        TrainingError if the server refuses.
        """
        import httpx2

        client = await self._connected_client()
        try:
            async with self._time_limit(client, call, end):
                response, body = await self._exchange(client, call)
        except httpx2.RequestError as error:
            raise _NoReplyError(f"{type(error).__name__}: {error}".rstrip(".")) from error
        if response.status_code == 200:
            return _decode_body(response, body, call.max_bytes)
        problem = self._describe_status(response.status_code, body)
        if response.status_code >= 500:
            raise _NoReplyError(problem)
        message = self._describe_failure(call, problem)
        if self._no_reply_error is EngineLost:
            raise TrainingError(message)
        raise UsageError(message)

    async def _exchange(
        self, client: httpx2.AsyncClient, call: _Call
    ) -> tuple[httpx2.Response, bytes]:
        """Send the request and return the response with its body: every byte is read here."""
        async with client.stream(
            call.method, self.url + call.path, json=call.json, params=call.params
        ) as response:
            return response, await read_body(response, call.max_bytes)

    @asynccontextmanager
    async def _time_limit(
        self, client: httpx2.AsyncClient, call: _Call, end: float
    ) -> AsyncIterator[None]:
        """Raise _NoReplyError in the context when the attempt has lasted too long."""
        now, alive = asyncio.get_running_loop().time(), asyncio.Event()
        try:
            async with asyncio.timeout_at(min(end, now + call.longest_s)) as limit:
                if not call.tokens:
                    yield
                    return
                watch = asyncio.create_task(self._end_in_silence(client, call, limit, alive))
                try:
                    yield
                finally:
                    watch.cancel()
        except TimeoutError:
            raise _NoReplyError(_describe_wait(call, end - now, alive.is_set())) from None

    async def _end_in_silence(
        self, client: httpx2.AsyncClient, call: _Call, limit: asyncio.Timeout, alive: asyncio.Event
    ) -> None:
        """End the time limit once the server gives no sign of life. Until then `alive` is set."""
        import httpx2

        asked = _Call("GET", self._answer_path, call.timeout_s)
        while True:
            await asyncio.sleep(call.timeout_s)
            alive.clear()
            with suppress(TimeoutError, httpx2.RequestError, MalformedReply):
                async with asyncio.timeout(call.timeout_s):
                    response, _ = await self._exchange(client, asked)
                if response.status_code == 200:
                    alive.set()
            if not alive.is_set():
                break
        limit.reschedule(asyncio.get_running_loop().time())

    def _describe_failure(self, call: _Call, problem: str, attempts: str = "") -> str:
        others = self._in_flight - 1
        dropped = ""
        if others:
            dropped = f" {others} other requests in flight were dropped."
        if problem.startswith("status 401"):
            hint = f"Name the variable that holds the server's token in {TOKEN_ENV}"
        elif self._no_reply_error is EngineLost:
            hint = "See its log; when it runs again, continue with `onepolicy train --resume RUN`"
        elif problem.startswith("Connect"):
            hint = f"Is {self.server} running there, and is that the right url?"
        else:
            hint = f"See its log; is that {self.server}?"
        problem = printable(self._hide_token(problem))
        return (
            f"rollout.engine.url: asked {self.server}: {call.method} {self.url}{call.path}"
            f"{attempts}; got {problem}.{dropped} {hint}"
        )

    def _describe_status(self, status: int, body: bytes) -> str:
        text = self._hide_token(body.decode(errors="replace").strip())
        if not text:
            return f"status {status}"
        return f"status {status}: {text[:SHOWN_CHARS]}"

    def _hide_token(self, text: str) -> str:
        """Replace the token, which a server may send back."""
        if self._token is None:
            return text
        return text.replace(self._token, HIDDEN_TOKEN)

    def _authorize(self, request: httpx2.Request) -> httpx2.Request:
        """Add the token to the request.

        Read the token file anew every time: a restarted server has another token.
        """
        if self._token_env is None:
            self._token = find_token(*host_and_port(self.url))
        if self._token is not None:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request

    async def _connected_client(self) -> httpx2.AsyncClient:
        """Return the client of the running event loop.

        asyncio.run closes it with the loop, like every async generator.
        """
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._loop, self._opened = loop, self._open_client()
            self._client = await anext(self._opened)
        return self._client

    async def _open_client(self) -> AsyncGenerator[httpx2.AsyncClient]:
        import httpx2

        async with httpx2.AsyncClient(
            auth=self._authorize,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # none is kept
            headers={"Accept-Encoding": "gzip"},  # the encoding that read_body can bound
            # reading the system's certificates takes a tenth of a second
            verify=self.url.startswith("https:"),
            timeout=None,  # asyncio.timeout bounds the whole attempt
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,  # an engine on this machine needs no proxy
        ) as client:
            yield client


def _describe_wait(call: _Call, left: float, alive: bool) -> str:
    """Return the limit that ended an attempt.

    left: seconds that all attempts together still had. alive: the server answered meanwhile.
    """
    if not alive and left >= call.timeout_s:
        return f"no answer within {call.timeout_s:g} s (rollout.engine.timeout_s)"
    limit = (
        f"{call.longest_s:g} s (rollout.engine.timeout_s and {SLOWEST_TOKEN_S:g} s for each of "
        f"{call.tokens} tokens)"
    )
    if left < call.longest_s:
        limit = f"{round(left, 2):g} s, the rest of {call.total_s:g} s for all attempts"
    if alive:
        limit += ", though it answers"
    return f"no answer within {limit}"


def make_clients(config: ServerEngineConfig, *, server: str) -> tuple[EngineClient, EngineClient]:
    """Return a client with the configured retries, and one without retries.

    server: its name in errors.
    """
    client = partial(
        EngineClient,
        config.one_url,
        token_env=config.token_env,
        timeout_s=config.timeout_s,
        server=server,
        answer_path=ANSWER_PATHS[config.kind],
    )
    return client(retries=config.retries), client(retries=0)


def host_and_port(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    default_port = 80
    if parts.scheme == "https":
        default_port = 443
    return parts.hostname or "", parts.port or default_port


def _decode_body(response: httpx2.Response, body: bytes, max_bytes: int) -> Any:
    if not body:
        return None
    if not response.headers.get("content-type", "").startswith("application/json"):
        return body.decode(errors="replace")
    return parse_json(body, max_bytes)
