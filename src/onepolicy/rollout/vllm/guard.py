"""Who may ask a vLLM server, and for what. `onepolicy engine serve` names the class on vLLM's command line."""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from onepolicy.rollout.servers.http import is_loopback

TOKEN = "VLLM_API_KEY"  # the variable vLLM reads the same token from
HOSTS = "ONEPOLICY_SERVER_HOSTS"  # variable: what a request's Host may be beside the loopback's names, as JSON
VOCAB = "ONEPOLICY_SERVER_VOCAB"  # variable: token ids of the model
HEALTH, GENERATE, WORKERS = "/health", "/inference/v1/generate", "/collective_rpc"
ENDPOINTS = {
    GENERATE,
    WORKERS,
    "/abort_requests",
    "/pause",
    "/reset_prefix_cache",
    "/resume",
    "/update_weight_version",
}
"""What a run posts to. vLLM's other endpoints take token ids and load weights too, unchecked."""
LOADS = {"onepolicy_load", "onepolicy_load_files", "onepolicy_receive", "reload_weights"}
"""Methods of the workers that replace weights."""
ANY_ADDRESS = {"0.0.0.0", "::"}
LARGEST_BODY = 2**26  # bytes of a request: ids of a million tokens take a tenth of it

Scope: TypeAlias = dict[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]
Send: TypeAlias = Callable[[dict[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """ASGI middleware: every path but /health needs the bearer token, and nothing that a browser sends is answered.

    vLLM's own guards /v1 and /inference only, and leaves open what loads weights and calls methods of its workers. A
    token id outside the vocabulary, or a forward pass through half-loaded weights, would end its engine, and with it
    the server: such requests are answered here.
    """

    def __init__(self, app: App) -> None:
        token = os.environ.get(TOKEN, "")
        assert token, f"{TOKEN} is not set"
        self._app, self._expected = app, f"Bearer {token}".encode()
        self._hosts = {_name_of(host) for host in json.loads(os.environ[HOSTS])}
        self._vocab = int(os.environ[VOCAB])
        self._unusable: str | None = None  # why no weights are whole

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        refusal = self._refusal(scope)
        if refusal is not None:
            return await _answer(scope, send, *refusal)
        if (
            scope["type"] != "http"
            or scope["path"] not in (GENERATE, WORKERS)
            or scope["method"] != "POST"
        ):
            return await self._app(scope, receive, send)
        body = await _body(receive)
        if body is None:
            return await _answer(scope, send, 413, f"more than {LARGEST_BODY} bytes")
        if scope["path"] == GENERATE:
            refusal = self._refused_request(body)
            if refusal is not None:
                return await _answer(scope, send, *refusal)
            return await self._app(scope, _again(body, receive), send)
        return await self._call_workers(scope, body, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Status and reason, by what is known before the body."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        given = {name: [value for each, value in headers if each == name] for name, _ in headers}
        if b"origin" in given:
            return 403, "no web page may ask this server (the request has an Origin)"
        hosts = given.get(b"host", [])
        if len(hosts) > 1 or not all(self._is_ours(host) for host in hosts):
            return (
                403,
                "this server is not called that (Host); start it with --name for another name of its own",
            )
        if scope["path"] == HEALTH:
            return None
        if not secrets.compare_digest(given.get(b"authorization", [b""])[-1], self._expected):
            return 401, "Unauthorized"
        reading = scope.get("method", "GET") in ("GET", "HEAD")
        if not reading and (scope["method"] != "POST" or scope["path"] not in ENDPOINTS):
            return (
                404,
                f"not an endpoint of `onepolicy engine serve`; it has {', '.join(sorted(ENDPOINTS))}",
            )
        return None

    def _is_ours(self, host: bytes) -> bool:
        """Whatever the port: a forwarded one is another."""
        name = _name_of(host.decode("latin-1"))
        if is_loopback(name) or name in self._hosts:
            return True
        return bool(ANY_ADDRESS & self._hosts) and _is_address(name)

    def _refused_request(self, body: bytes) -> tuple[int, str] | None:
        if self._unusable is not None:
            return 409, f"no complete set of weights: {self._unusable}; load one"
        try:
            ids = json.loads(body)["token_ids"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return 400, "the body is no JSON object with token_ids"
        if not isinstance(ids, list) or not ids:
            return 400, "token_ids is not a list of token ids"
        for place, each in enumerate(ids):
            if type(each) is not int or not 0 <= each < self._vocab:
                return (
                    400,
                    f"token_ids[{place}] is {str(each)[:20]}, not a token id in 0..{self._vocab - 1}",
                )
        return None

    async def _call_workers(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Passed on; nothing may be sampled between the start of a load and its end without an error."""
        try:
            method = json.loads(body)["method"]
        except (ValueError, KeyError, TypeError, RecursionError):
            method = None
        if not isinstance(method, str):
            return await _answer(scope, send, 400, "the body is no JSON object with a method")
        if method not in LOADS:
            return await self._app(scope, _again(body, receive), send)
        reply = bytearray()
        status = 0

        async def heard(message: dict[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            reply.extend(message.get("body", b""))
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self._unusable = _problem(method, status, bytes(reply))
            await send(message)

        self._unusable = f"{method} has failed, as the server's log says, or has not ended"
        await self._app(scope, _again(body, receive), heard)
        return None


def _problem(method: str, status: int, reply: bytes) -> str | None:
    """What went wrong with a load, by its answer."""
    try:
        results = json.loads(reply)["results"]
        told = [
            problem
            for each in results
            if isinstance(each, dict)
            for problem in each.values()
            if problem
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        told = []
        status = status if status != 200 else 500
    if status == 200 and not told:
        return None
    return f"{method} failed with {told[0] if told else f'status {status}'}"


def _name_of(host: str) -> str:
    """Name or address of `host`, `host:port` or `[address]:port`, in one way of writing."""
    host = host.strip().lower()
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    host = host.removesuffix(".")
    return str(ipaddress.ip_address(host)) if _is_address(host) else host


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _body(receive: Receive) -> bytes | None:
    """All of it; None if it is too large. An empty one if the client has gone."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b""
        body += message.get("body", b"")
        if len(body) > LARGEST_BODY:
            return None
        if not message.get("more_body"):
            return bytes(body)


def _again(body: bytes, receive: Receive) -> Receive:
    """Give the body once more, then what comes after it."""
    given = False

    async def receive_again() -> dict[str, Any]:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


async def _answer(scope: Scope, send: Send, status: int, reason: str) -> None:
    """Of a websocket nothing: the server then refuses it."""
    if scope["type"] == "http":
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps({"error": reason}).encode()})
