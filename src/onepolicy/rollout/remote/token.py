"""The bearer token of an engine's server.

An environment variable holds it, or `engine serve` makes one and stores it in a file that only its
owner can read. No error here repeats a token.
"""

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

TOKEN_BYTES = 32  # of randomness in a new token
MAX_FILE_BYTES = 4096  # read of a token file
_VARIABLE_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TOKEN_PATTERN = re.compile(r"[\x21-\x7e]+")  # characters that an HTTP header carries unchanged


def token_from_env(variable: str, setting: str) -> str:
    """Return the token in this environment variable.

    setting: that names the variable, for errors. Raises UsageError if the variable has no token,
    or one that an HTTP header cannot carry.
    """
    if not _VARIABLE_PATTERN.fullmatch(variable):
        raise UsageError(
            f"{setting}: its value is not the name of an environment variable; put the token in a "
            "variable and give its name, e.g. ENGINE_TOKEN"
        )
    token = os.environ.get(variable, "")
    if not token and not _looks_like_a_name(variable):
        raise UsageError(
            f"{setting}: the environment variable that it names is not set; if its value is the "
            "token itself, put the token in a variable and give its name, e.g. ENGINE_TOKEN"
        )
    if not token:
        raise UsageError(f"{setting}: the environment variable {variable} is not set")
    return check_token(token, f"{setting}: the environment variable {variable}")


def _looks_like_a_name(variable: str) -> bool:
    """Return whether no token looks like this: upper-case words, of few characters and digits."""
    digits = sum(character.isdigit() for character in variable)
    return variable.isupper() and len(variable) <= 32 and digits <= 2


def check_token(token: str, where: str) -> str:
    """Return the token. Raise UsageError if an HTTP header cannot carry it.

    where: the beginning of the error.
    """
    if _TOKEN_PATTERN.fullmatch(token):
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
        f"{where} {problem}, which no token may have; set it again without it, e.g. by "
        "`tr -d '\\r\\n' <FILE`"
    )


@contextmanager
def create_token_file(host: str, port: int) -> Iterator[tuple[str, Path]]:
    """Make a random token for a server at this loopback address, and yield it with its file.

    `find_token` finds the file. It is removed at the end of the context.
    """
    token, path = secrets.token_urlsafe(TOKEN_BYTES), _token_file(host, port)
    _make_private_folder(path.parent)
    _write_private(path, token)
    try:
        yield token, path
    finally:
        if _read_token(path) == token:  # else another server uses the port by now
            path.unlink(missing_ok=True)


def _write_private(path: Path, token: str) -> None:
    """Write the file atomically, readable for its owner only."""
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
            f"engine serve: the server's token cannot be written to {path.parent}: "
            f"{error.strerror}; put one in an environment variable and name that with --token-env"
        ) from error


def find_token(host: str, port: int) -> str | None:
    """Return the token in the file of this user's server at this loopback address.

    Return None if there is no such file.
    """
    hosts = [host]
    if host == "localhost":
        hosts = ["127.0.0.1", "::1"]
    tokens = (_read_token(_token_file(each, port)) for each in hosts)
    return next((token for token in tokens if token is not None), None)


def remove_token_file(host: str, port: int) -> None:
    """Remove the token file of a killed server, whose place another server takes."""
    with suppress(OSError):
        _token_file(host, port).unlink(missing_ok=True)


def _token_file(host: str, port: int) -> Path:
    address = "127.0.0.1"
    if host != "localhost":
        address = str(ipaddress.ip_address(host))
    folder = Path(tempfile.gettempdir()) / f"onepolicy-tokens-{os.getuid()}"
    return folder / f"{address.replace(':', '_')}.{port}"


def _make_private_folder(folder: Path) -> None:
    """Create the folder. Raise UsageError if another user owns it or can read it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        private = _is_private(folder.lstat(), stat.S_ISDIR)
    except OSError as error:
        raise UsageError(
            f"engine serve: no folder for the server's token at {folder}: {error.strerror}; put a "
            "token in an environment variable and name that with --token-env"
        ) from error
    if not private:
        raise UsageError(
            f"engine serve: {folder}, the folder for the server's token, belongs to somebody else "
            "or others may look into it; remove it, or put a token in an environment variable and "
            "name that with --token-env"
        )


def _read_token(path: Path) -> str | None:
    """Return the token in this file, or None if another user could write or read it."""
    try:
        if not _is_private(path.parent.lstat(), stat.S_ISDIR):
            return None
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            if not _is_private(os.fstat(handle), stat.S_ISREG):
                return None
            text = file.read(MAX_FILE_BYTES).decode("ascii", errors="replace")
    except OSError:
        return None
    if not _TOKEN_PATTERN.fullmatch(text):
        return None
    return text


def _is_private(status: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    return is_kind(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
