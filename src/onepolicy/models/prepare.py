"""Make a model ready for packed training: refuse what cannot be packed, select our functions, check the result."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.config import UsageError
from onepolicy.models import experts, linear, packed_attention
from onepolicy.models.packed_attention import Packing

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}
LENGTHS = (7, 4)  # tokens of the two samples of the check
RULED_OUT = 1e4
"""How far below the row's largest logit a token's probability is 0 in float32, at any temperature below 90 [nats]."""
TOLERANCE = {
    torch.float32: 1e-3,
    torch.bfloat16: 0.1,
}  # mean difference of the logits, in their standard deviations


def recurrent_layers(model: PreTrainedModel) -> str:
    """What layers it has, in words, that attention to earlier tokens alone cannot stand for; empty if it has none."""
    config = model.config.get_text_config()
    kinds = set(
        getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    )
    other = ", ".join(sorted(kinds - ATTENTION_LAYERS))
    return other or ("recurrent" if model._is_stateful else "")


def prepare_for_training(
    model: PreTrainedModel, device: torch.device, *, compute: torch.dtype | None = None
) -> None:
    """Select our packed attention and (CPU) our experts and linear layers on this model only.

    UsageError if packed samples would not be what they are alone: recurrent state leaks between them, and attention
    that lives in a mask (chunks, alibi) would be lost. compute: dtype of its forward, if not that of its parameters.
    """
    config = model.config.get_text_config()
    if other := recurrent_layers(model):
        raise UsageError(
            f"model.path: {type(model).__name__} has {other} layers, which packed samples "
            "would share; train a family whose layers are full or sliding attention"
        )
    with torch.no_grad():
        alone = torch.cat([_logits(model, ids[None]) for ids in _samples(model, device)])
        model.set_attn_implementation(packed_attention.NAME)
        if device.type == "cpu" and getattr(model, "set_experts_implementation", None) is not None:
            model.set_experts_implementation(experts.NAME)
        linear.use_onednn_linear(model, device)
        together = _packed_logits(model, _samples(model, device))
    if config._attn_implementation != packed_attention.NAME:
        raise UsageError(
            f"model.path: {type(model).__name__} does not take an attention function, so it cannot be packed"
        )
    banned = _ruled_out(alone) & _ruled_out(together)
    together, alone = together[~banned], alone[~banned]
    off = ((together - alone).abs().mean() / alone.std()).item()
    if not off < TOLERANCE[compute or model.dtype]:
        raise UsageError(
            f"model.path: {type(model).__name__} computes other logits for packed samples than for them alone "
            f"(off by {off:.2f} standard deviations); this family cannot be trained packed"
        )


def _ruled_out(logits: Tensor) -> Tensor:  # [n, vocabulary] -> bool
    """Tokens that the head itself rules out, by -inf or by a number so low that beside its spread nothing counts."""
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
    packing = Packing.of(bounds, samples[0].device)
    try:
        return _logits(
            model, torch.cat(samples)[None], position_ids=positions[None], packing=packing
        )
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"model.path: {type(model).__name__} cannot be trained packed: {error}"
        ) from None
