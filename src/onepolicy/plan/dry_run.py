"""How much a micro-batch holds, found by running the trainer's own forward and backward on tensors without memory.

The model has its real widths, experts and number of tokens, but its tensors are fake: they have shapes, and storages
whose bytes can be counted, and nothing is computed. So what autograd saves, what the vocabulary projection makes and
what activation checkpointing drops are those of the code that trains, for any model of transformers. Kernels' own
scratch memory is not seen, and on a GPU attention is taken to be a flash kernel.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
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
    unset_fake_temporarily,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from onepolicy.config import UsageError
from onepolicy.invariant import experts as invariant_experts
from onepolicy.invariant import mode
from onepolicy.invariant.switch import TILE
from onepolicy.models import experts, fp32_head, linear, packed_attention
from onepolicy.models.packed_attention import Packing
from onepolicy.models.quant import quantise
from onepolicy.plan.dims import decoder_layers
from onepolicy.train.forward import Places, forward
from onepolicy.types import TokenBatch

LAYOUT, FEW = experts.sort_by_expert, mode.few_token_packing


@contextmanager
def kernel_stand_ins(*, cpu: bool) -> Iterator[None]:
    """cpu: of our CPU functions; else of a GPU's kernels."""
    with ExitStack() as stack:
        if cpu:
            for module in (experts, invariant_experts):
                stack.enter_context(patched(module, "sort_by_expert", _even_layout))
            stack.enter_context(patched(mode, "few_token_packing", _real_packing))
        else:
            stack.enter_context(patched(packed_attention, "scaled_dot_product_attention", _flash))
        stack.enter_context(patched(torch.nn.functional, "grouped_mm", _grouped_mm))
        stack.enter_context(patched(quantise, "_check_forward", lambda model: None))
        yield


@contextmanager
def patched(module: Any, name: str, stand_in: Any) -> Iterator[None]:
    own = getattr(module, name)
    setattr(module, name, stand_in)
    try:
        yield
    finally:
        setattr(module, name, own)


def _real_packing(device: torch.device) -> Packing:
    with unset_fake_temporarily():
        return FEW(torch.device("cpu"))


def _even_layout(
    top_k_index: Tensor, num_experts: int, *, least: int = 1
) -> tuple[Tensor, Tensor, list[int]]:
    """Our CPU experts lay out rows by the values of routes, which fake tensors lack: every expert gets equally many.

    Only the first computes, which holds as much as each of the others would after it.
    """
    with unset_fake_temporarily():
        chosen = torch.arange(top_k_index.numel()).remainder(num_experts).view(top_k_index.shape)
        token, place, ends = LAYOUT(chosen, num_experts, least=least)
    return torch.empty_like(token), torch.empty_like(place), ends[:1] * num_experts


class _Flash(torch.autograd.Function):
    """What flash attention holds on a GPU, whatever kernel torch would choose for tensors of the CPU.

    Its backward sums queries' gradients in float32, and makes those of keys and values for every query head.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(
            query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32)
        )
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, _ = ctx.saved_tensors
        total = torch.empty_like(query, dtype=torch.float32)
        whole = [query.new_empty(*query.shape[:-1], x.shape[-1]) for x in (key, value)]
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del total, whole
        return grads


class _Grouped(torch.autograd.Function):
    """What a grouped matmul holds, in any dtype: the one for fake tensors knows bfloat16 only."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return rows.new_empty(len(rows), weight.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


