"""HTTP to a gateway: as a program, and with the secret of one of ours."""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onepolicy.config import UsageError
from onepolicy.gateway.conformance.answers import Body
from onepolicy.rollout.remote.bodies import MalformedReply, read_body

if TYPE_CHECKING:
    import httpx2

SESSION = "{session}"
NO_KEY = "none"
MAX_REPLY_BYTES = 2**23
"""A gateway's longest answer is a stream of thousands of tokens, of some hundred bytes each."""
SHORTEST_KEY = 8
"""A shorter one is a dummy, as `x`, and stays in texts."""
USER_OF_URL = re.compile(r"//[^/@]*@")


class NoAnswer(Exception):
    """A request without an answer that can be read, and why."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply. kind: its content type."""

    status: int
    kind: str
    text: str

    def json(self) -> Any:
        """Return its JSON, None if it is none."""
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError):
            return None


class Client:
    """A program's client, with an episode of its own for each transcript.

    A gateway of ours gives each a key, for its secret, and shows its tree. Of another one, `key` is
    the key of all, and `{session}` in the URL is replaced by the transcript's name.
    """

    def __init__(
        self,
        http: httpx2.AsyncClient,
        url: str,
        key: str | None,
        model: str,
        *,
        seconds: float = math.inf,
    ) -> None:
        """Store the settings.

        url: of the gateway, without /v1. model: the name to ask for. seconds: that an answer may
        take. Raises UsageError for a key that no header can hold.
        """
        if key is not None:
            key = key.strip()
            if not (key.isascii() and key.isprintable()):
                raise UsageError("--key-env: its value has a character that no HTTP header holds")
        self._http, self._url, self._secret, self.model = http, url.rstrip("/"), key, model
        self._key, self._episode, self._seconds = key or NO_KEY, "", seconds
        self._run = secrets.token_hex(4)
        self.shows_trees = False

    @property
    def has_key(self) -> bool:
        return self._secret is not None

    async def find_out(self) -> None:
        """Ask whether the gateway is one of ours. Raises UsageError if nobody answers."""
        try:
            hello = (await self._send("GET", self._url + "/", None, {})).json()
        except NoAnswer as error:
            raise UsageError(
                f"--conformance: {self.hide(str(error))}; start the gateway, and give its address "
                "without /v1"
            ) from None
        ours = isinstance(hello, dict) and hello.get("gateway") == "onepolicy"
        if ours and not self.has_key:
            raise UsageError(
                "--conformance: this gateway gives keys to who has its secret; name the variable "
                "that holds it by --key-env"
            )
        self.shows_trees = ours

    async def begin(self, name: str) -> None:
        """Begin an episode."""
        self._episode = f"conformance-{self._run}-{name}"
        if not self.shows_trees:
            return
        told = (await self._ask_gateway("episodes")).json()
        if not isinstance(told, dict) or not isinstance(told.get("key"), str):
            raise UsageError("--key-env: the gateway gives no key for this secret")
        self._key = told["key"]

    async def send(self, path: str, body: Body, headers: Mapping[str, str]) -> Reply:
        """Send a program's request."""
        given = {"authorization": f"Bearer {self._key}", "x-api-key": self._key}
        url = f"{self._url.replace(SESSION, self._episode)}/v1/{path}"
        return await self._send("POST", url, body, given | dict(headers))

    async def tree(self) -> Body:
        """Return the turns of the episode as the gateway recorded them."""
        reply = await self._ask_gateway("episodes/tree")
        told = reply.json()
        if reply.status == 404:  # no request of it was served
            return {"turns": [], "breaks": []}
        if reply.status != 200 or not isinstance(told, dict):
            raise NoAnswer(f"the gateway shows no tree: status {reply.status}")
        return told

    async def end(self) -> Reply:
        """End the episode with reward 0."""
        return await self._ask_gateway("episodes/end", reward=0.0)

    async def _ask_gateway(self, path: str, **more: Any) -> Reply:
        """Ask a gateway of ours about the episode."""
        body = {"episode": self._episode} | more
        headers = {"x-api-key": self._secret or ""}
        return await self._send("POST", f"{self._url}/v1/{path}", body, headers)

    def hide(self, text: str) -> str:
        """Return a text without our keys and the password in a URL."""
        for key in (self._secret, self._key):
            if key and len(key) >= SHORTEST_KEY:
                text = text.replace(key, "***")
        return USER_OF_URL.sub("//", text)

    async def _send(
        self, method: str, url: str, body: Body | None, headers: Mapping[str, str]
    ) -> Reply:
        import httpx2

        request = self._http.stream(
            method, url, json=body, headers={"accept-encoding": "gzip"} | dict(headers)
        )
        try:
            async with asyncio.timeout(self._seconds), request as answer:
                content = await read_body(answer, MAX_REPLY_BYTES)
        except TimeoutError:
            raise NoAnswer(f"no whole answer from {url} within {self._seconds:g} s") from None
        except (httpx2.RequestError, httpx2.InvalidURL, MalformedReply) as error:
            raise NoAnswer(f"no answer from {url} ({type(error).__name__}: {error})") from None
        text = content.decode("utf-8", errors="replace")
        if answer.status_code != 200:  # it may be printed
            text = self.hide(text)
        return Reply(answer.status_code, answer.headers.get("content-type", ""), text)
