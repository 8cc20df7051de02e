"""`HFEngine`: a transformers model sampled in this process. Implements the RolloutEngine protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from onepolicy.config import HFEngineConfig, QuantFormat, UsageError
from onepolicy.config.numerics import Numerics
from onepolicy.interfaces import EngineCaps, Weights
from onepolicy.invariant.contract import Contract
from onepolicy.invariant.fingerprint import fingerprint
from onepolicy.invariant.probe import start
from onepolicy.models import decode_experts, fp32_head, linear
from onepolicy.models.load import cast
from onepolicy.models.quant.install import Quantised, Stored, quantise
from onepolicy.models.quant.parts import Sizes
from onepolicy.replay.checks import is_moe
from onepolicy.replay.layers import find_routers
from onepolicy.replay.routers import bind_routers
from onepolicy.rollout.hf.forward import SlabForward
from onepolicy.rollout.hf.own_cache import OwnCacheBatch, needs_own_cache
from onepolicy.rollout.hf.sampler import LOGP, check_sampling
from onepolicy.rollout.hf.scheduler import Driver, check_request
from onepolicy.rollout.hf.slab import Slab
from onepolicy.rollout.hf.slab_batch import SlabBatch
from onepolicy.rollout.request import joined
from onepolicy.types import Completion, Sampling

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class HFEngine:
    """Takes over `model`: its dtype, attention, experts, linear layers become ours. Give it a copy of its own."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: HFEngineConfig,
        *,
        record: bool,
        max_len: int,
        weights: bool = False,
        numerics: Numerics = "fast",
        quant: QuantFormat | None = None,
    ) -> None:
        """record: return the experts of every token (MoE models only). max_len: prompt + completion tokens.

        weights: return their combine weights as well. numerics: "on-policy" computes what a learner with the same
        weights, dtype and numerics computes, to the bit. quant: of the engine's weights, now and after every sync.
        """
        context = int(model.config.get_text_config().max_position_embeddings)
        if not 2 <= max_len <= context:
            raise UsageError(f"max_len: {max_len} is not in 2..{context}, the context length of {type(model).__name__}")
        self.version = 0
        dtype, self._head = DTYPES[config.dtype], None
        self.quantised: Quantised | None = None if quant is None else quantise_policy(model.eval(), quant)
        if config.lm_head == "float32":
            self._head = fp32_head.install(model.eval(), dtype, field="rollout.engine.lm_head", copy=True)
        self.model: PreTrainedModel = cast(model, dtype).eval().requires_grad_(False)
        self._vocab = int(model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
        self.caps = EngineCaps(record, max_len, routing_weights=record and weights, top_logprobs=self._vocab)
        device = next(model.parameters()).device
        decode_experts.prepare(model, device)
        linear.prepare(model, device)
        routers = bind_routers(model) if record else None
        self.batch: SlabBatch | OwnCacheBatch
        if needs_own_cache(model):
            self.batch = OwnCacheBatch(model, routers, slots=config.slots, weights=weights)
        else:
            slab = Slab(config.slots, max_len, device=device, dtype=_slab_dtype(model, device))
            self.batch = SlabBatch(SlabForward(model, slab, routers, weights=weights), prefix_reuse=config.prefix_reuse)
        if numerics == "on-policy":
            if not isinstance(self.batch, SlabBatch):
                raise UsageError(
                    f"numerics: {type(model).__name__} decodes with a cache of its own, which on-policy numerics does "
                    "not reach; use numerics = fast"
                )
            start(model)
        self.contract, self.fingerprint = Contract.of(model, logp=LOGP), fingerprint(device, numerics)
        self._driver = Driver(self.batch)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int) -> Completion:
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
            part = await self._driver.run(prompt, left, seed, self.version, drawn=done)
            if len(part.token_ids):
                parts.append(part)
                path += part.token_ids.tolist()
            if part.finish != "aborted":
                return replace(joined(parts, part.finish, sampling.routes_from), fingerprint=self.fingerprint)

    async def load_weights(self, weights: Weights, version: int) -> None:
        """Take over these tensors, cast to the engine's dtype. All of the model's must be there, in its shapes."""
        self._driver.interrupt(self.batch.take_out(self.version))
        stored: dict[str, Stored] = {} if self.quantised is None else self.quantised.stored
        own = {name: tensor for name, tensor in self.model.state_dict().items() if name not in stored}
        self.version = -1  # until the last tensor is in, the model is neither the old nor the new one
        loaded, left = set(), set(stored)
        with torch.no_grad():
            for name, tensor in weights:
                if name not in own and name not in stored:
                    raise UsageError(f"load_weights: {name!r} is not a tensor of {type(self.model).__name__}")
                ours, theirs = tuple((stored if name in stored else own)[name].shape), tuple(tensor.shape)
                if ours != theirs:
                    raise UsageError(f"load_weights: {name!r} has shape {theirs}, the engine's is {ours}")
                if name in stored:
                    stored[name].take(tensor.to(self.model.device))
                    left.discard(name)
                    continue
                own[name].copy_(tensor)
                if self._head is not None:
                    self._head.take(own[name], tensor)
                loaded.add(own[name].data_ptr())
        missing = [name for name, tensor in own.items() if tensor.data_ptr() not in loaded]  # tied names share memory
        missing += sorted(left)
        if missing:
            raise UsageError(f"load_weights: {len(missing)} tensors are missing, first {missing[0]!r}")
        self.version = version

    async def reset_cache(self) -> None:
        """Forget every cached prefix: what comes next does not depend on what was sampled before."""
        self._driver.clear("reset_cache")
        if self.quantised is not None:
            self.quantised.forget()

    @property
    def sizes(self) -> Sizes | None:
        """What rollout.quant made of the weights; None without it."""
        return None if self.quantised is None else self.quantised.sizes()

    def take_metrics(self) -> dict[str, float]:
        """How well calibrated activation scales fit what was sampled since the last call; {} without any."""
        return {} if self.quantised is None else self.quantised.metrics()


def quantise_policy(model: PreTrainedModel, quant: QuantFormat, *, experts_only: bool = False) -> Quantised:
    """`quantise`, with the model's routers left as they are unless asked for."""
    routers = [router.path for router in find_routers(model)] if is_moe(model.config) else []
    return quantise(model, quant, routers=routers, experts_only=experts_only)


def _slab_dtype(model: PreTrainedModel, device: torch.device) -> torch.dtype:
    """The model's own; on the CPU float32, which holds bfloat16 keys exactly and multiplies faster.

    Latent attention (DeepSeek) hands what it reads back to bfloat16 layers, so there it must be the model's.
    """
    own = next(model.parameters()).dtype
    latent = getattr(model.config.get_text_config(), "kv_lora_rank", None) is not None
    return own if device.type != "cpu" or latent else torch.float32
