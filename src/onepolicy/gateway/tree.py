"""The tree of an episode as JSON: its turns with their tokens, and its breaks."""

from __future__ import annotations

import math
from typing import Any

from onepolicy.gateway.history import History


def tree_of(history: History) -> dict[str, Any]:
    """Return an episode's turns, each with all tokens that it was sampled after."""
    roots = {id(root): number for number, root in enumerate(history.roots)}
    turns = []
    for turn in history.turns:
        completion, parent = turn.completion, None
        if turn.parent is not None:
            parent = turn.parent.number
        values = [value if math.isfinite(value) else None for value in completion.logp.tolist()]
        turns.append(
            {
                "turn": turn.number,
                "root": roots[id(turn.root)],
                "parent": parent,
                "prompt": turn.path.tokens[: turn.start],
                "sampled": completion.token_ids.tolist(),
                "logp": values,
                "versions": completion.version.tolist(),
                "finish": turn.finish,
                "facts": [str(fact) for fact in turn.facts],
                "auxiliary": history.is_auxiliary(turn.root),
                "abandoned": turn.is_abandoned,
            }
        )
    return {"turns": turns, "breaks": breaks_of(history)}


def breaks_of(history: History) -> list[dict[str, Any]]:
    """Return the roots that left another conversation: the reason, and the first other token."""
    breaks = []
    for number, root in enumerate(history.roots):
        if root.break_ is not None:
            place: dict[str, Any] = {"root": number, "token": root.break_.token}
            place |= {"ours": root.break_.ours, "sent": root.break_.sent}
            breaks.append(place | {"reason": str(root.break_.reason)})
    return breaks
