"""The tiny policy: a real Qwen3-MoE with a character tokenizer and a supervised warm-up.

The warm-up teaches the task's steps completely. It also plants a known error, which reinforcement
learning can then remove: solutions with a mistake that their later steps carry on.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM

from onepolicy.config.policy import PolicyConfig
from onepolicy.files import write_folder
from onepolicy.models.buckets import BucketedPacking
from onepolicy.models.prepare import prepare_for_training

Example = tuple[str, ...]
"""Prompt, response, observation, response ... Responses lack their closing eos."""
SPECIAL = ("<pad>", "<eos>", "<unk>")


def make_tokenizer(alphabet: str, words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character, plus <pad>, <eos> and <unk>.

    words: texts that are one token each, wherever they stand; the longest that fits is taken.
    """
    longest_first = sorted(set(words), key=lambda word: (-len(word), word))
    known = [*SPECIAL, *sorted(set(alphabet)), *longest_first]
    vocabulary = {token: i for i, token in enumerate(known)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    pattern = "|".join([*map(re.escape, longest_first), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make_model(config: PolicyConfig, vocab_size: int) -> PreTrainedModel:
    """Return a MoE model, randomly initialised from config.seed."""
    torch.manual_seed(config.seed)
    shape = _shape(config, vocab_size) | {
        "num_experts": config.experts,
        "num_experts_per_tok": config.top_k,
        "moe_intermediate_size": config.expert_size,
        "router_aux_loss_coef": config.load_balance,
    }
    if config.recurrent:
        hybrid: PreTrainedModel = Qwen3_5MoeForCausalLM(
            Qwen3_5MoeTextConfig(**shape, **_recurrent_shape(config))
        )
        return hybrid
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**shape, intermediate_size=2 * config.hidden_size, norm_topk_prob=True)
    )


def _recurrent_shape(config: PolicyConfig) -> dict[str, Any]:
    """Return the settings of layers of the gated delta rule, as wide as those of attention."""
    period = config.recurrent + 1
    return {
        "layer_types": [
            "full_attention" if layer % period == config.recurrent else "linear_attention"
            for layer in range(config.layers)
        ],
        "linear_num_key_heads": config.kv_heads,
        "linear_num_value_heads": config.heads,
        "linear_key_head_dim": config.head_dim,
        "linear_value_head_dim": config.head_dim,
        "shared_expert_intermediate_size": config.expert_size,
    }


def make_dense(config: PolicyConfig, vocab_size: int) -> Qwen3ForCausalLM:
    """Return the same model without experts.

    Its feed-forward layer is as wide as all experts together, so it has as many parameters.
    """
    torch.manual_seed(config.seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            **_shape(config, vocab_size), intermediate_size=config.experts * config.expert_size
        )
    )


def _shape(config: PolicyConfig, vocab_size: int) -> dict[str, Any]:
    return {
        "vocab_size": max(32, -(-vocab_size // 16) * 16),
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "tie_word_embeddings": False,
        "max_position_embeddings": config.max_len,
        "bos_token_id": None,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    examples: Callable[[float], Iterator[Example]],
    config: PolicyConfig,
    *,
    progress: Callable[[int, float, float], None] = lambda step, loss, accuracy: None,
) -> None:
    """Train by supervised learning on the responses, packed without padding.

    examples: starts a stream of examples, given the fraction with planted mistakes. It is 0 in the
    first config.clean_steps, then config.mistakes.
    progress: called with step, loss and next-token accuracy.
    """
    device = torch.device("cpu")
    prepare_for_training(model, device)
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    stream = examples(0.0)
    for step in range(config.steps):
        if step == config.clean_steps:
            stream = examples(config.mistakes)
        rate = min(1.0, (step + 1) / config.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * step / config.steps))
        optimizer.param_groups[0]["lr"] = config.lr * rate * (0.05 + 0.95 * cosine)
        loss, accuracy = _supervised_loss(model, *_pack(tokenizer, stream, config.tokens_per_step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress(step + 1, loss.item(), accuracy)
    model.eval()


def _pack(
    tokenizer: PreTrainedTokenizerFast, examples: Iterator[Example], budget: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pack whole examples into about `budget` slots.

    Returns ids [T], targets [T] (-100 on the prompt), positions [T] and bounds [S + 1].
    """
    paths: list[list[int]] = []
    responses: list[list[bool]] = []
    while sum(map(len, paths)) < budget:
        path, is_response = _encode(tokenizer, next(examples))
        paths.append(path)
        responses.append(is_response)
    inputs = torch.cat([torch.tensor(path[:-1]) for path in paths])
    targets = [
        torch.tensor(path[1:]).where(torch.tensor(is_response[1:]), -100)
        for path, is_response in zip(paths, responses, strict=True)
    ]
    positions = torch.cat([torch.arange(len(path) - 1) for path in paths])
    bounds = torch.tensor([0, *(len(path) - 1 for path in paths)]).cumsum(0).int()
    return inputs, torch.cat(targets), positions, bounds


def _encode(tokenizer: PreTrainedTokenizerFast, example: Example) -> tuple[list[int], list[bool]]:
    """Return the token ids of one example, and for each whether it belongs to a response."""
    path: list[int] = []
    is_response: list[bool] = []
    for part, text in enumerate(example):
        ids = tokenizer.encode(text, add_special_tokens=False)
        responds = part % 2 == 1
        if responds:
            ids = [*ids, tokenizer.eos_token_id]
        path += ids
        is_response += [responds] * len(ids)
    return path, is_response


def _supervised_loss(
    model: PreTrainedModel,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    positions: torch.Tensor,
    bounds: torch.Tensor,
) -> tuple[torch.Tensor, float]:
    slots = (targets >= 0).nonzero()[:, 0]
    out = model(
        input_ids=inputs[None],
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=slots,
        output_router_logits=True,
        packing=BucketedPacking.of(bounds, inputs.device),
    )
    logits, labels = out.logits[0].float(), targets[slots]
    cross_entropy = torch.nn.functional.cross_entropy(logits, labels)
    loss = cross_entropy + model.config.router_aux_loss_coef * out.aux_loss
    return loss, (logits.argmax(-1) == labels).float().mean().item()


def save_policy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, config: PolicyConfig, path: Path
) -> None:
    """Write a folder in transformers' layout plus policy.json, whole or not at all."""
    # Another process may make the same policy. The name is short, as that of `path` may be long.
    with write_folder(path, path.with_name(f".writing-{os.getpid()}")) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        text = json.dumps(config.model_dump(), indent=1)
        (folder / "policy.json").write_text(text, encoding="utf-8")
