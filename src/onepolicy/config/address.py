"""Addresses of servers and of Ray: refused before anything is asked, with the setting they stand in."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import SplitResult, urlsplit

from onepolicy.config.base import UsageError

LAST_PORT = 65535


def check_url(url: str, setting: str = "rollout.engine.url") -> SplitResult:
    """Return the parts of a server's address. UsageError, which repeats no secret, for one that is none."""
    if any(mark in url for mark in "@?#"):
        raise UsageError(
            f"{setting}: has a user, a password or a query in it, which files and messages of the run would "
            "show; put a token in an environment variable and name that in rollout.engine.token_env"
        )
    mend = "e.g. http://127.0.0.1:8000"
    try:
        parts = urlsplit(url)
        port = parts.port
        host = parts.hostname or ""
    except ValueError as error:
        raise UsageError(
            f"{setting}: {url!r} is not the address of a server ({error}); {mend}"
        ) from None
    if parts.scheme not in ("http", "https") or not host or "\\" in url:
        raise UsageError(
            f"{setting}: {url!r} is not the address of a server (http:// or https://); {mend}"
        )
    if "[" in parts.netloc and not re.fullmatch(
        r"\[[0-9a-f:.]+\](:[0-9]+)?", parts.netloc, re.IGNORECASE
    ):
        raise UsageError(
            f"{setting}: {url!r} is not the address of a server (IPv6 reads [::1]:8000); {mend}"
        )
    if port == 0 or parts.netloc.endswith(":"):
        raise UsageError(
            f"{setting}: {url!r} has no port that a server can have, 1 to {LAST_PORT}; {mend}"
        )
    if why := _no_host(host):
        raise UsageError(f"{setting}: {url!r}: {why}; {mend}")
    if any(character.isspace() or not character.isprintable() for character in url):
        raise UsageError(f"{setting}: {url!r} has a space or a control character in it; {mend}")
    return parts


def check_host(host: str, setting: str) -> None:
    """UsageError for what cannot be the name or number of a machine."""
    if why := _no_host(host.removeprefix("[").removesuffix("]")):
        raise UsageError(f"{setting}: {host!r}: {why}; give a name or a number, e.g. 127.0.0.1")


def check_port(port: int, setting: str) -> None:
    """UsageError for what no server can listen at."""
    if not 1 <= port <= LAST_PORT:
        raise UsageError(f"{setting}: {port} is no port; give one from 1 to {LAST_PORT}")


def check_ray_address(address: str) -> None:
    """UsageError for what is neither `auto` nor host:port."""
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    wrong = "://" in address or not (colon and port.isascii() and port.isdecimal())
    wrong = wrong or (":" in host and not host.startswith("["))
    wrong = wrong or _no_host(host.removeprefix("[").removesuffix("]")) is not None
    if wrong or len(port) > len(str(LAST_PORT)) or not 1 <= int(port) <= LAST_PORT:
        raise UsageError(
            f"cluster.address: {address!r} is not host:port of a running Ray, nor auto (ports are 1 to {LAST_PORT}); "
            "this machine must be one of its nodes (`ray start --address=...`)"
        )


def _no_host(host: str) -> str | None:
    """Why this names no machine, as far as that can be said without asking for it."""
    if not host:
        return "no host"
    if any(
        character.isspace() or not character.isprintable() or character in '/[]%<>*,;"'
        for character in host
    ):
        return "a host has no such characters"
    try:
        if ":" in host or re.fullmatch(r"[0-9.]+", host):
            ipaddress.ip_address(host)
    except ValueError as error:
        return str(error)
    try:
        host.removesuffix(".").encode("idna")
    except UnicodeError as error:
        return f"no name of a host ({error})"
    return None
