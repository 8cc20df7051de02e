"""`numerics = "on-policy"`: the defaults it brings along. What contradicts it is refused in rules.py."""

from __future__ import annotations

from typing import Any, Literal

Numerics = Literal["fast", "on-policy"]
ON_POLICY: Numerics = "on-policy"


def dependent_defaults(data: dict[str, Any]) -> dict[str, Any]:
    """Of a tree that asks for it: an embedded engine computes as the trainer does, and nothing is left to correct."""
    if data.get("numerics") != ON_POLICY:
        return data
    model, rollout = data.get("model", {}), data.get("rollout", {})
    if (
        isinstance(model, dict)
        and isinstance(rollout, dict)
        and isinstance(engine := rollout.get("engine", {}), dict)
    ):
        own = {name: model[name] for name in ("dtype", "lm_head") if name in model}
        data = data | {"rollout": rollout | {"engine": {"dtype": "float32"} | own | engine}}
    return {"correction": {"preset": "recompute"}} | data
