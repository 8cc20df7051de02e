"""Secrets in settings: a task's `env` and `params` may hold keys of services."""

from __future__ import annotations

import re
from typing import Any

SECRET = re.compile(r"(?i)((api|access|private)_?key|secret|password|passwd|token|credentials?)$")


def without_secrets(tree: Any) -> Any:
    """Return settings without texts under names like `api_key`, which tasks may hold."""
    if isinstance(tree, dict):
        hidden = {name for name, value in tree.items() if isinstance(value, str)}
        hidden = {name for name in hidden if SECRET.search(str(name))}
        return {
            name: "hidden" if name in hidden else without_secrets(v) for name, v in tree.items()
        }
    if isinstance(tree, list):
        return [without_secrets(value) for value in tree]
    return tree
