"""Memory of a GPU that learner and engine share, divided before any weights are loaded.

A CPU's memory is not divided: its pages are taken when they are written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from onepolicy.config import HFEngineConfig, ModelConfig, RunConfig, UsageError, VLLMEngineConfig
from onepolicy.config.numerics import ON_POLICY
from onepolicy.invariant.mode import use_recurrent_states
from onepolicy.models.cache_size import cached_elements
from onepolicy.models.chunk_size import slots_per_chunk
from onepolicy.models.decode_attention import KEY_BLOCK
from onepolicy.models.empty import empty_model
from onepolicy.models.load import DTYPES, context_length, parse_device, read_config
from onepolicy.rollout.hf.prepare import needs_static_batch
from onepolicy.rollout.spec import EngineSpec
from onepolicy.train.dry_run import DryRunModel, MicroBatchShape, gather_dtype
from onepolicy.train.memory import (
    ModelSizes,
    RankState,
    cache_row_bytes,
    rank_state,
    read_sizes,
    with_adapters,
)

MARGIN = 0.1
"""Share of a GPU that is left to the CUDA context, kernels' workspaces and the allocator's gaps. A
length that is set may take half of it: a resumed run finds some megabytes less than it was fitted
to."""
LOGITS_BYTES = 12
"""Bytes that logits which exist at once, their softmax and gradient take, per slot and token id."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a GPU."""

    free: int
    total: int


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Return the memory of a GPU as it is now, None for a CPU."""
    if device.type != "cuda":
        return None
    return DeviceMemory(*torch.cuda.mem_get_info(device))


def micro_batch_bytes(
    config: RunConfig, model: ModelConfig, vocab: int, *, longest: int, trains: bool
) -> int:
    """Return the bytes of a full micro-batch's activations and logits.

    Those of forward and backward are found by a dry run, as `onepolicy plan` makes it, which takes
    seconds. A scorer (trains: False), and a model that fake tensors cannot run, count the logits
    alone: all of them or those of a chunk. longest: slots of the longest sample; its bytes count if
    it is longer than a micro-batch, because a sample is never split.
    """
    wanted = config.train.logits_chunk
    if config.numerics == ON_POLICY:  # which has no chunks
        wanted = 0
    slots = config.train.tokens_per_micro_batch
    if trains:
        slots = max(slots, longest)
    chunk = slots_per_chunk(wanted, vocab) or slots
    logits = LOGITS_BYTES * min(slots, chunk) * vocab
    if not trains:
        return logits
    lengths = (min(slots, longest),) * max(1, slots // longest)
    try:
        dry = DryRunModel.of(
            config,
            read_config(model),
            cpu=False,
            dtype=DTYPES[gather_dtype(config)],
            autocast=DTYPES.get(config.train.autocast),
            logits_chunk=wanted,
            invariant=False,
        )
        if config.train.lora is not None:
            dry.add_adapters(config.train.lora)
        found = dry.micro_batch_memory(
            MicroBatchShape(lengths, lengths),
            checkpointing=config.train.activation_checkpointing,
            entropy_graph=config.objective.entropy_coef > 0,
        )
    except Exception:  # whatever a family does to fake tensors must not end a run on real ones
        return logits
    return max(logits, int(found.peak))


def score_bytes(empty: PreTrainedModel, config: RunConfig, *, trains: bool) -> int:
    """Return the bytes of attention weights, per query and key, that on-policy numerics keep.

    They are float32, of every layer that attends until the backward (invariant/attention.py), and
    two more of the layer that computes. 0 with fast numerics, whose kernels keep none.
    """
    if config.numerics != ON_POLICY:
        return 0
    text = empty.config.get_text_config()
    layers = sum(cached_elements(text, layer) > 0 for layer in range(text.num_hidden_layers))
    if not trains or config.train.activation_checkpointing:
        layers = min(layers, 1)
    return 4 * (layers + 2) * int(text.num_attention_heads)


def evaluator_bytes(sizes: ModelSizes, config: RunConfig, length: int) -> int:
    """Return the bytes of an engine that evaluates alone, with rows of `length`."""
    engine = config.rollout.engine
    itemsize = DTYPES[engine.dtype].itemsize
    row = cache_row_bytes(sizes, config, length, itemsize)
    return sizes.total * itemsize + engine.max_num_seqs * row


def sizes_of(empty: PreTrainedModel, config: RunConfig) -> ModelSizes:
    """Count a model on the meta device, with the adapters and the numerics of the run."""
    if config.numerics == ON_POLICY:
        use_recurrent_states(empty)
    sizes = read_sizes(empty)
    if config.train.lora is None:
        return sizes
    return with_adapters(sizes, empty, config.train.lora)


def learner_growth(
    config: RunConfig,
    held: RankState,
    micro_batch: int,
    *,
    trains: bool = True,
    while_sampling: bool = False,
) -> int:
    """Return the bytes that a learner takes beside its loaded parameters, on one device.

    These are gradients, what optim.state leaves of AdamW's state and needs in an update, the other
    models, and a micro-batch (`micro_batch_bytes`). trains: False for a scorer, which takes the
    micro-batch only. while_sampling: what it keeps between updates.
    """
    if not trains:
        return micro_batch
    kept = held.optimiser.moments + held.optimiser.masters + held.others
    if while_sampling:
        return int(kept)
    return int(kept + held.gradients + held.critic_gradients + held.optimiser.working) + micro_batch


def fit_max_len(config: RunConfig, model: ModelConfig, context: int, *, trains: bool) -> int:
    """Return the longest sequence that the embedded engine's cache has room for, up to `context`.

    Only where the engine is on the learner's GPU: elsewhere it is rollout.engine.max_len, or the
    context. Raises UsageError with the arithmetic if max_len is set and does not fit, or nothing
    does.
    """
    engine = config.rollout.engine
    asked = engine.max_len or context
    if not isinstance(engine, HFEngineConfig) or config.cluster.kind == "ray":
        return asked
    memory = device_memory(parse_device(config.train.device))
    if memory is None:
        return asked
    empty = empty_model(model)
    sizes = sizes_of(empty, config)
    if needs_static_batch(empty):  # which allocates no rows
        return asked
    itemsize = DTYPES[engine.dtype].itemsize
    engines = 1
    if trains and config.has_evaluator:  # with weights and a cache of its own
        engines = 2
    sequences = engines * engine.max_num_seqs
    states = sequences * sizes.states  # of a sequence, whatever its length
    block = cache_row_bytes(sizes, config, KEY_BLOCK, itemsize) - sizes.states
    per_token = block // KEY_BLOCK
    per_position = sequences * per_token
    slots = config.train.tokens_per_micro_batch
    activations = micro_batch_bytes(
        config, model, sizes.vocab, longest=min(slots, asked), trains=trains
    )
    held = rank_state(sizes, config, max(1, config.train.ranks), cpu=False)
    learner = int(held.parameters) + learner_growth(config, held, activations, trains=trains)
    weights = engines * sizes.total * itemsize
    scores = 0  # how long samples are is known to whoever sets max_len; a resume has set it
    if engine.max_len is None:
        scores = score_bytes(empty, config, trains=trains)
    margin = MARGIN
    if engine.max_len is not None:
        margin /= 2
    room = memory.free - int(margin * memory.total) - learner - weights - states
    per_length = per_position + slots * scores  # a micro-batch is full, of samples of that length
    fits = max(0, room) // max(1, per_length)  # layers of states alone cache nothing of a token
    if trains and fits > slots:  # a sample is never split, so it may be more than a micro-batch
        per_slot = activations // slots + scores * asked
        fits = slots + (room - slots * per_length) // (per_length + per_slot)
    fits = fits // KEY_BLOCK * KEY_BLOCK
    if (engine.max_len is None and fits) or fits >= asked:
        return min(asked, fits)
    attention = ""
    if scores:
        kept = scores * asked * max(asked, slots) / 1e9
        attention = f" and {kept:.1f} GB of attention weights, which numerics = on-policy keeps"
    raise UsageError(
        f"rollout.engine.max_len: {asked} tokens of {_sequences(engines)} = "
        f"{engine.max_num_seqs} sequences take {asked * per_position / 1e9:.1f} GB of cache "
        f"({per_token:,} bytes a token){attention}, but the GPU has {max(0, room) / 1e9:.1f} GB "
        f"for it: {memory.free / 1e9:.1f} GB free, less {margin * memory.total / 1e9:.1f} kept "
        f"back, {learner / 1e9:.1f} for the learner and {weights / 1e9:.1f} for the engine's "
        f"weights; lower max_len or max_num_seqs{_hint(fits)}, or train.tokens_per_micro_batch, or "
        "set train.activation_checkpointing"
    )


def settle_max_len(
    config: RunConfig, model: ModelConfig, note: Callable[[str], None], *, resumes: bool = False
) -> RunConfig:
    """Return the settings of a training run on a GPU with the longest sequence of its engine.

    It is stored with the run, so that a resume samples sequences of the same length. note: gets a
    line if it is not the model's context. resumes: the settings are those of an earlier process. A
    length that they name is kept; raises UsageError if it does not fit any more.
    """
    engine = config.rollout.engine
    if not isinstance(engine, HFEngineConfig) or config.cluster.kind == "ray":
        return config
    context = context_length(read_config(model))
    try:
        max_len = fit_max_len(config, model, context, trains=True)
    except UsageError as error:
        if not resumes or engine.max_len is None:
            raise
        raise UsageError(
            f"{error}. A resumed run keeps the length that it began with: free the GPU's memory, "
            "or fork the run with a smaller rollout.engine.max_len"
        ) from None
    if engine.max_len is not None:
        return config
    if max_len < context:
        note(
            f"on a GPU: rollout.engine.max_len = {max_len}, the longest that fits beside the "
            f"learner (the model's context is {context}); train.activation_checkpointing or fewer "
            "train.tokens_per_micro_batch leave it more"
        )
    engine = engine.model_copy(update={"max_len": max_len})
    rollout = config.rollout.model_copy(update={"engine": engine})
    return config.model_copy(update={"rollout": rollout})


def _sequences(engines: int) -> str:
    if engines == 1:
        return "rollout.engine.max_num_seqs"
    return "two engines (one evaluates without rollout.quant and pressure) of max_num_seqs"


def _hint(fits: int) -> str:
    if not fits:
        return ""
    return f" (max_len = {fits} fits)"


def divide_gpu(spec: EngineSpec, config: RunConfig, *, trains: bool) -> EngineSpec:
    """Return the engine's spec with its share of the learner's GPU. The learner is loaded."""
    return dataclasses.replace(
        spec,
        gpu_share=share_beside_learner(config, spec.model, spec.device, trains=trains),
        sleeps=trains and engine_sleeps(config, spec.device),
    )


def engine_sleeps(config: RunConfig, device: torch.device) -> bool:
    """Return whether the engine frees its memory on the learner's GPU while the learner works."""
    engine = config.rollout.engine
    return (
        isinstance(engine, VLLMEngineConfig)
        and engine.enable_sleep_mode
        and device.type == "cuda"
        and config.cluster.kind == "local"
        and config.rollout.max_staleness is None
    )


