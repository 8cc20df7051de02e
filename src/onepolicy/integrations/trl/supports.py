"""Sampling supports in TRL: the tokens that top_p, top_k and min_p left, from sampler to loss.

TRL hands these settings to the sampler, and scores over the whole vocabulary. Here its scoring and
training forwards take the softmax over the tokens that each token was drawn from.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.config.run_rules import MOST_RETURNED
from onepolicy.integrations.core.supports import batch_supports, to_support
from onepolicy.replay.payloads.vllm import NO_LOGP
from onepolicy.support.checks import check_supports
from onepolicy.support.score import support_scores
from onepolicy.support.trace import SupportTrace, likeliest_needed

SUPPORTS = "supports"
"""Key of a rollout_func's supports, and of the traces in TRL's batch."""
NONE_RETURNED = (
    "TRL: top_p, top_k or min_p cut the sampling, and the rollout_func returns no supports, so "
    f'every ratio would be wrong; return them under the key "{SUPPORTS}", or leave the correction '
    "out"
)


def why_not(trainer: Any, top_k: int) -> str:
    """Return why this trainer cannot score over supports; empty if it can.

    top_k: with which it samples, 0 for none.
    """
    args = trainer.args
    for name, found in (
        ("tools", getattr(trainer, "tools", None)),
        ("images", getattr(trainer, "_is_vlm", False)),
        ("cast_lm_head_to_fp32", getattr(args, "cast_lm_head_to_fp32", False)),
        ("router_aux_loss_coef", getattr(trainer, "aux_loss_enabled", False)),
    ):
        if found:
            return f"not with {name}"
    if getattr(trainer, "rollout_func", None) is not None:
        return ""
    if not trainer.use_vllm:
        if trainer.use_transformers_continuous_batching:
            return "continuous batching returns tokens alone"
        return ""
    if not 0 < top_k <= MOST_RETURNED:
        return (
            "vLLM returns the tokens that they leave among a number of likeliest ones: set top_k "
            f"too, from 1 to {MOST_RETURNED}"
        )
    llm = getattr(getattr(trainer, "vllm_generation", None), "llm", None)
    if llm is not None:
        most, wanted = llm.llm_engine.model_config.max_logprobs, likeliest_of(trainer, top_k)
        if 0 <= most < wanted:
            return (
                f"{wanted} log-probabilities a token are needed and this vLLM returns {most}: "
                "build the trainer inside `with op_trl.routed_vllm():`"
            )
    return ""


def likeliest_of(trainer: Any, top_k: int) -> int:
    """Return how many likeliest tokens vLLM is asked for: the whole support, with ties."""
    config: Any = getattr(trainer.model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    wanted = likeliest_needed(top_k)
    return min(wanted, getattr(config, "vocab_size", wanted))


class Likeliest(NamedTuple):
    """The likeliest tokens of one completion, in the order in which TRL lists them."""

    logp: list[list[float | None]]
    ids: list[list[int]]

    def support(self) -> SupportTrace:
        """Return the supports. Raises UsageError where a set may have been cut."""
        width = max(map(len, self.ids), default=0)
        ids = torch.zeros(len(self.ids), width, dtype=torch.int64)
        logp = torch.full(ids.shape, -torch.inf)
        for slot, (tokens, values) in enumerate(zip(self.ids, self.logp, strict=True)):
            ids[slot, : len(tokens)] = torch.tensor(tokens)
            known = [NO_LOGP if value is None else value for value in values]
            logp[slot, : len(known)] = torch.tensor(known)
        return SupportTrace.from_logp(ids, logp.masked_fill(logp <= NO_LOGP, -torch.inf))

    def of(self, completion: Sequence[int]) -> list[float | None]:
        """Return the log-probability of each sampled token."""
        rows = zip(completion, self.ids, self.logp, strict=True)
        return [values[ids.index(token)] for token, ids, values in rows]


def supports_of_rollout(payloads: Any, completions: Sequence[Sequence[int]]) -> list[SupportTrace]:
    """Return the supports of a rollout_func's completions. Raises UsageError."""
    if not isinstance(payloads, list | tuple) or len(payloads) != len(completions):
        raise UsageError(
            f"rollout_func: {SUPPORTS} are not a list of one entry for each of {len(completions)} "
            "completions"
        )
    return [
        to_support(payload, len(tokens), name=f"rollout_func: {SUPPORTS} of completion {number}")
        for number, (payload, tokens) in enumerate(zip(payloads, completions, strict=True))
    ]


def check_completions(
    supports: Sequence[SupportTrace],
    completions: Sequence[Sequence[int]],
    masks: Sequence[Sequence[int]] | None,
) -> None:
    """Raise SupportError unless every sampled token has a set that it is in.

    masks: 1 where a token was sampled; None: all were.
    """
    for number, (support, tokens) in enumerate(zip(supports, completions, strict=True)):
        sampled = None
        if masks is not None:
            sampled = torch.tensor(masks[number], dtype=torch.bool)
        own = torch.tensor(list(tokens), dtype=torch.int64)
        check_supports(support, own, sampled, name=f"TRL: completion {number}")


class SupportScorer:
    """TRL's `_get_per_token_logps_and_entropies`, over the supports of a batch."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.logp_vocabulary: Tensor | None = None
        """Of the last call without gradient, over the whole vocabulary: [B, T] float32."""

    def score(
        self,
        supports: Sequence[SupportTrace],  # of the B completions
        model: Any,
        input_ids: Tensor,  # [B, P + T]
        attention_mask: Tensor,  # [B, P + T]
        logits_to_keep: int,  # T
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **images: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Return log-probabilities and entropy [B, T] over the sets. 0 where a token has none.

        Raises SupportError for a set without its own token.
        """
        assert not compute_aux_loss, "preflight refuses it"
        assert all(value is None for value in images.values()), "preflight refuses images"
        size = batch_size or len(input_ids)
        parts = []
        for start in range(0, len(input_ids), size):
            rows = slice(start, start + size)
            parts.append(
                self._part(
                    supports[rows], model, input_ids[rows], attention_mask[rows], logits_to_keep
                )
            )
        logp, entropy, whole = (torch.cat(each) for each in zip(*parts, strict=True))
        if not torch.is_grad_enabled():
            self.logp_vocabulary = whole
        if compute_entropy:
            return logp, entropy, None
        return logp, None, None

    def _part(
        self,
        supports: Sequence[SupportTrace],
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        width: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        trainer = self._trainer
        given: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
        given["use_cache"] = False
        if _takes(trainer.accelerator.unwrap_model(model), "logits_to_keep"):
            given["logits_to_keep"] = width + 1
        with trainer.accelerator.autocast():
            logits = model(**given).logits[:, -width - 1 : -1]
        tokens = input_ids[:, -width:].reshape(-1)
        support = batch_supports(supports, width, tokens.device)
        check_supports(support, tokens, support.captured, name="TRL: batch")
        slots = support.captured.nonzero()[:, 0]
        flat = logits.reshape(-1, logits.shape[-1])
        scores = support_scores(
            flat, tokens[slots], support.at(slots), rows=slots, divisor=trainer.temperature
        )
        zeros = torch.zeros(len(tokens), device=tokens.device)
        whole = zeros
        if not torch.is_grad_enabled():
            tempered = flat.float() / trainer.temperature
            whole = tempered.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        found = (zeros.index_copy(0, slots, each) for each in (scores.logp, scores.entropy))
        logp, entropy = (each.view(-1, width) for each in found)
        return logp, entropy, whole.view(-1, width)


def _takes(model: Any, argument: str) -> bool:
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return argument in inspect.signature(type(model).forward).parameters
