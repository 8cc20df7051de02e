"""`HFEngine`: a transformers model sampled in this process. Implements the RolloutEngine protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from onepolicy.config import HFEngineConfig, QuantFormat, UsageError
from onepolicy.config.numerics import Numerics
from onepolicy.interfaces import EngineCaps, NamedWeights, StaticScales
from onepolicy.invariant.fingerprint import compute_fingerprint
from onepolicy.invariant.numerics_contract import numerics_contract_of
from onepolicy.models import decode_experts, linear
from onepolicy.models.load import DTYPES, cast_model
from onepolicy.replay.routers import Routers, bind_routers
from onepolicy.rollout.copies import load_engine_model, quantise_policy
from onepolicy.rollout.hf.continuous_batch import ContinuousBatch
from onepolicy.rollout.hf.forward import CachedForward
from onepolicy.rollout.hf.kv_cache import KVCache
from onepolicy.rollout.hf.sampler import LOGP_METHOD, check_sampling
from onepolicy.rollout.hf.scheduler import BatchRunner, InterruptibleBatch, check_request
from onepolicy.rollout.resume import join_partial_completions
from onepolicy.rollout.spec import EngineSpec
from onepolicy.types import Completion, Sampling

if TYPE_CHECKING:
    from onepolicy.models.quant.quantise import QuantisedModel, QuantisedWeight

KV_CACHE_LAYERS = {"full_attention", "sliding_attention", "attention"}
BATCH_DEPENDENT_ROPE = {
    "dynamic",
    "longrope",
}  # frequencies follow the longest sequence of the batch


def build(spec: EngineSpec) -> HFEngine:
    """The engine with a copy of its own of the model's weights."""
    assert isinstance(spec.config, HFEngineConfig)
    own = load_engine_model(
        spec.model, spec.config.dtype, spec.config.lm_head, spec.device, quant=spec.quant
    )
    return HFEngine(
        own,
        spec.config,
        return_routes=spec.route_spec is not None,
        max_len=spec.max_len,
        combine_weights=spec.combine_weights,
        numerics=spec.numerics,
        quant=spec.quant,
    )


