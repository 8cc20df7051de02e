"""`HFEngine`: a RolloutEngine that samples from a transformers model in this process."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.config import HFEngineConfig, QuantFormat, RoutingPressure, UsageError
from onepolicy.config.numerics import Numerics
from onepolicy.interfaces import (
    AdapterSource,
    EngineCaps,
    NamedWeights,
    WeightSizes,
)
from onepolicy.invariant.fingerprint import compute_fingerprint
from onepolicy.invariant.numerics_contract import numerics_contract_of
from onepolicy.models import decode_experts, linear, rms_norm
from onepolicy.models.load import DTYPES, cast_model
from onepolicy.replay.routers import Routers, bind_routers
from onepolicy.rollout.copies import load_engine_model, quantise_policy
from onepolicy.rollout.hf.prepare import (
    EngineStream,
    choose_layers,
    install_adapter,
    install_head,
    install_pressure,
    make_batch,
)
from onepolicy.rollout.hf.sampler import LOGP_METHOD, check_sampling
from onepolicy.rollout.hf.scheduler import BatchRunner, check_request
from onepolicy.rollout.resume import join_partial_completions
from onepolicy.rollout.spec import EngineSpec
from onepolicy.sync.canary import inexact_dtype
from onepolicy.types import Completion, Sampling

if TYPE_CHECKING:
    from onepolicy.config.lora import LoraConfig
    from onepolicy.models.fp32_head import Fp32Head
    from onepolicy.models.quant.quantise import QuantisedModel, QuantisedWeight


def build(spec: EngineSpec) -> HFEngine:
    """Build the engine with a separate copy of the model."""
    assert isinstance(spec.config, HFEngineConfig)
    model = load_engine_model(
        spec.model, spec.config.dtype, spec.config.lm_head, spec.device, quant=spec.quant
    )
    engine = HFEngine(
        model,
        spec.config,
        return_routes=spec.route_spec is not None,
        max_len=spec.max_len,
        combine_weights=spec.combine_weights,
        numerics=spec.numerics,
        quant=spec.quant,
        pressure=spec.pressure,
        lora=spec.lora,
    )
    if spec.beside_learner and spec.device.type == "cuda":
        engine.use_stream(EngineStream(spec.device))
    return engine


class HFEngine:
    """An engine that samples from a transformers model in this process.

    It changes the model's dtype, attention, experts and linear layers, so give it a copy.
    """

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
        pressure: RoutingPressure | None = None,
        lora: LoraConfig | None = None,
    ) -> None:
        """Take over the model.

        return_routes: return the experts of every token (MoE models only). combine_weights: return
        their combine weights as well. max_len: prompt + completion tokens. numerics: "on-policy"
        computes the same bits as a learner with the same weights, dtype and numerics. quant:
        format of the engine's weights, now and after every sync. pressure: noise on its routers.
        lora: adapters that it computes with; it then takes no other weights.
        """
        context = int(model.config.get_text_config().max_position_embeddings)
        if not 2 <= max_len <= context:
            raise UsageError(
                f"max_len: {max_len} is not in 2..{context}, the context length of "
                f"{type(model).__name__}"
            )
        self.version = 0
        self.adapter: str | None = None  # name of the LoRA adapter in its weights
        dtype = DTYPES[config.dtype]
        self.quantised: QuantisedModel | None = None
        if quant is not None:
            self.quantised = quantise_policy(model.eval(), quant)
        self._head: Fp32Head | None = None
        if config.lm_head == "float32":
            self._head = install_head(model, dtype)
        self.model: PreTrainedModel = cast_model(model, dtype).eval().requires_grad_(False)
        self._vocab = int(model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
        device = next(model.parameters()).device
        decode_experts.use_decode_experts(model, device)
        linear.use_onednn_linear(model, device)
        rms_norm.use_few_passes(model, fused=device.type != "cpu")
        self._held = install_adapter(model, lora)
        self._pressure = install_pressure(model, pressure)
        routers: Routers | None = None
        if return_routes:
            routers = bind_routers(model)
        self.batch = make_batch(model, config, max_len, routers, combine_weights=combine_weights)
        plain = quant is None and lora is None
        self._rewriting = choose_layers(model, self.batch, numerics, plain=plain)
        self.fingerprint = compute_fingerprint(device, numerics)
        sizes: WeightSizes | None = None
        if self.quantised is not None:
            sizes = self.quantised.sizes()
        weights_dtype: str | None = None  # quantised and float32 copies are made of unrounded ones
        if quant is None and self._head is None:
            weights_dtype = config.dtype
        self.caps = EngineCaps(
            return_routes,
            max_len,
            returns_combine_weights=return_routes and combine_weights,
            top_logprobs=self._vocab,
            contract=numerics_contract_of(model, logp=LOGP_METHOD),
            sizes=sizes,
            weights_dtype=weights_dtype,
            takes_adapter=lora is not None,
            inexact_dtype=inexact_dtype(config.dtype, cpu=device.type == "cpu"),
        )
        self._runner = BatchRunner(self.batch)
        self._in_update: Callable[[], AbstractContextManager[None]] = nullcontext

    def use_stream(self, stream: EngineStream) -> None:
        """Make all steps on this stream."""
        self._runner.in_stream, self._in_update = stream.steps, stream.update

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Completion:
        """Sample until a stop token or max_tokens.

        The result depends on the seed and the logits, not on the batch. If load_weights interrupts
        the completion, it is resumed from its tokens with the seed's next random numbers.
        """
        check_sampling(sampling)
        if seed < 0:
            raise UsageError(f"seed: {seed} is negative; random numbers are drawn from 0 or more")
        path, parts = list(prompt_ids), list[Completion]()
        while True:
            done = len(path) - len(prompt_ids)
            first = sampling.routes_from
            if done:  # the last token of a part was never fed: its row comes with the next part
                first = len(path) - 1
            rest = replace(sampling, max_tokens=sampling.max_tokens - done, routes_from=first)
            prompt = check_request(path, rest, self.caps, version=self.version, vocab=self._vocab)
            part = await self._runner.run_request(prompt, rest, seed, self.version, num_drawn=done)
            if len(part.token_ids):
                parts.append(part)
                path += part.token_ids.tolist()
            if part.finish != "aborted":
                if len(parts) > 1:  # a weight update interrupted it
                    part = join_partial_completions(parts, part.finish, sampling.routes_from)
                return replace(part, fingerprint=self.fingerprint, adapter=self.adapter)

    async def load_weights(self, weights: NamedWeights, version: int) -> None:
        """Load these tensors, cast to the engine's dtype.

        Raises UsageError unless they are all of the model's tensors, in its shapes.
        """
        if self._held is not None:
            raise UsageError("load_weights: this engine takes A and B of its adapter alone")
        with self._runner.in_stream():
            aborted = self.batch.abort_running(self.version)
        self._runner.abort_requests(aborted)
        self.version = -1  # until the last tensor is loaded
        with torch.no_grad(), self._in_update(), self._rewriting():
            missing = self._copy_weights(weights)
            if self._pressure is not None:
                self._pressure.refresh(version)
        if missing:
            raise UsageError(
                f"load_weights: {len(missing)} tensors are missing, first {missing[0]!r}"
            )
        self.version = version

    def _copy_weights(self, weights: NamedWeights) -> list[str]:
        """Copy the tensors into the model. Return the names of the model's other tensors."""
        quantised: dict[str, QuantisedWeight] = {}
        if self.quantised is not None:
            quantised = self.quantised.quantised_weights
        state = self.model.state_dict()
        plain = {name: tensor for name, tensor in state.items() if name not in quantised}
        loaded: set[int] = set()  # addresses: tied names share memory
        unset = set(quantised)
        for name, tensor in weights:
            if name in quantised:
                _check_shape(name, tensor.shape, quantised[name].shape)
                quantised[name].set_weight(tensor.to(self.model.device))
                unset.discard(name)
            elif name in plain:
                _check_shape(name, tensor.shape, plain[name].shape)
                plain[name].copy_(tensor)
                if self._head is not None:
                    self._head.update_copy(plain[name], tensor)
                loaded.add(plain[name].data_ptr())
            else:
                raise UsageError(
                    f"load_weights: {name!r} is not a tensor of {type(self.model).__name__}"
                )
        missing = [name for name, tensor in plain.items() if tensor.data_ptr() not in loaded]
        return missing + sorted(unset)

    async def lacks_base(self) -> bool:
        """Return False: it is built with the frozen weights."""
        return False

    async def load_adapter(self, adapter: AdapterSource, version: int) -> None:
        """Load A and B of every adapted weight (train.lora.sync = native)."""
        assert self._held is not None, "caps.takes_adapter"
        with self._runner.in_stream():
            aborted = self.batch.abort_running(self.version)
        self._runner.abort_requests(aborted)
        self.version = -1
        with self._in_update(), self._rewriting():
            self._held.load(adapter.factors())
            if self._pressure is not None:
                self._pressure.refresh(version)
        self.version = version

    def held_factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return A and B as the engine computes with them."""
        assert self._held is not None, "caps.takes_adapter"
        return self._held.held_factors()

    def held_weights(self) -> dict[str, Tensor]:
        """Return the weights it computes with, or the frozen ones beside an adapter of its own.

        Quantised ones are left out.
        """
        if self._held is not None:
            return self._held.frozen_weights()
        quantised: Container[str] = ()
        if self.quantised is not None:
            quantised = self.quantised.quantised_weights
        state = self.model.state_dict()
        return {name: tensor for name, tensor in state.items() if name not in quantised}

    async def reset_cache(self) -> None:
        """Drop every cached prefix, so that later samples do not depend on earlier ones."""
        self._runner.clear_cache("reset_cache")
        if self.quantised is not None:
            with self._in_update():
                self.quantised.reset_statistics()

    def without_pressure(self) -> AbstractContextManager[None]:
        """Return a context without the noise of rollout.pressure. Reset the cache in it."""
        if self._pressure is None:
            return nullcontext()
        return self._pressure.lifted()

    @property
    def static_scales(self) -> QuantisedModel | None:
        """Activation scales to calibrate, if rollout.quant asks for static ones."""
        if self.quantised is None or not self.quantised.static:
            return None
        return self.quantised

    def take_metrics(self) -> dict[str, float]:
        """Return how well calibrated activation scales fit the samples since the last call."""
        if self.quantised is None:
            return {}
        with self._in_update():
            return self.quantised.metrics()


def _check_shape(name: str, given: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(given) != tuple(expected):
        raise UsageError(
            f"load_weights: {name!r} has shape {tuple(given)}, the engine's has {tuple(expected)}"
        )
