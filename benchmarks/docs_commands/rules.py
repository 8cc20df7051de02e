"""What becomes of each command of README and guides: commands.toml, read."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RULES: dict[str, dict[str, Any]] = tomllib.loads(
    (HERE / "commands.toml").read_text(encoding="utf-8")
)
LOG = HERE / "log.json"


def as_run(line: str, rule: dict[str, Any]) -> str:
    """Return the command with its stand-ins: words that are exchanged, and added."""
    swap = rule.get("swap", {})
    words = [swap.get(word, word) for word in line.split()]
    return " ".join([*words, *rule.get("add", ())])