class HFEngine:
    """Takes over `model`: its dtype, attention, experts, linear layers become ours. Give it a copy of its own."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: HFEngineConfig,
        *,
        return_routes: bool,
        max_len: int,
        combine_weights: bool = False,
        numerics: Numerics = "fast",
        quant: QuantFormat | None = None,
    ) -> None:
        """record: return the experts of every token (MoE models only). max_len: prompt + completion tokens.

        weights: return their combine weights as well. numerics: "on-policy" computes what a learner with the same
        weights, dtype and numerics computes, to the bit. quant: of the engine's weights, now and after every sync.
        """
        context = int(model.config.get_text_config().max_position_embeddings)
        if not 2 <= max_len <= context:
            raise UsageError(
                f"max_len: {max_len} is not in 2..{context}, the context length of {type(model).__name__}"
            )
        self.version = 0
        dtype, self._head = DTYPES[config.dtype], None
        self.quantised: QuantisedModel | None = None
        if quant is not None:
            self.quantised = quantise_policy(model.eval(), quant)
        if config.lm_head == "float32":
            from onepolicy.models import fp32_head

            self._head = fp32_head.install_fp32_head(
                model.eval(), dtype, field="rollout.engine.lm_head", copy=True
            )
        self.model: PreTrainedModel = cast_model(model, dtype).eval().requires_grad_(False)
        self._vocab = int(model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
        device = next(model.parameters()).device
        decode_experts.use_decode_experts(model, device)
        linear.use_onednn_linear(model, device)
        self.batch = _make_batch(
            model,
            config,
            max_len,
            bind_routers(model) if return_routes else None,
            combine_weights=combine_weights,
        )
        if numerics == "on-policy":
            _enable_on_policy_numerics(model, self.batch)
        self.fingerprint = compute_fingerprint(device, numerics)
        self.caps = EngineCaps(
            return_routes,
            max_len,
            returns_combine_weights=return_routes and combine_weights,
            top_logprobs=self._vocab,
            contract=numerics_contract_of(model, logp=LOGP_METHOD),
            sizes=None if self.quantised is None else self.quantised.sizes(),
        )
        self._runner = BatchRunner(self.batch)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Completion:
        """Sample until a stop token or max_tokens. The result depends on the seed and the logits, not on the batch.

        What load_weights interrupts goes on from its tokens, with the random numbers it would have had anyway.
        """
        check_sampling(sampling)
        path, parts = list(prompt_ids), list[Completion]()
        while True:
            done = len(path) - len(prompt_ids)
            # the last token of a part was never fed: its row comes with the next part
            first = len(path) - 1 if done else sampling.routes_from
            left = replace(sampling, max_tokens=sampling.max_tokens - done, routes_from=first)
            prompt = check_request(path, left, self.caps, version=self.version, vocab=self._vocab)
            part = await self._runner.run_request(prompt, left, seed, self.version, drawn=done)
            if len(part.token_ids):
                parts.append(part)
                path += part.token_ids.tolist()
            if part.finish != "aborted":
                return replace(
                    join_partial_completions(parts, part.finish, sampling.routes_from),
                    fingerprint=self.fingerprint,
                )

    async def load_weights(self, weights: NamedWeights, version: int) -> None:
        """Take over these tensors, cast to the engine's dtype. All of the model's must be there, in its shapes."""
        self._runner.abort_requests(self.batch.abort_running(self.version))
        stored: dict[str, QuantisedWeight] = (
            {} if self.quantised is None else self.quantised.quantised_weights
        )
        own = {
            name: tensor for name, tensor in self.model.state_dict().items() if name not in stored
        }
        self.version = (
            -1
        )  # until the last tensor is in, the model is neither the old nor the new one
        loaded, left = set(), set(stored)
        with torch.no_grad():
            for name, tensor in weights:
                if name not in own and name not in stored:
                    raise UsageError(
                        f"load_weights: {name!r} is not a tensor of {type(self.model).__name__}"
                    )
                ours, theirs = (
                    tuple((stored if name in stored else own)[name].shape),
                    tuple(tensor.shape),
                )
                if ours != theirs:
                    raise UsageError(
                        f"load_weights: {name!r} has shape {theirs}, the engine's is {ours}"
                    )
                if name in stored:
                    stored[name].set_weight(tensor.to(self.model.device))
                    left.discard(name)
                    continue
                own[name].copy_(tensor)
                if self._head is not None:
                    self._head.update_copy(own[name], tensor)
                loaded.add(own[name].data_ptr())
        missing = [
            name for name, tensor in own.items() if tensor.data_ptr() not in loaded
        ]  # tied names share memory
        missing += sorted(left)
        if missing:
            raise UsageError(
                f"load_weights: {len(missing)} tensors are missing, first {missing[0]!r}"
            )
        self.version = version

    async def reset_cache(self) -> None:
        """Forget every cached prefix: what comes next does not depend on what was sampled before."""
        self._runner.clear_cache("reset_cache")
        if self.quantised is not None:
            self.quantised.reset_statistics()

    @property
    def static_scales(self) -> StaticScales | None:
        """Activation scales to be calibrated, if rollout.quant asks for static ones."""
        return self.quantised if self.quantised is not None and self.quantised.static else None

    def take_metrics(self) -> dict[str, float]:
        """How well calibrated activation scales fit what was sampled since the last call; {} without any."""
        return {} if self.quantised is None else self.quantised.metrics()


def _make_batch(
    model: PreTrainedModel,
    config: HFEngineConfig,
    max_len: int,
    routers: Routers | None,
    *,
    combine_weights: bool,
) -> InterruptibleBatch:
    """How requests run together: over the slab, or over the model's own cache where that holds more than keys."""
    if needs_static_batch(model):
        from onepolicy.rollout.hf.static_batch import StaticBatch

        return StaticBatch(
            model, routers, max_num_seqs=config.max_num_seqs, combine_weights=combine_weights
        )
    device = next(model.parameters()).device
    cache = KVCache(
        config.max_num_seqs, max_len, device=device, dtype=_kv_cache_dtype(model, device)
    )
    return ContinuousBatch(
        CachedForward(model, cache, routers, combine_weights=combine_weights),
        enable_prefix_caching=config.enable_prefix_caching,
    )


def needs_static_batch(model: PreTrainedModel) -> bool:
    """Whether anything but plain (sliding) attention carries information from token to token."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        model._is_stateful
        or not set(kinds) <= KV_CACHE_LAYERS
        or rope.get("rope_type") in BATCH_DEPENDENT_ROPE
        or getattr(config, "index_topk", None)
        is not None  # sparse attention keeps an index beside the keys
    )


def _enable_on_policy_numerics(model: PreTrainedModel, batch: InterruptibleBatch) -> None:
    from onepolicy.invariant.enable import enable_invariant

    if not isinstance(batch, ContinuousBatch):
        raise UsageError(
            f"numerics: {type(model).__name__} decodes with a cache of its own, which on-policy numerics does "
            "not reach; use numerics = fast"
        )
    enable_invariant(model)


def _kv_cache_dtype(model: PreTrainedModel, device: torch.device) -> torch.dtype:
    """The model's own; on the CPU float32, which holds bfloat16 keys exactly and multiplies faster.

    Latent attention (DeepSeek) hands what it reads back to bfloat16 layers, so there it must be the model's.
    """
    own = next(model.parameters()).dtype
    latent = getattr(model.config.get_text_config(), "kv_lora_rank", None) is not None
    return own if device.type != "cpu" or latent else torch.float32
