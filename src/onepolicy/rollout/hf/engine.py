"""`HFEngine`: a RolloutEngine that samples from a transformers model in this process."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
    StaticScales,
    WeightSizes,
)
from onepolicy.invariant.enable import enable_invariant
from onepolicy.invariant.fingerprint import compute_fingerprint
from onepolicy.invariant.numerics_contract import numerics_contract_of
from onepolicy.models import decode_experts, fp32_head, linear, rms_norm
from onepolicy.models.load import DTYPES, cast_model
from onepolicy.replay.routers import Routers, bind_routers
from onepolicy.rollout.copies import load_engine_model, quantise_policy
from onepolicy.rollout.hf.adapter import HeldAdapter
from onepolicy.rollout.hf.continuous_batch import ContinuousBatch
from onepolicy.rollout.hf.forward import CachedForward
from onepolicy.rollout.hf.kv_cache import KVCache
from onepolicy.rollout.hf.plain_layers import use_plain_layers
from onepolicy.rollout.hf.pressure import Pressure
from onepolicy.rollout.hf.sampler import LOGP_METHOD, check_sampling
from onepolicy.rollout.hf.scheduler import BatchRunner, InterruptibleBatch, check_request
from onepolicy.rollout.hf.static_batch import StaticBatch
from onepolicy.rollout.resume import join_partial_completions
from onepolicy.rollout.spec import EngineSpec
from onepolicy.sync.canary import inexact_dtype
from onepolicy.types import Completion, Sampling

if TYPE_CHECKING:
    from onepolicy.config.lora import LoraConfig
    from onepolicy.models.fp32_head import Fp32Head
    from onepolicy.models.quant.quantise import QuantisedModel, QuantisedWeight

KV_CACHE_LAYERS = {"full_attention", "sliding_attention", "attention"}
# rotary frequencies that depend on the longest sequence of the batch
BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
FIRST_PRIORITY = -1  # of a decode step's short kernels over the learner's long ones


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
            self._head = _install_fp32_head(model, dtype)
        self.model: PreTrainedModel = cast_model(model, dtype).eval().requires_grad_(False)
        self._vocab = int(model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
        device = next(model.parameters()).device
        decode_experts.use_decode_experts(model, device)
        linear.use_onednn_linear(model, device)
        if device.type != "cpu":
            rms_norm.use_few_passes(model, fused=True)
        self._held = _install_adapter(model, lora)
        self._pressure = _install_pressure(model, pressure)
        routers: Routers | None = None
        if return_routes:
            routers = bind_routers(model)
        self.batch = _make_batch(model, config, max_len, routers, combine_weights=combine_weights)
        _choose_layers(model, self.batch, numerics, plain=quant is None and lora is None)
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
                completion = join_partial_completions(parts, part.finish, sampling.routes_from)
                return replace(completion, fingerprint=self.fingerprint, adapter=self.adapter)

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
        with torch.no_grad(), self._in_update():
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

    async def load_adapter(self, adapter: AdapterSource, version: int) -> None:
        """Load A and B of every adapted weight (train.lora.sync = native)."""
        assert self._held is not None, "caps.takes_adapter"
        with self._runner.in_stream():
            aborted = self.batch.abort_running(self.version)
        self._runner.abort_requests(aborted)
        self.version = -1
        with self._in_update():
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
    def static_scales(self) -> StaticScales | None:
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


def _install_fp32_head(model: PreTrainedModel, dtype: torch.dtype) -> Fp32Head:
    return fp32_head.install_fp32_head(
        model.eval(), dtype, field="rollout.engine.lm_head", copy=True
    )


def _install_adapter(model: PreTrainedModel, settings: LoraConfig | None) -> HeldAdapter | None:
    if settings is None:
        return None
    return HeldAdapter(model, settings)


def _install_pressure(model: PreTrainedModel, settings: RoutingPressure | None) -> Pressure | None:
    if settings is None:
        return None
    pressure = Pressure(model, settings)
    pressure.refresh(0)
    return pressure


def _check_shape(name: str, given: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(given) != tuple(expected):
        raise UsageError(
            f"load_weights: {name!r} has shape {tuple(given)}, the engine's has {tuple(expected)}"
        )


def _make_batch(
    model: PreTrainedModel,
    config: HFEngineConfig,
    max_len: int,
    routers: Routers | None,
    *,
    combine_weights: bool,
) -> InterruptibleBatch:
    """Return a batch over the KV cache, or over the model's native cache if it holds more."""
    if needs_static_batch(model):
        return StaticBatch(
            model, routers, max_num_seqs=config.max_num_seqs, combine_weights=combine_weights
        )
    device = next(model.parameters()).device
    try:
        cache = KVCache(
            config.max_num_seqs, max_len, device=device, dtype=_kv_cache_dtype(model, device)
        )
        return ContinuousBatch(
            CachedForward(model, cache, routers, combine_weights=combine_weights),
            enable_prefix_caching=config.enable_prefix_caching,
        )
    except RuntimeError as error:  # torch has no class for it on a CPU
        if "allocate memory" not in str(error):
            raise
        raise UsageError(
            f"rollout.engine.max_len: {config.max_num_seqs:,} sequences of {max_len:,} tokens need "
            "more memory than this machine has; set fewer tokens, or fewer sequences "
            "(rollout.engine.max_num_seqs)"
        ) from error


