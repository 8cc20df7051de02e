"""What engine and learner must have in common for equal bits: each side states it of its live model, then both are
compared before a run starts."""

from __future__ import annotations

import dataclasses
from collections import Counter

from torch import Tensor, nn
from transformers import PreTrainedModel

from onepolicy.config import UsageError
from onepolicy.invariant.switch import is_invariant
from onepolicy.types import NumericsContract


def numerics_contract_of(model: PreTrainedModel, *, logp: str) -> NumericsContract:
    """State how `model` computes. logp: from logits and temperature to the log-probability of a token."""
    dtypes = Counter(str(p.dtype).removeprefix("torch.") for p in model.parameters())
    owners = {name: module for name, module in model.named_modules() if _own(module)}
    return NumericsContract(
        numerics="on-policy" if is_invariant(model) else "fast",
        dtype=next(iter(dtypes)) if len(dtypes) == 1 else str(dict(sorted(dtypes.items()))),
        attention=str(model.config.get_text_config()._attn_implementation),
        experts=str(getattr(model.config.get_text_config(), "_experts_implementation", None)),
        lm_head=_computed(model.get_output_embeddings()),
        modules=tuple((name, _computed(module)) for name, module in owners.items()),
        logp=logp,
    )


def require_same_contract(engine: NumericsContract, learner: NumericsContract) -> None:
    """UsageError that names the first difference, with the values of both sides."""
    for field in dataclasses.fields(NumericsContract):
        ours, theirs = getattr(learner, field.name), getattr(engine, field.name)
        if ours == theirs:
            continue
        name = field.name
        if name == "modules":
            name, theirs, ours = _first_module(engine, learner)
        raise UsageError(
            f"numerics: on-policy needs the same {name} on both sides, but the engine has {theirs} and the trainer "
            f"{ours}; use one model and one dtype, or numerics = fast"
        )


def _first_module(engine: NumericsContract, learner: NumericsContract) -> tuple[str, str, str]:
    theirs, ours = dict(engine.modules), dict(learner.modules)
    name = next(n for n in [*ours, *theirs] if theirs.get(n) != ours.get(n))
    return f"module {name}", theirs.get(name, "none"), ours.get(name, "none")


def _computed(module: nn.Module | Tensor) -> str:
    """Which forward computes this module, and on tensors of which dtype."""
    assert isinstance(module, nn.Module)
    dtypes = ", ".join(
        sorted({str(tensor.dtype).removeprefix("torch.") for tensor in _own(module)})
    )
    forward = module.forward
    return f"{type(module).__name__} ({dtypes}) computed by {forward.__module__}.{forward.__qualname__}"


def _own(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]