def share_beside_learner(
    config: RunConfig, model: ModelConfig, device: torch.device, *, trains: bool
) -> float:
    """Return the share of a GPU that the learner leaves to a vLLM engine in its process.

    The learner's parameters are loaded. trains: False beside a scorer. Returns 1 on a CPU, and for
    an engine that is elsewhere. Raises UsageError if nothing is left.
    """
    beside = config.rollout.engine.kind == "vllm" and config.cluster.kind == "local"
    memory = device_memory(device)
    if not beside or memory is None:
        return 1.0
    asleep = trains and engine_sleeps(config, device)
    sizes, activations = sizes_of(empty_model(model), config), 0
    if not asleep:
        longest = config.rollout.engine.max_len or config.train.tokens_per_micro_batch
        activations = micro_batch_bytes(config, model, sizes.vocab, longest=longest, trains=trains)
    held = rank_state(sizes, config, max(1, config.train.ranks), cpu=False)
    grows = learner_growth(config, held, activations, trains=trains, while_sampling=asleep)
    others = "the learner"
    if trains and config.has_evaluator:
        length = config.rollout.engine.max_len or context_length(read_config(model))
        grows += evaluator_bytes(sizes, config, length)
        others = "the learner and the engine that evaluates"
    share = (memory.free - grows) / memory.total
    if share <= 0:
        raise UsageError(
            f"rollout.engine.kind: vllm beside the learner: {memory.free / 1e9:.1f} of "
            f"{memory.total / 1e9:.1f} GB are free, and {others} will take {grows / 1e9:.1f} GB "
            "more; lower train.tokens_per_micro_batch or rollout.engine.max_len, or use a server "
            "on another GPU (rollout.engine.kind = vllm-server)"
        )
    return share
