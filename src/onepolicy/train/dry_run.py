"""The memory of a micro-batch, found by running the trainer's forward and backward on fake tensors.

The model has its real widths, experts and number of tokens. Its tensors are fake: they have shapes,
and storages whose bytes can be counted, but nothing is computed. So the dry run executes the code
that trains, for any model of transformers: it counts the tensors that autograd saves, those of the
vocabulary projection, and the effect of activation checkpointing. It does not count the scratch
memory of kernels. On a GPU, attention is taken to be a flash kernel.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import astuple, dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from onepolicy.config import RunConfig, UsageError
from onepolicy.config.lora import LoraConfig
from onepolicy.config.numerics import ON_POLICY
from onepolicy.invariant import mode
from onepolicy.invariant.switch import TILE
from onepolicy.models import (
    chunk_size,
    experts,
    fp32_head,
    linear,
    logits_chunks,
    packed_attention,
    rms_norm,
    rotary,
)
from onepolicy.models.buckets import BucketedPacking
from onepolicy.models.load import DTYPES
from onepolicy.models.recurrent.layers import install_recurrent
from onepolicy.sync.adapters import add_adapter
from onepolicy.train.activation_checkpointing import checkpoint_activations
from onepolicy.train.fake_kernels import kernel_stand_ins, patched
from onepolicy.train.forward import SlotLayout, forward
from onepolicy.train.optimizers import widen_gradients
from onepolicy.types import TokenBatch

ALL_LAYERS = 16  # of a deeper model only the first layers are run


class PeakMemory(TorchDispatchMode):
    """The most bytes of tensor storage, made inside the block, that are alive at once."""

    def __init__(self, existing: Iterable[torch.Tensor]) -> None:
        """Count no storage of the tensors in `existing`."""
        super().__init__()
        self.existing = {tensor.untyped_storage()._cdata for tensor in existing}
        self.alive: dict[int, int] = {}  # storage -> bytes
        self.now = self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, arguments: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*arguments, **(kwargs or {}))
        tensors = result if isinstance(result, tuple | list) else (result,)
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                tensor = tensor._local_tensor
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.alive and key not in self.existing:
            self.alive[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, key)

    def count_resized(self, storage: torch.UntypedStorage) -> None:
        """Count the new size of a storage that has been resized."""
        key = storage._cdata
        if key in self.alive:
            self.now += storage.nbytes() - self.alive[key]
            self.alive[key] = storage.nbytes()
            self.peak = max(self.peak, self.now)
        else:
            self._add(storage)

    def _drop(self, key: int) -> None:
        self.now -= self.alive.pop(key, 0)


@dataclass(frozen=True, slots=True)
class MicroBatchShape:
    """The slots of each sample of a micro-batch, and how many of its last slots are trainable."""

    slots: tuple[int, ...]
    trainable: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MicroBatchMemory:
    """Bytes of a micro-batch's tensors, without parameters and gradients that existed before."""

    saved: float  # after the forward: the graph
    peak: float  # the most at once, in forward or backward
    logits: float  # of the peak: the part that projecting one slot per sample would save
    layer: float  # of saved: the part of one layer
    end: float  # the most at once in the backward of layer 0, the last layer that it visits
    tail: float  # the most at once after the backward has left the layers

    def for_samples(
        self, samples: float, of_next: MicroBatchMemory, *, first: int = 1
    ) -> MicroBatchMemory:
        """Extrapolate from `first` samples (self) and one more (of_next), all of one length."""
        fields = zip(astuple(self), astuple(of_next), strict=True)
        return MicroBatchMemory(*(own + (samples - first) * (more - own) for own, more in fields))


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes of one dry run."""

    saved: float  # after the forward
    early: float  # the most until the backward of the last layer, with all layers' activations
    late: float  # the most after that


def gather_dtype(config: RunConfig) -> str:
    """Return the dtype of the parameters that ranks gather to compute a layer."""
    if "bfloat16" in (config.model.dtype, config.train.fsdp_param_dtype):
        return "bfloat16"
    return "float32"


def compute_dtype(config: RunConfig) -> str:
    """Return the dtype of the layers in forward and backward."""
    if config.train.autocast == "bfloat16":
        return "bfloat16"
    return gather_dtype(config)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list that holds the decoder's layers. Raises UsageError if there is none."""
    depth = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    raise UsageError(
        f"model.path: {type(model).__name__} keeps no list of {depth} decoder layers; "
        "it cannot be run dry"
    )


