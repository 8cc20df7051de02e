"""The gateway's server: HTTP for a program, turns from a session.

A turn is sampled whole and then sent, as one body or as one stream. While a stream waits for its
turn it gets a ping now and then.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from onepolicy.envs.multiturn.call_format import finite_json
from onepolicy.gateway.dialects import anthropic, chat, responses
from onepolicy.gateway.dialects.common import Body, Dialect, Question, Reply, need, wire_json
from onepolicy.gateway.episodes import Episodes
from onepolicy.gateway.messages import RequestError
from onepolicy.gateway.session import Session
from onepolicy.gateway.tree import tree_of
from onepolicy.gateway.turns import Turn

LOG = logging.getLogger(__name__)
MOST_BYTES = 64 * 2**20
"""Bytes of a request's body. Agents send their whole history in each."""
MOST_PARTS = 2**20
"""Lists, objects and commas of a body: as values they take many times their bytes, and seconds."""
SECONDS_TO_SEND = 60
"""Seconds in which a request's body must be there."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a stream."""

    before_headers: float = 3.0  # so long, an error still gets a status of its own
    between_pings: float = 10.0


def make_app(
    episodes: Episodes,
    model: str,
    *,
    ended: Callable[[str, Session, float], Body] | None = None,
    closed: Callable[[], None] = lambda: None,
    pace: Pace | None = None,
) -> Starlette:
    """Return the gateway as an ASGI application.

    model: its name in /v1/models. ended: called with name, episode and reward when a trainer ends
    one; returns the answer; None: episodes begin and end in this process. closed: called when the
    server stops.
    """
    handler = _Handler(episodes, model, pace or Pace())
    routes = [
        Route("/", _say_hello, methods=["GET", "HEAD"]),
        Route("/v1/models", partial(_list_models, model=model)),
    ]
    if ended is not None:
        end = partial(_end_episode, episodes, ended)
        routes.append(Route("/v1/episodes", partial(_begin_episode, episodes), methods=["POST"]))
        routes.append(Route("/v1/episodes/end", end, methods=["POST"]))
        tree = partial(_show_tree, episodes)
        routes.append(Route("/v1/episodes/tree", tree, methods=["POST"]))
    dialects: dict[str, Dialect] = {
        "chat/completions": chat,
        "messages": anthropic,
        "responses": responses,
    }
    for path, dialect in dialects.items():
        answer = partial(handler.answer, dialect)
        routes.append(Route(f"/v1/{path}", answer, methods=["POST"]))
    routes.append(Route("/v1/messages/count_tokens", handler.count_tokens, methods=["POST"]))
    routes.append(Route("/{path:path}", _refuse_path, methods=["GET", "POST", "PUT", "DELETE"]))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        closed()

    return Starlette(routes=routes, lifespan=lifespan)


class _Handler:
    """The handlers of requests that name an episode."""

    def __init__(self, episodes: Episodes, model: str, pace: Pace) -> None:
        self.episodes, self.model, self.pace = episodes, model, pace

    async def answer(self, dialect: Dialect, http: HTTPRequest) -> Response:
        """Answer a request for a turn in a dialect."""
        try:
            self.episodes.find(_key_of(http))
            body, digest = await _read_body(http)
            session = self.episodes.find(_key_of(http))  # it may have ended meanwhile
        except RequestError as error:
            return _error_response(dialect, error)
        try:
            question = dialect.read(body)
        except RequestError as error:
            session.refused = error
            return _error_response(dialect, error)
        key = http.headers.get("idempotency-key")
        repeated = key is not None or http.headers.get("x-stainless-retry-count", "0") != "0"
        # One body may be asked in two dialects. A key counts for one of them.
        key = f"{http.url.path} {key or digest}"
        answer = session.answer(question.request, key, digest, repeated=repeated)
        work = asyncio.ensure_future(answer)
        if not question.stream:
            await asyncio.wait({work})
        else:
            await asyncio.wait({work}, timeout=self.pace.before_headers)
        if work.done() and _failed(work):
            return _error_response(dialect, _error_of(work, session))
        write = partial(_reply_of, session, question.model or self.model)
        if not question.stream:
            return _json_response(dialect.write(write(work.result())))
        events = self._stream(dialect, question, work, write, session)
        return StreamingResponse(events, media_type="text/event-stream")

    async def _stream(
        self,
        dialect: Dialect,
        question: Question,
        work: asyncio.Future[Turn],
        write: Callable[[Turn], Reply],
        session: Session,
    ) -> AsyncIterator[str]:
        """Yield the events of an answer, with pings until it is there."""
        while not work.done():
            await asyncio.wait({work}, timeout=self.pace.between_pings)
            if not work.done():
                yield dialect.PING
        if _failed(work):
            yield dialect.write_stream_error(_error_of(work, session))
            return
        for each in dialect.write_stream(write(work.result()), question):
            yield each

    async def count_tokens(self, http: HTTPRequest) -> Response:
        """Answer Anthropic's question how many tokens a request has. It samples nothing."""
        try:
            session = self.episodes.find(_key_of(http))
            body, _ = await _read_body(http)
            tokens = session.count_tokens(anthropic.read(body).request)
        except RequestError as error:
            return _error_response(anthropic, error)
        return _json_response(anthropic.write_count(tokens))


