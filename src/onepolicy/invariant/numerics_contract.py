"""The arithmetic that engine and learner must have in common for equal bits.

Each side describes its live model. The two descriptions are compared before a run starts.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from torch import Tensor, nn
from transformers import PreTrainedModel

from onepolicy.config import UsageError
from onepolicy.interfaces import NumericsContract
from onepolicy.invariant.switch import is_invariant


def numerics_contract_of(model: PreTrainedModel, *, logp: str) -> NumericsContract:
    """Return the description of a model's arithmetic.

    logp: the computation from logits and temperature to a token's log-probability.
    """
    numerics = "fast"
    if is_invariant(model):
        numerics = "on-policy"
    config = model.config.get_text_config()
    return NumericsContract(
        numerics=numerics,
        dtype=_dtypes_of_parameters(model),
        attention=str(config._attn_implementation),
        experts=str(getattr(config, "_experts_implementation", None)),
        lm_head=_describe_module(model.get_output_embeddings()),
        modules=tuple(
            (name, _describe_module(module))
            for name, module in model.named_modules()
            if _direct_tensors(module)
        ),
        logp=logp,
    )


def require_same_contract(engine: NumericsContract, learner: NumericsContract) -> None:
    """Raise UsageError, naming the first difference and its two values, unless both are equal."""
    for field in dataclasses.fields(NumericsContract):
        name = field.name
        in_learner, in_engine = getattr(learner, name), getattr(engine, name)
        if in_learner == in_engine:
            continue
        if name == "modules":
            name, in_engine, in_learner = _first_module(engine, learner)
        raise UsageError(
            f"numerics: on-policy needs the same {name} on both sides, but the engine has "
            f"{in_engine} and the trainer {in_learner}; use one model and one dtype, or "
            "numerics = fast"
        )


def _first_module(engine: NumericsContract, learner: NumericsContract) -> tuple[str, str, str]:
    """Return the name of the first module that differs, in the engine and in the learner."""
    in_engine, in_learner = dict(engine.modules), dict(learner.modules)
    names = [*in_learner, *in_engine]
    name = next(name for name in names if in_engine.get(name) != in_learner.get(name))
    return f"module {name}", in_engine.get(name, "none"), in_learner.get(name, "none")


def _dtypes_of_parameters(model: PreTrainedModel) -> str:
    """Return the parameters' dtype, or every dtype with its count."""
    dtypes = Counter(str(p.dtype).removeprefix("torch.") for p in model.parameters())
    if len(dtypes) == 1:
        return next(iter(dtypes))
    return str(dict(sorted(dtypes.items())))


def _describe_module(module: nn.Module | Tensor) -> str:
    """Return the forward that computes this module, and the dtypes of its tensors."""
    assert isinstance(module, nn.Module)
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in _direct_tensors(module)}
    forward = module.forward
    return (
        f"{type(module).__name__} ({', '.join(sorted(dtypes))}) computed by "
        f"{forward.__module__}.{forward.__qualname__}"
    )


def _direct_tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]
