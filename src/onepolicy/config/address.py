"""Addresses of servers and of Ray, checked before anything connects to them."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import SplitResult, urlsplit

from onepolicy.errors import UsageError

LARGEST_PORT = 65535
URL_HINT = "e.g. http://127.0.0.1:8000"


def check_url(url: str, setting: str = "rollout.engine.url") -> SplitResult:
    """Return the parts of a server's address.

    Raises UsageError, which repeats no secret, if it is not the address of a server.
    """
    if any(mark in url for mark in "@?#"):
        raise UsageError(
            f"{setting}: has a user, a password or a query in it, which files and messages of the "
            "run would show; put a token in an environment variable and name that in "
            "rollout.engine.token_env"
        )
    try:
        parts = urlsplit(url)
        port = parts.port
        host = parts.hostname or ""
    except ValueError as error:
        raise UsageError(
            f"{setting}: {url!r} is not the address of a server ({error}); {URL_HINT}"
        ) from None
    problem = _problem_of_url(url, parts, host, port)
    if problem is not None:
        raise UsageError(f"{setting}: {url!r} {problem}; {URL_HINT}")
    return parts


def check_urls(url: str | tuple[str, ...], setting: str = "rollout.engine.url") -> None:
    """Raise UsageError unless this names servers. Reads no file, asks no name server."""
    if isinstance(url, str) and url.startswith("file:"):
        if not url.removeprefix("file:"):
            raise UsageError(f"{setting}: {url!r} names no file; e.g. file:servers.txt")
        return
    if isinstance(url, str):
        parts = check_url(url.removeprefix("dns:"), setting)
        if url.startswith("dns:") and parts.scheme != "http":
            raise UsageError(
                f"{setting}: {url!r} resolves to numbers, which no certificate names; use "
                "dns:http://, or list the https addresses"
            )
        return
    if not url or len({each.rstrip("/") for each in url}) < len(url):
        raise UsageError(f"{setting}: list one or more addresses, each once; {URL_HINT}")
    for each in url:
        check_url(each, setting)


def _problem_of_url(url: str, parts: SplitResult, host: str, port: int | None) -> str | None:
    """Return the reason why no server can have this address, or None."""
    if parts.scheme not in ("http", "https") or not host or "\\" in url:
        return "is not the address of a server (http:// or https://)"
    ipv6 = r"\[[0-9a-f:.]+\](:[0-9]+)?"
    if "[" in parts.netloc and not re.fullmatch(ipv6, parts.netloc, re.IGNORECASE):
        return "is not the address of a server (IPv6 reads [::1]:8000)"
    if port == 0 or parts.netloc.endswith(":"):
        return f"has no port that a server can have, 1 to {LARGEST_PORT}"
    problem = _problem_of_host(host)
    if problem is not None:
        return f"is not the address of a server ({problem})"
    if any(character.isspace() or not character.isprintable() for character in url):
        return "has a space or a control character in it"
    return None


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine, by its name or number."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_host(host: str, setting: str) -> None:
    """Raise UsageError if this cannot be the name or number of a machine."""
    problem = _problem_of_host(_without_brackets(host))
    if problem is not None:
        raise UsageError(f"{setting}: {host!r}: {problem}; give a name or a number, e.g. 127.0.0.1")


def check_port(port: int, setting: str) -> None:
    """Raise UsageError if no server can listen at this port."""
    if not 1 <= port <= LARGEST_PORT:
        raise UsageError(f"{setting}: {port} is no port; give one from 1 to {LARGEST_PORT}")


def check_ray_address(address: str) -> None:
    """Raise UsageError if this is neither `auto` nor host:port."""
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    digits = port.isascii() and port.isdecimal() and len(port) <= len(str(LARGEST_PORT))
    is_port = bool(colon) and digits and 1 <= int(port) <= LARGEST_PORT
    is_host = "://" not in address and (":" not in host or host.startswith("["))
    if is_port and is_host and _problem_of_host(_without_brackets(host)) is None:
        return
    raise UsageError(
        f"cluster.address: {address!r} is not host:port of a running Ray, nor auto (ports are 1 to "
        f"{LARGEST_PORT}); this machine must be one of its nodes (`ray start --address=...`)"
    )


def _without_brackets(host: str) -> str:
    return host.removeprefix("[").removesuffix("]")


def _problem_of_host(host: str) -> str | None:
    """Return the reason why no machine can have this name, or None. Asks no name server."""
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
