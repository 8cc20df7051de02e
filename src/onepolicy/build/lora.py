"""The trained adapter of a run (train.lora), and the parts of its update.

Only the functions that build a run with train.lora import this file.
"""

from __future__ import annotations

from pathlib import Path

from onepolicy.config import RunConfig
from onepolicy.train.lora import Adapter, FrozenReference
from onepolicy.train.scorer import PolicyScorer
from onepolicy.train.update_parts import UpdatePart


def build_adapter(scorer: PolicyScorer) -> tuple[Adapter, list[UpdatePart]]:
    """Return the adapter inside this scorer's model, and the parts of the update it brings.

    The reference of objective.kl is the model without its adapter, unless another one is named.
    """
    config = scorer.config
    adapter = Adapter(scorer.model, adapter_name(config))
    if config.objective.kl.coef and config.objective.kl.reference is None:
        return adapter, [FrozenReference(adapter)]
    return adapter, []


def adapter_name(config: RunConfig) -> str:
    """Return the name of a run's adapter in engines and replies: the name of its run folder."""
    return f"lora-{Path(config.out).name}"