def _grouped_mm(rows: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
    return _Grouped.apply(rows, weight)


def _flash(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    return _Flash.apply(query, key, value)


class PeakMemory(TorchDispatchMode):
    """Bytes of tensor storage made inside the block that are alive at once."""

    def __init__(self, given: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.given = {tensor.untyped_storage()._cdata for tensor in given}
        self.alive: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, arguments: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*arguments, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, DTensor):
                tensor = tensor._local_tensor
            if isinstance(tensor, torch.Tensor):
                self._hold(tensor.untyped_storage())
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.alive and key not in self.given:
            self.alive[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, key)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """It has another size than when it was seen last, if it was seen."""
        key = storage._cdata
        if key in self.alive:
            self.now += storage.nbytes() - self.alive[key]
            self.alive[key] = storage.nbytes()
            self.peak = max(self.peak, self.now)
        else:
            self._hold(storage)

    def _drop(self, key: int) -> None:
        self.now -= self.alive.pop(key, 0)


ALL_LAYERS = 16  # a deeper model is run with its first layers only


@dataclass(frozen=True, slots=True)
class MicroBatchShape:
    """A micro-batch: slots and trainable slots of each sample (the last ones of it)."""

    slots: tuple[int, ...]
    trainable: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MicroBatchMemory:
    """Bytes of tensors beside parameters and the gradients there were before."""

    saved: float  # after the forward: the graph
    peak: float  # the most at once, forward or backward
    logits: float  # of the peak: what would not be there if only one slot per sample were projected
    layer: float  # of saved: what one more layer adds
    tail: float  # the most once the backward has left the layers

    def at(self, samples: float, other: MicroBatchMemory) -> MicroBatchMemory:
        """Of another number of samples of the same length: self has one, `other` has two."""
        return MicroBatchMemory(
            *(
                a + (samples - 1) * (b - a)
                for a, b in zip(astuple(self), astuple(other), strict=True)
            )
        )


class DryRunModel:
    """cpu: run our CPU functions, else what a GPU runs. dtype: what layers compute in. invariant: on-policy mode."""

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        dtype: torch.dtype,
        cpu: bool,
        fp32_lm_head: bool = False,
        invariant: bool = False,
    ) -> None:
        self.cpu, self._multiple = cpu, TILE if invariant else 1
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        with self.fake:
            self.model = _causal_lm(config, dtype)
            if fp32_lm_head:
                fp32_head.Fp32Head(self.model, field="model.lm_head")
            self.model.set_attn_implementation(packed_attention.NAME)
            if cpu and getattr(self.model, "set_experts_implementation", None) is not None:
                self.model.set_experts_implementation(experts.NAME)
            if cpu:
                linear.use_onednn_linear(self.model, torch.device("cpu"))
            if invariant:
                with kernel_stand_ins(cpu=cpu):
                    mode.install_invariant(self.model)
        self._list = decoder_layers(self.model)
        self._layers = list(self._list)
        self._kinds = _kinds(self.model, self._layers)
        self._run = cache(self._run_anew)

    def held(
        self,
        micro: MicroBatchShape,
        *,
        checkpointing: bool,
        entropy_graph: bool = False,
        first: bool = False,
    ) -> MicroBatchMemory:
        """first: the first micro-batch of an optimiser step, whose backward makes the gradients, so they count."""
        how = {"checkpointing": checkpointing, "entropy_graph": entropy_graph}
        short, growth = len(self._layers), dict[Any, float]()
        if short > ALL_LAYERS:
            short, growth = self._growth(micro, how)
        run = self._run(micro, short, **how, first=first)
        one = self._run(micro, 1, **how, first=False)
        bare = self._run(replace(micro, trainable=(1,) * len(micro.slots)), 1, **how, first=False)
        logits = max(0.0, one.early - bare.early)
        rest = sum(growth[kind] for kind in self._kinds[short:])
        late = run.late
        if first:  # at the end of the backward nearly all gradients are there
            late += sum(_bytes(layer) for layer in self._layers[short:])
        layer = growth.get(self._kinds[-1], 0.0)
        if not growth and short > 1:
            layer = self._saved(micro, 2, how) - one.saved
        return MicroBatchMemory(
            run.saved + rest, max(run.early + rest, late), logits, layer, one.late
        )

    def _growth(self, micro: MicroBatchShape, how: dict[str, bool]) -> tuple[int, dict[Any, float]]:
        """Layers to run so that every kind is met, twice if it can be; bytes a layer of each kind adds to the graph."""
        grown: dict[Any, float] = {}
        found: Counter[Any] = Counter()
        for depth, kind in enumerate(self._kinds, 1):
            found[kind] += 1
            if found[kind] == 2:
                grown[kind] = self._saved(micro, depth, how) - self._saved(micro, depth - 1, how)
            if all(found[kind] >= min(2, self._kinds.count(kind)) for kind in set(self._kinds)):
                return depth, grown
        raise AssertionError("every kind is met by the last layer")

    def _saved(self, micro: MicroBatchShape, depth: int, how: dict[str, bool]) -> float:
        return self._run(micro, depth, **how, first=False).saved

    def _run_anew(
        self,
        micro: MicroBatchShape,
        depth: int,
        *,
        checkpointing: bool,
        entropy_graph: bool,
        first: bool,
    ) -> _Run:
        places = _places(micro, self._multiple)
        parameters = list(self.model.parameters())
        with self.fake, self._first_layers(depth), kernel_stand_ins(cpu=self.cpu):
            batch = _batch(micro)
            for parameter in parameters:
                parameter.grad = None if first else torch.empty_like(parameter)
            given = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
            if checkpointing:
                self.model.gradient_checkpointing_enable(
                    gradient_checkpointing_kwargs={"use_reentrant": False}
                )
            try:
                with PeakMemory(given) as peak, _marking(self._layers[depth - 1], peak) as marks:
                    scored = forward(self.model, batch, places, entropy_graph=entropy_graph)
                    saved = peak.now
                    loss = scored.logp.sum() + (scored.entropy.sum() if entropy_graph else 0)
                    loss.backward()
                return _Run(saved, marks[0], peak.peak)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise UsageError(
                    f"model.path: {type(self.model).__name__} makes shapes of its tensors' values ({error}), which a "
                    "plan does not have, so it cannot be planned"
                ) from error
            finally:
                if checkpointing:
                    self.model.gradient_checkpointing_disable()
                for parameter in parameters:
                    parameter.grad = None

    @contextmanager
    def _first_layers(self, depth: int) -> Iterator[None]:
        """The model with its first `depth` decoder layers only."""
        named = {str(i): layer for i, layer in enumerate(self._layers)}
        for name in list(named)[depth:]:
            del self._list._modules[name]
        try:
            yield
        finally:
            self._list._modules.clear()
            self._list._modules.update(named)


@dataclass(frozen=True, slots=True)
class _Run:
    saved: float
    early: float  # most until the backward of the last layer was done: all layers' activations are there
    late: float  # most after that


def _causal_lm(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_config(deepcopy(config), dtype=dtype).train()
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"model.path: transformers makes no causal LM of {config.model_type}: {reason}"
        ) from error


def _places(micro: MicroBatchShape, multiple: int) -> Places:
    """What a forward reads of a batch's values: real, where the batch is fake."""
    bounds = torch.tensor([0, *micro.slots]).cumsum(0, dtype=torch.int32)
    own = [torch.arange(n) >= n - new for n, new in zip(micro.slots, micro.trainable, strict=True)]
    return Places(
        torch.cat(own).nonzero()[:, 0], Packing.of(bounds, torch.device("cpu"), multiple=multiple)
    )


def _batch(micro: MicroBatchShape) -> TokenBatch:
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
def _marking(last: nn.Module, peak: PeakMemory) -> Iterator[list[float]]:
    """[most bytes until the backward of the last layer was done]; from there the peak counts anew."""
    marks: list[float] = []
    watched: list[Any] = []

    def mark(_: Tensor) -> None:
        marks.append(peak.peak)
        peak.peak = peak.now

    def watch(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not watched:  # a recompute calls the layer again
            tensors = (x for x in (*arguments, *named.values()) if isinstance(x, Tensor))
            watched.append(next(x for x in tensors if x.requires_grad).register_hook(mark))

    handle = last.register_forward_pre_hook(watch, with_kwargs=True)
    try:
        yield marks
    finally:
        handle.remove()


def _kinds(model: PreTrainedModel, layers: list[nn.Module]) -> list[Any]:
    """Layers of the same kind hold as much as each other."""
    types = getattr(model.config.get_text_config(), "layer_types", None) or [""] * len(layers)
    shapes = [
        tuple((name, tuple(p.shape)) for name, p in layer.named_parameters()) for layer in layers
    ]
    return list(zip(types, shapes, strict=False))


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())
