"""The addresses of a run's servers: typed in, listed in a file, or behind one DNS name."""

from __future__ import annotations

import socket
from pathlib import Path

from onepolicy.config import ServerEngineConfig, ServiceUnavailable, UsageError
from onepolicy.config.address import check_url
from onepolicy.config.engine import DNS, FILE

SETTING = "rollout.engine.url"


def server_configs(config: ServerEngineConfig) -> list[ServerEngineConfig]:
    """Return the settings of each server, with its own url.

    Raises UsageError for a file without addresses, and ServiceUnavailable for a name that no name
    server knows.
    """
    return [config.model_copy(update={"url": url}) for url in server_urls(config.url)]


def server_urls(url: str | tuple[str, ...]) -> list[str]:
    """Return the addresses that rollout.engine.url names, each once, in order."""
    if isinstance(url, tuple):
        found = list(url)
    elif url.startswith(FILE):
        found = _in_file(Path(url.removeprefix(FILE)))
    elif url.startswith(DNS):
        found = _behind_name(url.removeprefix(DNS))
    else:
        found = [url]
    return list(dict.fromkeys(each.rstrip("/") for each in found))


def _in_file(path: Path) -> list[str]:
    if path.exists() and not path.is_file():
        raise UsageError(f"{SETTING}: {path} is a folder, a device or a pipe; give a file")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{SETTING}: {path} cannot be read ({error}); write one address a line into it"
        ) from error
    found = [line.partition("#")[0].strip() for line in lines]
    found = [line for line in found if line]
    for line in found:
        check_url(line, f"{SETTING}: {path}")
    if not found:
        raise UsageError(f"{SETTING}: {path} has no address; write one a line into it")
    return found


def _behind_name(url: str) -> list[str]:
    parts = check_url(url, SETTING)
    host, port = parts.hostname or "", parts.port or 80
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ServiceUnavailable(f"{SETTING}: no address of {host}: {error}") from error
    addresses = sorted({str(each[4][0]) for each in found})
    path = parts.path.rstrip("/")
    return [f"http://{_bracketed(address)}:{port}{path}" for address in addresses]


def _bracketed(address: str) -> str:
    if ":" in address:
        return f"[{address}]"
    return address
