"""A small HTTP server for tests of engines over HTTP: handlers by path, and replies with planted
faults."""

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    params: dict[str, str]
    body: Any  # decoded JSON
    headers: dict[str, str]  # lower-case names
    gone: Callable[[], bool]  # has the client closed the connection?


@dataclass(frozen=True)
class Reply:
    body: Any = None  # bytes as they are, anything else as JSON
    status: int = 200
    cut: int = 0  # bytes of the body that are never sent
    hang_up: bool = False  # close the connection without an answer
    pause: float = 0.0  # seconds before each byte of the body
    content_type: str = "application/json"
    encoding: str = ""  # of the body, which is bytes in it
    headers: dict[str, str] = field(default_factory=dict)  # more of them


class _Server(ThreadingHTTPServer):
    """One whose connections end with it, as those of a killed process do."""

    daemon_threads = True
    # A client may open more connections at once than a busy machine accepts. Past the default of 5
    # the kernel resets them.
    request_queue_size = 128

    def __init__(self, *args):
        self._connections = set()
        super().__init__(*args)

    def process_request(self, request, client_address):
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request):
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request, client_address):
        """Print nothing of a client that hung up, whose command's words are read."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def server_close(self):
        super().server_close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):  # the client has closed it
                connection.shutdown(socket.SHUT_RDWR)


@dataclass
class Server:
    """A server: `with Server({"GET /health": handler}) as server:`. A handler takes a Request and
    returns a Reply or JSON.

    Unknown paths are 404. `asked` holds every request, in order. port: 0 for any.
    """

    handlers: dict[str, Callable[[Request], Any]]
    asked: list[Request] = field(default_factory=list)
    port: int = 0

    def __enter__(self):
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self):
                self._answer()

            def do_POST(self):
                self._answer()

            def _answer(self):
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                url = urlsplit(self.path)
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Request(
                    self.command,
                    url.path,
                    dict(parse_qsl(url.query)),
                    json.loads(body) if body else None,
                    headers,
                    self._gone,
                )
                server.asked.append(request)
                handler = server.handlers.get(
                    f"{self.command} {url.path}", lambda _: Reply({"detail": "Not Found"}, 404)
                )
                reply = handler(request)
                self._send(reply if isinstance(reply, Reply) else Reply(reply))

            def _gone(self):
                self.connection.setblocking(False)
                try:
                    return self.connection.recv(1) == b""
                except BlockingIOError:
                    return False
                finally:
                    self.connection.setblocking(True)

            def _send(self, reply):
                self.close_connection = self.close_connection or reply.hang_up or bool(reply.cut)
                if reply.hang_up:
                    return
                content = (
                    reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
                )
                try:
                    self.send_response(reply.status)
                    self.send_header("content-type", reply.content_type)
                    if reply.encoding:
                        self.send_header("content-encoding", reply.encoding)
                    for name, value in reply.headers.items():
                        self.send_header(name, value)
                    self.send_header("content-length", str(len(content)))
                    self.end_headers()
                    for byte in content[: 2**20] if reply.pause else b"":
                        time.sleep(reply.pause)
                        self.wfile.write(bytes([byte]))
                    self.wfile.write(content[: 0 if reply.pause else len(content) - reply.cut])
                except ConnectionError:
                    pass  # a cancelled request

            def log_message(self, *_):
                pass

        self._http = _Server(("127.0.0.1", server.port), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._http.server_close()

    def count(self, path):
        return sum(request.path == path for request in self.asked)


def first(replies, then):
    """Return a handler that gives these replies one after the other, and then those of `then` (a
    handler)."""
    left = list(replies)
    return lambda request: left.pop(0) if left else then(request)
