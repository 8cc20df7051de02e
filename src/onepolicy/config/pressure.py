"""Artificial pressure on the rollout engine's routers, to study what routing mismatch does."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from onepolicy.config.base import Frozen, Seed

PRESSED = "under artificial routing pressure"
"""Words that every line about a pressed engine has, on the terminal and in files."""


class RoutingPressure(Frozen):
    """Other experts than the engine's routers would choose, for a study. Never for a real run."""

    kind: Literal["routing", "runner-up"] = "routing"
    """routing: noise on the weights by which routers choose. runner-up: for some tokens the best
    expert left out replaces the last chosen, by any margin."""
    scale: float = Field(ge=0, le=1e3)
    """routing: standard deviation of the noise, in rms of the router's row. runner-up: share of the
    tokens, at most 1. 0: none, to the bit."""
    redraw: Literal["never", "sync"] = "never"
    """Draw once for the run, or anew for every version of the weights."""
    weights: bool = False
    """Combine weights come from the noisy router too, which r3 cannot undo; else they are those
    without noise."""
    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Decoder indices of the MoE layers under pressure. Unset: all."""
    seed: Seed = 0
    """Seed of what is drawn, whatever the run's seed is."""

    def describe(self) -> str:
        """Return the line that a run, its summary and its report begin with."""
        what, drawn = f"scale {self.scale:g}", "noise"
        if self.kind == "runner-up":
            what, drawn = f"the runner-up for {self.scale:.3g} of the tokens", "tokens"
        where, when, how = "all MoE layers", "drawn once", "the choice of experts only"
        if self.layers is not None:
            where = f"layers {', '.join(map(str, self.layers))}"
        if self.redraw == "sync":
            when = "drawn anew at every weight sync"
        if self.weights:
            how = "the choice of experts and their weights"
        return (
            f"the engine is {PRESSED} ({what}, {where}, {drawn} {when}, {how}): "
            "its numbers say nothing about real engines"
        )


def _off(value: Any) -> Any:
    if value == "off":
        return None
    return value


PressureConfig = Annotated[RoutingPressure | None, BeforeValidator(_off)]
