"""The parts of an embedded engine: head, adapter and noise of its model, batch, layers, stream."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.config import HFEngineConfig, RoutingPressure, UsageError
from onepolicy.config.lora import LoraConfig
from onepolicy.config.numerics import Numerics
from onepolicy.invariant import ops
from onepolicy.invariant.enable import enable_invariant
from onepolicy.invariant.switch import TILE
from onepolicy.models import fp32_head
from onepolicy.models.decode_attention import KVCacheStep
from onepolicy.models.fp32_head import Fp32Head
from onepolicy.models.long_samples import constant_rope_length
from onepolicy.models.prepare import TOLERANCE, recurrent_layers, unknown_layers
from onepolicy.replay.routers import Routers
from onepolicy.rollout.hf.adapter import HeldAdapter
from onepolicy.rollout.hf.continuous_batch import ContinuousBatch
from onepolicy.rollout.hf.forward import CachedForward, RowSpan
from onepolicy.rollout.hf.kv_cache import KVCache
from onepolicy.rollout.hf.plain_layers import use_plain_layers
from onepolicy.rollout.hf.pressure import Pressure
from onepolicy.rollout.hf.scheduler import InterruptibleBatch
from onepolicy.rollout.hf.static_batch import StaticBatch

LOG = logging.getLogger(__name__)
TRIAL = 7  # tokens with which states of recurrent layers are tried
FIRST_PRIORITY = -1  # of a decode step's short kernels over the learner's long ones


def install_head(model: PreTrainedModel, dtype: torch.dtype) -> Fp32Head:
    """Give the model a float32 copy of its head (rollout.engine.lm_head)."""
    return fp32_head.install_fp32_head(
        model.eval(), dtype, field="rollout.engine.lm_head", copy=True
    )


def install_adapter(model: PreTrainedModel, settings: LoraConfig | None) -> HeldAdapter | None:
    """Let the model compute with an adapter of its own (train.lora.sync = native)."""
    if settings is None:
        return None
    return HeldAdapter(model, settings)


def install_pressure(model: PreTrainedModel, settings: RoutingPressure | None) -> Pressure | None:
    """Put noise on the model's routers (rollout.pressure)."""
    if settings is None:
        return None
    pressure = Pressure(model, settings)
    pressure.refresh(0)
    return pressure


def make_batch(
    model: PreTrainedModel,
    config: HFEngineConfig,
    max_len: int,
    routers: Routers | None,
    *,
    combine_weights: bool,
) -> InterruptibleBatch:
    """Return a batch over the KV cache, or over the model's native cache if it holds more."""
    static = partial(
        StaticBatch,
        model,
        routers,
        max_num_seqs=config.max_num_seqs,
        combine_weights=combine_weights,
    )
    if needs_static_batch(model):
        unknown = unknown_layers(model)
        if unknown:
            _warn_of_static_batch(model, f"onepolicy does not know the operators of its {unknown}")
        return static()
    if not recurrent_layers(model):
        return _continuous_batch(model, config, max_len, routers, combine_weights)
    own, attention = _logits_of_trial(model), model.config.get_text_config()._attn_implementation
    batch = _continuous_batch(model, config, max_len, routers, combine_weights)
    if _goes_on_from_states(batch, own):
        return batch
    _warn_of_static_batch(model, "going on from its states gives other logits than its own, in its")
    model.set_attn_implementation(attention)
    return static()


def _warn_of_static_batch(model: PreTrainedModel, why: str) -> None:
    LOG.warning(
        "%s: %s layers; requests run in static batches over transformers' cache, which is slower",
        type(model).__name__,
        why,
    )


@torch.inference_mode()
def _logits_of_trial(model: PreTrainedModel) -> Tensor:
    """Return the model's own logits [3, V] after each piece of a trial (`_goes_on_from_states`)."""
    ids = _trial(model)[None]
    ends = [TRIAL - 4, TRIAL - 2, TRIAL - 1]
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, ends]
    return logits.float()


@torch.inference_mode()
def _goes_on_from_states(batch: ContinuousBatch, own: Tensor) -> bool:
    """Return whether a trial that is fed in three pieces gives the model's own logits.

    The second piece and the last token, which is decoded, go on from the cached states. A layer may
    keep a state that none of the known operators computes, or decode a token by another one.
    """
    model, row = batch.forward.model, torch.zeros(1, dtype=torch.int64, device=own.device)
    tokens = _trial(model).expand(batch.cache.num_rows, TRIAL)
    pieces = RowSpan(0, 0, TRIAL - 3), RowSpan(0, TRIAL - 3, TRIAL - 1)
    found = [batch.forward.prefill(tokens, [piece]) for piece in pieces]
    last = KVCacheStep(row, row + TRIAL - 1, TRIAL, slice(0, 1), equal_lengths=True)
    found.append(batch.forward(tokens[0, TRIAL - 1 :], last))
    off = (torch.cat(found) - own).abs().mean(1).max() / own.std()
    return bool(off < TOLERANCE.get(model.dtype, TOLERANCE[torch.float32]))


def _trial(model: PreTrainedModel) -> Tensor:
    vocabulary = model.config.get_text_config().vocab_size
    return torch.arange(3, 3 + TRIAL, device=model.device) % vocabulary


def _continuous_batch(
    model: PreTrainedModel,
    config: HFEngineConfig,
    max_len: int,
    routers: Routers | None,
    combine_weights: bool,
) -> ContinuousBatch:
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
    """Return whether the model carries more between tokens than the KV cache holds.

    It holds keys and values, and states of recurrent layers whose operators are known. Sliding
    attention counts as attention. Sparse attention keeps an index beside the keys.
    """
    config = model.config.get_text_config()
    has_sparse_attention = getattr(config, "index_topk", None) is not None
    return (
        bool(unknown_layers(model))
        or constant_rope_length(config) is not None
        or has_sparse_attention
    )


def _enable_on_policy_numerics(model: PreTrainedModel, batch: InterruptibleBatch) -> None:
    if not isinstance(batch, ContinuousBatch):
        raise UsageError(
            f"numerics: {type(model).__name__} decodes with its native cache, which on-policy "
            "numerics does not support; use numerics = fast"
        )
    enable_invariant(model)
    batch.forward.key_multiple = TILE


def choose_layers(
    model: PreTrainedModel, batch: InterruptibleBatch, numerics: Numerics, *, plain: bool
) -> Callable[[], AbstractContextManager[None]]:
    """Select on-policy numerics, and functions for layers that may be plain.

    Return a function that gives a context in which the model's weights may be written.
    """
    rewriting: Callable[[], AbstractContextManager[None]] = nullcontext
    if numerics == "on-policy":
        _enable_on_policy_numerics(model, batch)
        ops.keep_in_float32(model)
        rewriting = partial(ops.rewriting, model)
    if plain:
        _decode_by_functions(model, batch)
    return rewriting


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
