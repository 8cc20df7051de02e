"""Access control of a vLLM server. `onepolicy engine serve` passes the class to vLLM."""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from onepolicy.config.address import is_loopback
from onepolicy.rollout.vllm.worker import WorkerExtension

TOKEN_VARIABLE = "VLLM_API_KEY"  # from which vLLM reads the same token
HOSTS_VARIABLE = "ONEPOLICY_SERVER_HOSTS"  # allowed Hosts beside the loopback's names, as JSON
VOCAB_VARIABLE = "ONEPOLICY_SERVER_VOCAB"  # token ids of the model
HEALTH, GENERATE, WORKERS = "/health", "/inference/v1/generate", "/collective_rpc"
ENDPOINTS = {
    GENERATE,
    WORKERS,
    "/abort_requests",
    "/pause",
    "/reset_prefix_cache",
    "/resume",
    "/update_weight_version",
    "/v1/load_lora_adapter",  # vLLM has these two only if it was started with lora_rank
    "/v1/unload_lora_adapter",
}
"""Endpoints that a run posts to. vLLM has others that take token ids and load weights unchecked."""
WORKER_METHODS = {name for name in vars(WorkerExtension) if name.startswith("onepolicy_")}
"""Worker methods that a run calls. vLLM's own end the engine, write files, or load any."""
LOAD_METHODS = {"onepolicy_load", "onepolicy_load_files", "onepolicy_receive"}
"""Those that replace weights."""
ANY_ADDRESS = {"0.0.0.0", "::"}
MAX_BODY_BYTES = 2**26  # of a request; ids of a million tokens take a tenth of it

Scope: TypeAlias = dict[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]
Send: TypeAlias = Callable[[dict[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
Refusal: TypeAlias = tuple[int, str]
"""Status and reason."""


class Guard:
    """ASGI middleware that checks token, host and content of every request.

    Every path but /health needs the bearer token, and requests of browsers are refused. vLLM's own
    guards cover /v1 and /inference only, and leave open the endpoints that load weights and call
    worker methods. A token id outside the vocabulary, or a forward pass with half-loaded weights,
    would end the engine and with it the server. The guard refuses such requests.
    """

    def __init__(self, app: App) -> None:
        token = os.environ.get(TOKEN_VARIABLE, "")
        assert token, f"{TOKEN_VARIABLE} is not set"
        self._app, self._expected = app, f"Bearer {token}".encode()
        self._hosts = {_normalise_host(host) for host in json.loads(os.environ[HOSTS_VARIABLE])}
        self._vocab = int(os.environ[VOCAB_VARIABLE])
        self._load_problem: str | None = None  # set while the weights are incomplete

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        refusal = self._check_access(scope)
        if refusal is not None:
            return await _send_refusal(scope, send, *refusal)
        checks_body = scope["path"] in (GENERATE, WORKERS)
        if scope["type"] != "http" or not checks_body or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        body = await _read_body(receive)
        if body is None:
            return await _send_refusal(scope, send, 413, f"more than {MAX_BODY_BYTES} bytes")
        if scope["path"] == WORKERS:
            return await self._call_workers(scope, body, receive, send)
        refusal = self._check_generate(body)
        if refusal is not None:
            return await _send_refusal(scope, send, *refusal)
        return await self._app(scope, _replay_body(body, receive), send)

    def _check_access(self, scope: Scope) -> Refusal | None:
        """Check the parts of the request before its body."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        values = {name: [value for each, value in headers if each == name] for name, _ in headers}
        if b"origin" in values:
            return 403, "no web page may ask this server (the request has an Origin)"
        hosts = values.get(b"host", [])
        if len(hosts) > 1 or not all(self._is_allowed_host(host) for host in hosts):
            return (
                403,
                "this server does not have that name (Host); start it with --name to add a name",
            )
        if scope["path"] == HEALTH:
            return None
        token = values.get(b"authorization", [b""])[-1]
        if not secrets.compare_digest(token, self._expected):
            return 401, "Unauthorized"
        method = scope.get("method", "GET")
        is_endpoint = method == "POST" and scope["path"] in ENDPOINTS
        if method not in ("GET", "HEAD") and not is_endpoint:
            endpoints = ", ".join(sorted(ENDPOINTS))
            return 404, f"not an endpoint of `onepolicy engine serve`; it has {endpoints}"
        return None

    def _is_allowed_host(self, host: bytes) -> bool:
        """Return whether the Host is one of ours, with any port: it may be forwarded."""
        name = _normalise_host(host.decode("latin-1"))
        if is_loopback(name) or name in self._hosts:
            return True
        return bool(ANY_ADDRESS & self._hosts) and _is_address(name)

    def _check_generate(self, body: bytes) -> Refusal | None:
        """Check that the weights are complete and that the token ids are in the vocabulary."""
        if self._load_problem is not None:
            return 409, f"no complete set of weights: {self._load_problem}; load one"
        try:
            ids = json.loads(body)["token_ids"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return 400, "the body is no JSON object with token_ids"
        if not isinstance(ids, list) or not ids:
            return 400, "token_ids is not a list of token ids"
        for index, each in enumerate(ids):
            if type(each) is not int or not 0 <= each < self._vocab:
                problem = f"is {str(each)[:20]}, not a token id in 0..{self._vocab - 1}"
                return 400, f"token_ids[{index}] {problem}"
        return None

    async def _call_workers(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Forward a worker call.

        Refuse samples from the start of a load until one succeeds.
        """
        try:
            method = json.loads(body)["method"]
        except (ValueError, KeyError, TypeError, RecursionError):
            method = None
        if not isinstance(method, str):
            reason = "the body is no JSON object with a method"
            return await _send_refusal(scope, send, 400, reason)
        if method not in WORKER_METHODS:
            reason = f"not a worker method of onepolicy; it has {', '.join(sorted(WORKER_METHODS))}"
            return await _send_refusal(scope, send, 404, reason)
        if method not in LOAD_METHODS:
            return await self._app(scope, _replay_body(body, receive), send)
        reply = bytearray()
        status = 0

        async def send_and_check(message: dict[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            reply.extend(message.get("body", b""))
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self._load_problem = _find_problem(method, status, bytes(reply))
            await send(message)

        self._load_problem = f"{method} has failed (see the server's log) or has not ended"
        return await self._app(scope, _replay_body(body, receive), send_and_check)


def _find_problem(method: str, status: int, reply: bytes) -> str | None:
    """Return the problem that a load reported, or None."""
    problems: list[Any] = []
    try:
        for result in json.loads(reply)["results"]:
            if isinstance(result, dict):
                problems += filter(None, result.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        problems = []
        if status == 200:
            status = 500
    if problems:
        return f"{method} failed with {problems[0]}"
    if status != 200:
        return f"{method} failed with status {status}"
    return None


def _normalise_host(host: str) -> str:
    """Return the name or address of `host`, `host:port` or `[address]:port` in a unique form."""
    host = host.strip().lower()
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    host = host.removesuffix(".")
    if _is_address(host):
        return str(ipaddress.ip_address(host))
    return host


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _read_body(receive: Receive) -> bytes | None:
    """Return the request's body, None if it is too large, or b"" if the client has left."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b""
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            return None
        if not message.get("more_body"):
            return bytes(body)


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body again, then the messages after it."""
    given = False

    async def receive_again() -> dict[str, Any]:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


async def _send_refusal(scope: Scope, send: Send, status: int, reason: str) -> None:
    """Send status and reason. To a websocket send nothing: the server then refuses it."""
    if scope["type"] == "http":
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps({"error": reason}).encode()})
