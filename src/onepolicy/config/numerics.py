"""`numerics = "on-policy"`: what it brings along, and every setting that would keep engine and trainer apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from onepolicy.config.engine import HFEngineConfig
from onepolicy.config.objective import FromRollout

if TYPE_CHECKING:
    from onepolicy.config.run import RunConfig

Numerics = Literal["fast", "on-policy"]
ON_POLICY: Numerics = "on-policy"


def dependent_defaults(data: dict[str, Any]) -> dict[str, Any]:
    """Of a tree that asks for it: an embedded engine computes as the trainer does, and nothing is left to correct."""
    if data.get("numerics") != ON_POLICY:
        return data
    model, rollout = data.get("model", {}), data.get("rollout", {})
    if isinstance(model, dict) and isinstance(rollout, dict) and isinstance(engine := rollout.get("engine", {}), dict):
        own = {name: model[name] for name in ("dtype", "lm_head") if name in model}
        data = data | {"rollout": rollout | {"engine": {"dtype": "float32"} | own | engine}}
    return {"correction": {"preset": "recompute"}} | data


def check_numerics(config: RunConfig) -> None:
    """ValueError for what cannot be, or has no effect, where both sides agree to the bit."""
    if config.numerics != ON_POLICY:
        return
    engine, model = config.rollout.engine, config.model
    if not isinstance(engine, HFEngineConfig):
        raise ValueError(
            f"rollout.engine.kind: {engine.kind}, but with numerics = on-policy engine and trainer compute with the "
            "same kernels, which only the embedded engine shares with it; use hf, or numerics = fast with replay.mode "
            "= r3 (docs/on_policy.md says how near vLLM comes)"
        )
    for name in ("dtype", "lm_head"):
        theirs, ours = getattr(engine, name), getattr(model, name)
        if theirs != ours:
            raise ValueError(
                f"rollout.engine.{name}: {theirs} and model.{name}: {ours}, but numerics = on-policy needs the same on "
                f"both sides; leave rollout.engine.{name} out, it then follows model.{name}"
            )
    if config.rollout.quant is not None:
        raise ValueError(
            f"rollout.quant: {config.rollout.quant.format}, but with numerics = on-policy engine and trainer compute "
            "with the same weights; leave one out"
        )
    if config.train.autocast != "off":
        raise ValueError(
            f"train.autocast: {config.train.autocast}, but with numerics = on-policy the trainer computes on the "
            "parameters as they are; set it to off (model.dtype = bfloat16 trains bfloat16 with float32 masters)"
        )
    if isinstance(config.replay, FromRollout) and config.replay.source == "reprefill":
        raise ValueError(
            "replay.source: reprefill is for engines that return no routes; with numerics = on-policy the embedded "
            "engine's own are exact, set it to engine"
        )
    _check_correction(config)


def _check_correction(config: RunConfig) -> None:
    correction = config.correction
    why = "with numerics = on-policy, where old / rollout is exactly 1; leave it out"
    if correction.ratio == "old/rollout" and correction.weight.level != "none":
        raise ValueError(f"correction.weight: {correction.name} has no effect {why}")
    for gate in correction.gates:
        if (gate.ratio or correction.ratio) == "old/rollout" and gate.statistic != "trainer_prob":
            raise ValueError(f"correction.gates: {gate.label} of {correction.name} rejects nothing {why}")
