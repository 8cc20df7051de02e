"""`numerics = "on-policy"`: the defaults that it changes (run_rules.py has its rules)."""

from __future__ import annotations

from typing import Any, Literal

Numerics = Literal["fast", "on-policy"]
ON_POLICY: Numerics = "on-policy"


def dependent_defaults(data: dict[str, Any]) -> dict[str, Any]:
    """Return the tree with the defaults of its `numerics`.

    With on-policy the embedded engine computes as the trainer does, and nothing but the age of
    tokens is corrected.
    """
    if data.get("numerics") != ON_POLICY:
        return data
    model, rollout = data.get("model", {}), data.get("rollout", {})
    if isinstance(model, dict) and isinstance(rollout, dict):
        engine = rollout.get("engine", {})
        if isinstance(engine, dict):
            of_model = {name: model[name] for name in ("dtype", "lm_head") if name in model}
            data = data | {
                "rollout": rollout | {"engine": {"dtype": "float32"} | of_model | engine}
            }
    if isinstance(rollout, dict) and rollout.get("max_staleness") not in (None, "off", 0):
        return data  # tokens of older weights: the usual correction
    return {"correction": {"preset": "recompute"}} | data