def needs_static_batch(model: PreTrainedModel) -> bool:
    """Return whether the model carries more than attention keys and values between tokens.

    Sliding attention counts as attention. Sparse attention keeps an index beside the keys.
    """
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    rope = getattr(config, "rope_parameters", None) or {}
    has_sparse_attention = getattr(config, "index_topk", None) is not None
    return (
        model._is_stateful
        or not set(kinds) <= KV_CACHE_LAYERS
        or rope.get("rope_type") in BATCH_DEPENDENT_ROPE
        or has_sparse_attention
    )


def _enable_on_policy_numerics(model: PreTrainedModel, batch: InterruptibleBatch) -> None:
    if not isinstance(batch, ContinuousBatch):
        raise UsageError(
            f"numerics: {type(model).__name__} decodes with its native cache, which on-policy "
            "numerics does not support; use numerics = fast"
        )
    enable_invariant(model)


def _choose_layers(
    model: PreTrainedModel, batch: InterruptibleBatch, numerics: Numerics, *, plain: bool
) -> None:
    """Select on-policy numerics, or else functions for layers that may be plain."""
    if numerics == "on-policy":
        _enable_on_policy_numerics(model, batch)
    elif plain:
        _decode_by_functions(model, batch)


def _decode_by_functions(model: PreTrainedModel, batch: InterruptibleBatch) -> None:
    if isinstance(batch, ContinuousBatch) and batch.cache.device.type == "cpu":
        use_plain_layers(model, batch.cache)


def _kv_cache_dtype(model: PreTrainedModel, device: torch.device) -> torch.dtype:
    """Return the model's dtype, or float32 on the CPU.

    float32 holds bfloat16 keys exactly and multiplies faster there. Latent attention (DeepSeek)
    feeds cached values to bfloat16 layers, so it needs the model's dtype.
    """
    is_latent = getattr(model.config.get_text_config(), "kv_lora_rank", None) is not None
    if device.type == "cpu" and not is_latent:
        return torch.float32
    return next(model.parameters()).dtype


class EngineStream:
    """A CUDA stream of its own for an engine that samples while the learner works.

    On the stream that all threads share, the read at the end of a decode step would wait for
    everything that the learner has queued.
    """

    def __init__(self, device: torch.device) -> None:
        """Make the stream. It begins after everything that is queued, as are the weights."""
        self.device = device
        self._stream = torch.cuda.Stream(device, priority=FIRST_PRIORITY)
        self._stream.wait_stream(torch.cuda.current_stream(device))

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Queue the work of this context on the stream. No coroutine may run inside."""
        with torch.cuda.stream(self._stream):
            yield

    @contextmanager
    def update(self) -> Iterator[None]:
        """Let the work of this context, which replaces weights, come between two steps."""
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._stream)
        yield
        self._stream.wait_stream(current)
