"""Variants of some families for the tests that need no more, random traces, and the inputs of the
experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from onepolicy.types import RoutingTrace, id_dtype
from support.families import TABLE, model_options, perturb

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_moe": lambda: TABLE["qwen3_moe"].config(mlp_only_layers=[], norm_topk_prob=True),
    "qwen3_moe_no_norm": lambda: TABLE["qwen3_moe"].config(norm_topk_prob=False),
    "qwen2_moe": lambda: TABLE["qwen2_moe"].config(decoder_sparse_step=1, norm_topk_prob=False),
    "olmoe": lambda: TABLE["olmoe"].config(norm_topk_prob=True),
    "mixtral": lambda: TABLE["mixtral"].config(num_experts_per_tok=2),
    "deepseek_v3": lambda: TABLE["deepseek_v3"].config(norm_topk_prob=True),
    "deepseek_v3_no_norm": lambda: TABLE["deepseek_v3"].config(norm_topk_prob=False),
    "deepseek_v3_one_group": lambda: TABLE["deepseek_v3"].config(
        n_group=1, topk_group=1, norm_topk_prob=True
    ),
    "deepseek_v2_groups": lambda: TABLE["deepseek_v2"].config(),
    "glm4_moe": lambda: TABLE["glm4_moe"].config(norm_topk_prob=True),
    "gpt_oss": lambda: TABLE["gpt_oss"].config(),
}


def build(
    family: str, *, experts: str = "grouped_mm", seed: int = 0, **changes: object
) -> PreTrainedModel:
    """Build a model with random weights, decided routers and, if the family has one, a selection
    bias that changes choices."""
    torch.manual_seed(seed)
    config = FAMILIES[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", **model_options(torch.float32, experts)
    )
    perturb(model)
    return model.train()


def tokens(rows: int = 3, length: int = 7, *, seed: int = 1) -> Tensor:
    return torch.randint(1, 61, (rows, length), generator=torch.Generator().manual_seed(seed))


def random_trace(
    rows: int, layers: tuple[int, ...], experts: int, top_k: int, *, seed: int = 2
) -> RoutingTrace:
    """Return different experts in every row, in no particular order."""
    noise = torch.rand(rows, len(layers), experts, generator=torch.Generator().manual_seed(seed))
    ids = noise.argsort(-1)[..., :top_k].to(id_dtype(experts))
    return RoutingTrace(ids, torch.ones(rows, dtype=torch.bool), layers, experts)


def loss_and_grads(model: PreTrainedModel, input_ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits, and the gradients of a loss over all of them."""
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=input_ids, use_cache=False).logits
    logits.log_softmax(-1).gather(-1, input_ids.roll(1, -1)[..., None]).mean().backward()
    return logits.detach(), {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


@contextmanager
def experts_inputs(model: PreTrainedModel) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Record (ids, weights) [N, K] that reached each layer's experts, in the order of
    their runs. They decide which experts computed."""
    seen: list[tuple[Tensor, Tensor]] = []
    handles = [
        module.experts.register_forward_pre_hook(
            lambda _, args: seen.append((args[1].clone(), args[2].detach().clone()))
        )
        for module in model.modules()
        if hasattr(module, "experts")
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def take_grads(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the model's gradients and clear them."""
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