class DryRunModel:
    """A model of fake tensors that runs the trainer's forward and backward.

    dtype: of the layers' computation. autocast: dtype of train.autocast, above parameters of
    `dtype`; it is a CPU's, which casts more, so it is an upper bound. cpu: run our CPU functions,
    else the kernels of a GPU. logits_chunk: the setting train.logits_chunk. invariant: on-policy
    mode.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        dtype: torch.dtype,
        cpu: bool,
        autocast: torch.dtype | None = None,
        fp32_lm_head: bool = False,
        logits_chunk: int | None = 0,
        invariant: bool = False,
    ) -> None:
        self.cpu, self.autocast = cpu, autocast
        self._multiple = TILE if invariant else 1
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        with self.fake:
            self.model = _causal_lm(config, dtype)
            if not invariant and logits_chunks.base_of(self.model) is not None:
                vocabulary = config.get_text_config().vocab_size
                slots = chunk_size.slots_per_chunk(logits_chunk, vocabulary)
                setattr(self.model, chunk_size.MARK, slots)
            if fp32_lm_head:
                fp32_head.Fp32Head(self.model, field="model.lm_head")
            self.model.set_attn_implementation(packed_attention.NAME)
            install_recurrent(self.model)
            if cpu and getattr(self.model, "set_experts_implementation", None) is not None:
                self.model.set_experts_implementation(experts.NAME)
            if cpu:
                linear.use_onednn_linear(self.model, torch.device("cpu"))
        if cpu or not invariant:  # on-policy numerics take a kernel's norms back
            rms_norm.use_few_passes(self.model, fused=not cpu)  # not fake: it compares bits
        rotary.use_few_passes(self.model)
        if invariant:
            with self.fake, kernel_stand_ins(cpu=cpu):
                mode.install_invariant(self.model)
        self._layer_list = decoder_layers(self.model)
        self._layers = list(self._layer_list)
        self._kinds = _layer_kinds(self.model, self._layers)
        self._run = cache(self._run_uncached)

    @classmethod
    def of(
        cls, config: RunConfig, hf_config: PreTrainedConfig, *, cpu: bool, **changes: Any
    ) -> DryRunModel:
        """Build the model that a run trains, without adapters. changes: other arguments."""
        own: dict[str, Any] = {
            "dtype": DTYPES[compute_dtype(config)],
            "fp32_lm_head": config.model.lm_head == "float32",
            "logits_chunk": config.train.logits_chunk,
            "invariant": config.numerics == ON_POLICY,
        }
        made = cls(hf_config, cpu=cpu, **own | changes)
        if config.model.dtype != "float32":  # else its gradients are of the gathered dtype
            widen_gradients(made.model)
        return made

    def add_adapters(self, config: LoraConfig) -> None:
        """Put adapters on the model and freeze its own weights, before the first dry run."""
        # A module of fake tensors cannot be moved, and is where it should be.
        with self.fake, patched(nn.Module, "to", lambda module, *_, **__: module):
            plain = config.model_copy(update={"base": "same"})  # nf4 has no fake tensors
            add_adapter(self.model, plain, "unused", seed=0)

    def micro_batch_memory(
        self,
        micro: MicroBatchShape,
        *,
        checkpointing: bool,
        entropy_graph: bool = False,
        first: bool = False,
    ) -> MicroBatchMemory:
        """Compute the memory of a micro-batch.

        first: the first micro-batch of an optimiser step. Its backward makes the gradients, so they
        count.
        """
        settings = {"checkpointing": checkpointing, "entropy_graph": entropy_graph}
        depth, layer_bytes = len(self._layers), dict[Any, float]()
        if depth > ALL_LAYERS:
            depth, layer_bytes = self._layer_bytes(micro, settings)
        run = self._run(micro, depth, **settings, first=first)
        not_run = sum(layer_bytes[kind] for kind in self._kinds[depth:])
        late = run.late
        if first:  # at the end of the backward nearly all gradients exist
            late += sum(_gradient_bytes(layer) for layer in self._layers[depth:])
        one_layer = self._run(micro, 1, **settings, first=False)
        end = one_layer.early
        if len(self._layers) > 1:
            end = self._run(micro, 2, **settings, first=False).late
        layer = layer_bytes.get(self._kinds[-1], 0.0)
        if not layer_bytes and depth > 1:
            layer = self._saved(micro, 2, settings) - one_layer.saved
        one_slot = replace(micro, trainable=(1,) * len(micro.slots))
        without_logits = self._run(one_slot, 1, **settings, first=False)
        return MicroBatchMemory(
            saved=run.saved + not_run,
            peak=max(run.early + not_run, late),
            logits=max(0.0, one_layer.early - without_logits.early),
            layer=layer,
            end=end,
            tail=one_layer.late,
        )

    def _layer_bytes(
        self, micro: MicroBatchShape, settings: dict[str, bool]
    ) -> tuple[int, dict[Any, float]]:
        """Return the layers to run, and the bytes that a layer of each kind adds to the graph.

        Enough layers are run for every kind to occur twice, if the model has it twice.
        """
        added: dict[Any, float] = {}
        count: Counter[Any] = Counter()
        for depth, kind in enumerate(self._kinds, 1):
            count[kind] += 1
            if count[kind] == 2:
                before = self._saved(micro, depth - 1, settings)
                added[kind] = self._saved(micro, depth, settings) - before
            if all(count[kind] >= min(2, self._kinds.count(kind)) for kind in set(self._kinds)):
                return depth, added
        raise AssertionError("every kind occurs up to the last layer")

    def _saved(self, micro: MicroBatchShape, depth: int, settings: dict[str, bool]) -> float:
        return self._run(micro, depth, **settings, first=False).saved

    def _run_uncached(
        self,
        micro: MicroBatchShape,
        depth: int,
        *,
        checkpointing: bool,
        entropy_graph: bool,
        first: bool,
    ) -> _Run:
        """Run forward and backward with the first `depth` layers."""
        layout = _slot_layout(micro, self._multiple)
        parameters = list(self.model.parameters())
        with self.fake, self._first_layers(depth), kernel_stand_ins(cpu=self.cpu):
            batch = _fake_batch(micro)
            for parameter in parameters:
                makes_grad = first or not parameter.requires_grad
                parameter.grad = None if makes_grad else _empty_gradient(parameter)
            existing = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
            if checkpointing:
                checkpoint_activations(self.model)
            try:
                last_layer = self._layers[depth - 1]
                with PeakMemory(existing) as memory, _peak_before(last_layer, memory) as early:
                    scored = forward(
                        self.model,
                        batch,
                        layout,
                        entropy_graph=entropy_graph,
                        autocast=self.autocast,
                    )
                    saved = memory.now
                    entropy = scored.entropy.sum() if entropy_graph else 0
                    loss = scored.logp.sum() + entropy
                    loss.backward()
                if not early:  # nothing before this layer is trained: its backward is the last
                    return _Run(saved, memory.peak, memory.now)
                return _Run(saved, early[0], memory.peak)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise UsageError(
                    f"model.path: {type(self.model).__name__} makes shapes of its tensors' values "
                    f"({error}), which a plan does not have, so it cannot be planned"
                ) from error
            finally:
                if checkpointing:
                    self.model.gradient_checkpointing_disable()
                    self.model.eval()
                for parameter in parameters:
                    parameter.grad = None

    @contextmanager
    def _first_layers(self, depth: int) -> Iterator[None]:
        """Keep only the first `depth` decoder layers of the model inside the block."""
        named = {str(i): layer for i, layer in enumerate(self._layers)}
        for name in list(named)[depth:]:
            del self._layer_list._modules[name]
        try:
            yield
        finally:
            self._layer_list._modules.clear()
            self._layer_list._modules.update(named)


def _causal_lm(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_config(deepcopy(config), dtype=dtype).eval()
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"model.path: transformers makes no causal LM of {config.model_type}: {reason}"
        ) from error


def _slot_layout(micro: MicroBatchShape, multiple: int) -> SlotLayout:
    """Return the values of a batch that a forward reads. They are real, unlike the batch."""
    bounds = torch.tensor([0, *micro.slots]).cumsum(0, dtype=torch.int32)
    trainable = [
        torch.arange(slots) >= slots - last
        for slots, last in zip(micro.slots, micro.trainable, strict=True)
    ]
    packing = BucketedPacking.of(bounds, torch.device("cpu"), multiple=multiple)
    return SlotLayout(torch.cat(trainable).nonzero()[:, 0], packing)


def _fake_batch(micro: MicroBatchShape) -> TokenBatch:
    ids, floats = torch.zeros(sum(micro.slots), dtype=torch.int64), torch.zeros(len(micro.slots))
    return TokenBatch(
        input_ids=ids,
        target_ids=ids,
        positions=ids,
        cu_seqlens=ids[: len(micro.slots) + 1],
        segment=ids,
        trainable=ids.bool(),
        version=ids,
        turn=ids,
        logp_rollout=ids.float(),
        temperature=floats,
        outcome=floats,
        group=floats.long(),
    )


@contextmanager
def _peak_before(last: nn.Module, memory: PeakMemory) -> Iterator[list[float]]:
    """Yield a list that will have one number: the peak until the backward of layer `last` is done.

    From there on, `memory` counts its peak anew. The list stays empty if the backward ends there.
    """
    peaks: list[float] = []
    hooks: list[Any] = []

    def mark(_: Tensor) -> None:
        peaks.append(memory.peak)
        memory.peak = memory.now

    def hook_input(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if hooks:  # a recompute calls the layer again
            return
        tensors = [x for x in (*arguments, *named.values()) if isinstance(x, Tensor)]
        hidden = next((x for x in tensors if x.requires_grad), None)
        if hidden is not None:
            hooks.append(hidden.register_hook(mark))

    handle = last.register_forward_pre_hook(hook_input, with_kwargs=True)
    try:
        yield peaks
    finally:
        handle.remove()


def _layer_kinds(model: PreTrainedModel, layers: list[nn.Module]) -> list[Any]:
    """Return the kind of each layer. Layers of a kind need the same memory."""
    types = getattr(model.config.get_text_config(), "layer_types", None) or [""] * len(layers)
    kinds = []
    for layer_type, layer in zip(types, layers, strict=False):
        shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
        kinds.append((layer_type, shapes))
    return kinds


def _empty_gradient(parameter: Tensor) -> Tensor:
    return torch.empty_like(parameter, dtype=parameter.grad_dtype)


def _gradient_bytes(module: nn.Module) -> int:
    trained = [p for p in module.parameters() if p.requires_grad]
    return sum(p.numel() * (p.grad_dtype or p.dtype).itemsize for p in trained)
