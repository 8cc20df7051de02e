"""Artificial pressure on the rollout engine's routers, to study what routing mismatch does."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from onepolicy.config.base import Frozen, Seed

PRESSED = "under artificial routing pressure"
"""Words that every line about a pressed engine has, on the terminal and in files."""


class RoutingPressure(Frozen):
    """Noise on the weights of the engine's routers, drawn for a study. Never for a real run."""

    kind: Literal["routing"] = "routing"
    """Noise on the weights with which the engine's routers choose experts."""
    scale: float = Field(ge=0, le=1e3)
    """Standard deviation of the noise, as a multiple of the rms of the router's row. 0: no noise,
    with every result the same to the bit."""
    redraw: Literal["never", "sync"] = "never"
    """never: one noise for the whole run. sync: another one for every version of the weights."""
    weights: bool = False
    """The combine weights come from the noisy router too, which replay.mode = r3 cannot undo. Else
    only the choice does, and the chosen experts are weighted as without noise."""
    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Decoder indices of the MoE layers with noise. Unset: all."""
    seed: Seed = 0
    """Seed of the noise. The run's own seed does not change it."""

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        layers = self.layers
        if layers is not None and (not layers or len(set(layers)) < len(layers)):
            raise ValueError(
                f"rollout.pressure.layers: {list(layers)}; name each layer once, or leave it out "
                "for all"
            )
        return self

    def describe(self) -> str:
        """Return the line that a run, its summary and its report begin with."""
        where, when, how = "all MoE layers", "drawn once", "the choice of experts only"
        if self.layers is not None:
            where = f"layers {', '.join(map(str, self.layers))}"
        if self.redraw == "sync":
            when = "drawn anew at every weight sync"
        if self.weights:
            how = "the choice of experts and their weights"
        return (
            f"the engine is {PRESSED} (scale {self.scale:g}, {where}, noise {when}, {how}): "
            "its numbers say nothing about real engines"
        )


def _off(value: Any) -> Any:
    if value == "off":
        return None
    return value


PressureConfig = Annotated[RoutingPressure | None, BeforeValidator(_off)]
