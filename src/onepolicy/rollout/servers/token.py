"""The secret that an engine's server asks for: named by an environment variable, or made and left in a file that only
its owner can read. No error here repeats one."""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from onepolicy.config import UsageError

TOKEN_BYTES = 32  # of randomness in a token that is made here
LARGEST_FILE = 4096  # bytes that are read of a token's file
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TOKEN = re.compile(r"[\x21-\x7e]+")  # what an HTTP header carries unchanged


def token_from_env(variable: str, setting: str) -> str:
    """The token in this environment variable. UsageError, which does not repeat it, if there is none or it cannot be
    sent. setting: what named the variable."""
    if not _NAME.fullmatch(variable):
        raise UsageError(
            f"{setting}: what it was given is not the name of an environment variable; put the token in a variable "
            f"and give its name, e.g. ENGINE_TOKEN"
        )
    token = os.environ.get(variable, "")
    if not token:
        raise UsageError(f"{setting}: the environment variable {variable} is not set")
    return check_token(token, f"{setting}: the environment variable {variable}")


def check_token(token: str, where: str) -> str:
    """The token. UsageError, which does not repeat it, if an HTTP header cannot carry it. where: begins the error."""
    if _TOKEN.fullmatch(token):
        return token
    if not token:
        problem = "is empty"
    elif token[-1] in "\r\n":
        problem = "ends with a line end (was it written on Windows, or read from a file?)"
    elif not token.isascii():
        problem = "has a character in it that is not ASCII"
    else:
        problem = "has a space or a control character in it"
    raise UsageError(
        f"{where} {problem}, which no token may have; set it again without it, e.g. by `tr -d '\\r\\n' <FILE`"
    )


@contextmanager
def create_token_file(host: str, port: int) -> Iterator[tuple[str, Path]]:
    """A random token for a server at this loopback address, and the file where `left_for` finds it meanwhile."""
    token, path = secrets.token_urlsafe(TOKEN_BYTES), _file(host, port)
    _make_private(path.parent)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with suppress(FileNotFoundError):
            unfinished.unlink()
        handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(token)
        unfinished.replace(path)
    except OSError as error:
        raise UsageError(
            f"engine serve: the server's token cannot be left in {path.parent}: {error.strerror}; put one in an "
            "environment variable and name that with --token-env"
        ) from error
    try:
        yield token, path
    finally:
        if _read(path) == token:  # not that of a server that has taken the port since
            path.unlink(missing_ok=True)


def find_token(host: str, port: int) -> str | None:
    """The token that a server of this user, at this loopback address, was started with; None if it left none."""
    hosts = ("127.0.0.1", "::1") if host == "localhost" else (host,)
    return next((token for each in hosts if (token := _read(_file(each, port))) is not None), None)


def remove_token_file(host: str, port: int) -> None:
    """Remove what a server that was killed has left: another one takes its place."""
    with suppress(OSError):
        _file(host, port).unlink(missing_ok=True)


def _file(host: str, port: int) -> Path:
    name = "127.0.0.1" if host == "localhost" else str(ipaddress.ip_address(host))
    return (
        Path(tempfile.gettempdir())
        / f"onepolicy-tokens-{os.getuid()}"
        / f"{name.replace(':', '_')}.{port}"
    )


def _make_private(folder: Path) -> None:
    """UsageError for a folder that somebody else put at this name, or that others may look into."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        private = _is_ours(folder.lstat(), stat.S_ISDIR)
    except OSError as error:
        raise UsageError(
            f"engine serve: no folder for the server's token at {folder}: {error.strerror}; put a token in an "
            "environment variable and name that with --token-env"
        ) from error
    if not private:
        raise UsageError(
            f"engine serve: {folder}, where the server's token would be left, belongs to somebody else or others may "
            "look into it; remove it, or put a token in an environment variable and name that with --token-env"
        )


def _read(path: Path) -> str | None:
    """The token in this file, if only we can have written it and only we can read it."""
    try:
        if not _is_ours(path.parent.lstat(), stat.S_ISDIR):
            return None
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            if not _is_ours(os.fstat(handle), stat.S_ISREG):
                return None
            text = file.read(LARGEST_FILE).decode("ascii", errors="replace")
    except OSError:
        return None
    return text if _TOKEN.fullmatch(text) else None


def _is_ours(about: os.stat_result, kind: Callable[[int], bool]) -> bool:
    return kind(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o077
