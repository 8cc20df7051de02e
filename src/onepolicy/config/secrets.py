"""Secrets in settings: hidden in pages, from trackers, in errors and in stored texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from onepolicy.errors import short_repr

WORDS = (
    r"key|secret|passw(?:or)?d|passphrase|passwd|pass|pwd|token(?!iz)|cred|auth|bearer|cookie|jwt"
    r"|dsn|pem|signature|session|(?<![a-z])(?:pat|pin|sas)(?![a-z])"
)
SECRET = re.compile(f"(?i){WORDS}")
"""Names of texts that are secrets, in the settings of FREE. One too many is hidden gladly."""
FREE = ("env", "params", "command")
"""Settings of a task that are somebody else's. Elsewhere a name such as `answer_key` is ours."""
NAMED = re.compile(
    rf"(?i)((?:{WORDS})[\w-]{{0,64}}[\"']?\s*[=:]\s*)([^;&}}\n]+)"
    rf"|(-[\w-]{{0,64}}(?:{WORDS})[\w-]{{0,64}}\s+)(\S+)"
)
"""A name and its value inside a text: `--api-key=VALUE`, `--api-key VALUE`, `Authorization: VALUE`,
JSON, a query."""
USER = re.compile(r"(?<=://)[^\s?#]{1,2000}(?=@)")
"""User and password in an address. Bounds keep a stranger's long text from taking minutes."""


def show_value(location: Sequence[int | str], value: Any, *, free: bool = False) -> str:
    """Return a value of the settings for an error: short, and without secrets.

    location: its keys. free: it is somebody else's wherever it stands, as below FREE.
    """
    free = free or any(key in FREE for key in location)
    secret = free and any(map(is_secret, location))
    if secret and isinstance(value, str | bytes):
        return "hidden"
    free = free or not isinstance(value, str)  # no setting of ours has names of its own below it
    return short_repr(_without_secrets(value, free=free, secret=secret))


def without_secrets(tree: Any) -> Any:
    """Return settings without users in addresses, and without secrets in the settings of FREE.

    There a text is a secret under a name with a word of WORDS in it, behind such a name in a text
    (`--api-key=VALUE`, `Authorization: VALUE`, `?token=VALUE`), or as the next word of a list. A
    list or an object under such a name loses all its texts.
    """
    return _without_secrets(tree, free=False, secret=False)


def _without_secrets(tree: Any, *, free: bool, secret: bool) -> Any:
    """Return a part of the settings. free: it is in one of FREE. secret: it has a secret's name."""
    if isinstance(tree, dict):
        entry = free and set(tree) >= {"name", "value"} and is_secret(tree["name"])
        return {
            name: _without_secrets(
                value,
                free=free or name in FREE,
                secret=secret or (free and is_secret(name)) or (entry and name == "value"),
            )
            for name, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return _list_without_secrets(tree, free=free, secret=secret)
    if not isinstance(tree, str):
        return tree
    if secret:
        return "hidden"
    if free:
        tree = NAMED.sub(lambda found: f"{found[1] or found[3]}hidden", tree)
    return USER.sub("hidden", tree)


def _list_without_secrets(items: Sequence[Any], *, free: bool, secret: bool) -> list[Any]:
    """Return a list, of a command's words or of a pair such as ["Authorization", VALUE]."""
    hidden = []
    for i, item in enumerate(items):
        before = str(items[i - 1]) if i else ""
        names = is_secret(before) and not NAMED.search(before)
        is_value = names and (len(items) == 2 or before.startswith("-"))
        hidden.append(_without_secrets(item, free=free, secret=secret or (free and is_value)))
    return hidden


def is_secret(name: Any) -> bool:
    """Return whether a setting of this name holds a secret."""
    return isinstance(name, str) and bool(SECRET.search(name))
