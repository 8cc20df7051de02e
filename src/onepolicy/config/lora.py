"""Low-rank adapters (LoRA, arXiv:2106.09685), trained in place of the model's weights."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from onepolicy.config.base import LARGEST_INT, Frozen, PositiveFloat, SmallCount

Target = Literal["attention", "dense", "experts", "routers"]


class LoraConfig(Frozen):
    """Low-rank adapters (LoRA): W + B A alpha / rank, where only A and B are trained."""

    rank: SmallCount = 16
    """Rank of every adapter. Experts: of each expert."""
    alpha: PositiveFloat | None = None
    """An adapter adds B A alpha / rank to its weight. Unset: 2 * rank."""
    targets: tuple[Target, ...] | None = None
    """Weights with an adapter; dense: MLPs and shared experts. Unset: all but routers, as far as
    the model has them."""
    sync: Literal["merged", "native"] = "merged"
    """merged: the engine gets base + adapter in its own dtype. native: A and B alone (docs/lora.md
    lists engines and targets)."""
    loss_every: int = Field(10, ge=0, le=LARGEST_INT)
    """Steps between measurements of what a merge into the engine's dtype loses. 0: only before the
    run."""
    base: Literal["same", "nf4"] = "same"
    """Format of frozen linear layers and experts. nf4: 4 bits (QLoRA, bitsandbytes); the policy is
    the dequantised base + adapter, in trainer and engine."""

    @property
    def scaling(self) -> float:
        """The factor alpha / rank of B A."""
        if self.alpha is None:
            return 2.0
        return self.alpha / self.rank


def _off(value: Any) -> Any:
    if value == "off":
        return None
    return value


LoraSetting = Annotated[LoraConfig | None, BeforeValidator(_off)]
