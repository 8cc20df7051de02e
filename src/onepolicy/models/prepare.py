"""Preparation of a model for packed training: select functions, and check that packing works."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.config import UsageError
from onepolicy.models import experts, linear, packed_attention, rms_norm, rotary
from onepolicy.models.buckets import BucketedPacking
from onepolicy.models.layer_kinds import LAYER_KINDS, layer_kinds
from onepolicy.models.packing_check import check_packing
from onepolicy.models.recurrent.layers import Recurrent, install_recurrent, recurrent_places

LENGTHS = (7, 4)  # tokens of the two samples of the check
OTHER_SIZES = re.compile("size of tensor|cannot be multiplied|invalid for input of size")
RULED_OUT = 1e4
"""Distance in nats from the row's largest logit at which a token's probability is 0 in float32.

This holds at any temperature below 90.
"""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Mean difference of the logits that passes, in their standard deviations."""


def recurrent_layers(model: PreTrainedModel) -> str:
    """Return the kinds of layers that are not attention to earlier tokens; "" if there are none."""
    recurrent = set(_recurrent_kinds(model).values())
    # A model of a hybrid family may be all attention.
    said = layer_kinds(model.config.get_text_config()) and not recurrent_places(model)
    if not recurrent and model._is_stateful and not said:
        return "recurrent"
    return ", ".join(sorted(recurrent))


def unknown_layers(model: PreTrainedModel) -> str:
    """Return the kinds among `recurrent_layers` whose operators are not known; "" if none is."""
    kinds, found = recurrent_layers(model), recurrent_places(model)
    if not kinds:
        return ""
    if has_one_per_layer(model):
        return ", ".join(sorted(set(kinds.split(", ")) - LAYER_KINDS.keys()))
    unknown = {kind for i, kind in _recurrent_kinds(model).items() if found[i] != 1}
    return ", ".join(sorted(unknown)) or kinds


def has_one_per_layer(model: PreTrainedModel) -> bool:
    """Return whether the operators of every recurrent layer are known, one mixer in each.

    Kinds have other names in each family, so the operators decide that a layer's code calls.
    """
    places, found = _recurrent_kinds(model), recurrent_places(model)
    if not places:  # the config does not say which layers are
        return bool(found) and set(found.values()) == {1}
    return found == Counter(list(places))


def _recurrent_kinds(model: PreTrainedModel) -> dict[int, str]:
    """Return the kind of every layer that is not attention to earlier tokens, by its index."""
    kinds = enumerate(layer_kinds(model.config.get_text_config()))
    return {i: kind for i, kind in kinds if kind not in LAYER_KINDS or LAYER_KINDS[kind].recurrent}


def prepare_for_training(
    model: PreTrainedModel, device: torch.device, *, compute: torch.dtype | None = None
) -> None:
    """Select packed attention, onepolicy's experts, norms and RoPE, on a CPU its linear layers.

    Recurrent layers get operators that know where samples begin.
    compute: dtype of the forward, if it is not that of the parameters.

    Raises:
        UsageError: the weights are damaged, or packing would change the model's logits. Samples
            would share the state of recurrent layers whose operators are unknown, and attention
            that a family expresses by a mask (chunks, alibi) would be lost.
    """
    config = model.config.get_text_config()
    _install_recurrent(model)
    with torch.no_grad():
        try:
            alone = torch.cat([_logits(model, ids[None]) for ids in _samples(model, device)])
        except RuntimeError as error:
            if not OTHER_SIZES.search(str(error)):
                raise
            raise UsageError(
                f"model.path: {type(model).__name__} cannot compute with the sizes in its "
                f"config.json ({error}); restore that file"
            ) from error
        _check_logits(model, alone)
        model.set_attn_implementation(packed_attention.NAME)
        if getattr(model, "set_experts_implementation", None) is not None:
            model.set_experts_implementation(experts.NAME)
        linear.use_onednn_linear(model, device)
        rms_norm.use_few_passes(model, fused=device.type != "cpu")
        rotary.use_few_passes(model)
        together = _packed_logits(model, _samples(model, device))
    _check_states(model)
    if config._attn_implementation != packed_attention.NAME:
        raise UsageError(
            f"model.path: {type(model).__name__} does not take an attention function, so it cannot "
            "be packed"
        )
    ruled_out = _ruled_out(alone) & _ruled_out(together)
    together, alone = together[~ruled_out], alone[~ruled_out]
    off = ((together - alone).abs().mean() / alone.std()).item()
    if not off < TOLERANCE[compute or model.dtype]:
        found = check_packing(model, partial(_packed_logits, model))
        where = f", first in {found.layer}" if found.layer else ""
        raise UsageError(
            f"model.path: {type(model).__name__} computes other logits for packed samples than for "
            f"them alone (off by {off:.2f} standard deviations{where}); this family cannot be "
            "trained packed"
        )


def _install_recurrent(model: PreTrainedModel) -> None:
    """Install packed recurrent layers. Raises UsageError if the model has others."""
    unknown = unknown_layers(model)
    if unknown:
        raise UsageError(
            f"model.path: {type(model).__name__} has {unknown} layers, whose operators onepolicy "
            "does not know, so packed samples would share them; train a family of docs/hybrids.md"
        )
    install_recurrent(model)


def _check_states(model: PreTrainedModel) -> None:
    """Raise UsageError if a recurrent layer of a packed forward did not get its samples' bounds."""
    for name, layer in model.named_modules():
        if isinstance(layer, Recurrent) and layer.row is None:
            raise UsageError(
                f"model.path: {type(model).__name__} does not tell {name} where packed samples "
                "begin, so they would share its state; train a family of docs/hybrids.md"
            )


def _check_logits(model: PreTrainedModel, logits: Tensor) -> None:
    """Raise UsageError if no weights that were trained give such logits [n, V]."""
    allowed = logits[~_ruled_out(logits)]
    if not allowed.isfinite().all() or not (allowed != allowed[0]).any():
        raise UsageError(
            f"model.path: {type(model).__name__} computes logits that are NaN, infinite or all "
            "alike; its weights are damaged, take the checkpoint again"
        )


def _ruled_out(logits: Tensor) -> Tensor:
    """Return which tokens the head rules out, by -inf or a very low logit. [n, V] -> [n, V] bool.

    Such a logit would dominate the standard deviation of all logits.
    """
    return logits < logits.amax(-1, keepdim=True) - RULED_OUT


def _samples(model: PreTrainedModel, device: torch.device) -> list[Tensor]:
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.arange(3, 3 + sum(LENGTHS), device=device) % vocabulary
    return list(ids.split(LENGTHS))


def _logits(model: PreTrainedModel, ids: Tensor, **arguments: object) -> Tensor:
    return model(input_ids=ids, use_cache=False, **arguments).logits[0].float()


def _packed_logits(model: PreTrainedModel, samples: list[Tensor]) -> Tensor:
    bounds = torch.tensor([0, *map(len, samples)]).cumsum(0).int()
    positions = torch.cat([torch.arange(len(ids), device=ids.device) for ids in samples])
    packing = BucketedPacking.of(bounds, samples[0].device)
    try:
        return _logits(
            model, torch.cat(samples)[None], position_ids=positions[None], packing=packing
        )
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"model.path: {type(model).__name__} cannot be trained packed: {error}"
        ) from None