async def _begin_episode(episodes: Episodes, http: HTTPRequest) -> Response:
    """Answer who has the secret with the API key of an episode."""
    try:
        episodes.check_secret(_key_of(http))
        body, _ = await _read_body(http)
        key = episodes.key_of(need(body, "episode", str))
    except RequestError as error:
        return _error_response(chat, error)
    return _json_response({"key": key})


async def _show_tree(episodes: Episodes, http: HTTPRequest) -> Response:
    """Show the turns of an open episode to who has the secret."""
    try:
        episodes.check_secret(_key_of(http))
        body, _ = await _read_body(http)
        session = episodes.to_end(need(body, "episode", str))
    except RequestError as error:
        return _error_response(chat, error)
    return _json_response(tree_of(session.history))


async def _end_episode(
    episodes: Episodes, ended: Callable[[str, Session, float], Body], http: HTTPRequest
) -> Response:
    """End an episode with its reward, for who has the secret. It stays open if that fails.

    Who ends it again, because the answer was lost, gets the same answer.
    """
    try:
        episodes.check_secret(_key_of(http))
        body, _ = await _read_body(http)
        name, given = need(body, "episode", str), body.get("reward")
        if isinstance(given, bool) or not isinstance(given, int | float) or not abs(given) <= 1e9:
            raise RequestError(f"reward: {given!r} given, expected a number")
        reward = float(given)
        answered = episodes.answer_to_end(name, reward)
        if answered is not None:
            return _json_response(answered)
        session = episodes.to_end(name)
    except RequestError as error:
        return _error_response(chat, error)
    try:
        line = ended(name, session, reward)
    except Exception as error:  # of a scorer or a disk: what was sampled must not be lost by it
        LOG.exception("episode %s: it was not scored", name)
        said = f"episode {name} was not scored and stays open: {error}; see the gateway's log"
        return _error_response(chat, RequestError(said, status=500, code="scoring"))
    episodes.end(name, reward, line)
    return _json_response(line)


async def _say_hello(http: HTTPRequest) -> Response:
    return _json_response({"gateway": "onepolicy"})


async def _list_models(http: HTTPRequest, model: str) -> Response:
    """List the one model, in OpenAI's fields and in Anthropic's."""
    entry = {"id": model, "object": "model", "created": 0, "owned_by": "onepolicy"}
    entry |= {"type": "model", "display_name": model, "created_at": "1970-01-01T00:00:00Z"}
    listed = {"object": "list", "data": [entry]}
    return _json_response(listed | {"has_more": False, "first_id": model, "last_id": model})


async def _refuse_path(http: HTTPRequest) -> Response:
    error = RequestError(f"{http.url.path}: no such path here", status=404, code="not_found")
    return _error_response(chat, error)


def _key_of(http: HTTPRequest) -> str:
    """Return the API key of a request, as OpenAI's clients send it or as Anthropic's do."""
    given = http.headers.get("x-api-key")
    if given is None:
        given = http.headers.get("authorization", "").removeprefix("Bearer ")
    return given


async def _read_body(http: HTTPRequest) -> tuple[Body, str]:
    """Return a request's JSON and a digest of its bytes. Raises RequestError."""
    encoding = http.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise RequestError(
            f"content-encoding: {encoding} is not read here; send the body as it is", status=415
        )
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(SECONDS_TO_SEND):
            async for part in http.stream():
                size += len(part)
                if size > MOST_BYTES:
                    raise RequestError(f"the body has more than {MOST_BYTES} bytes", status=413)
                parts.append(part)
    except TimeoutError:
        said = f"the body was not there after {SECONDS_TO_SEND} s"
        raise RequestError(said, status=408, code="timeout") from None
    except ClientDisconnect:
        raise RequestError("the client went away", status=408) from None
    data = b"".join(parts)
    if sum(map(data.count, (b"[", b"{", b","))) > MOST_PARTS:
        said = f"the body has more than {MOST_PARTS} lists, objects and commas"
        raise RequestError(said, status=413)
    try:
        body = finite_json(data)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object")
    return body, hashlib.blake2b(data, digest_size=16).hexdigest()


def _failed(work: asyncio.Future[Turn]) -> bool:
    return work.cancelled() or work.exception() is not None


def _error_of(work: asyncio.Future[Turn], session: Session) -> RequestError:
    """Return the error of a turn that was not sampled, for the client."""
    if work.cancelled():
        return RequestError("the episode has ended", status=403, code="episode_over")
    error = work.exception()
    if isinstance(error, RequestError):
        session.refused = error
        return error
    LOG.error("%s: no turn was sampled", session.name, exc_info=error)
    return RequestError("the engine failed; see the gateway's log", status=500, code="engine")


def _error_response(dialect: Any, error: RequestError) -> Response:
    return _json_response(dialect.write_error(error), error.status)


def _json_response(body: Any, status: int = 200) -> Response:
    return Response(wire_json(body), status, media_type="application/json")


def _reply_of(session: Session, model: str, turn: Turn) -> Reply:
    finish: Literal["stop", "length", "calls"] = "stop"
    if turn.message.calls:
        finish = "calls"
    elif turn.finish != "stop" and turn.stop is None:
        finish = "length"
    return Reply(
        f"{session.id}{turn.number:05d}",
        model,
        session.begun,
        turn.message,
        finish,
        turn.stop,
        turn.start,
        turn.length - turn.start,
    )
