"""`bind_routers(model)`: record and replay the expert choices of any transformers MoE causal LM.

A bound model is not changed. Routers are intercepted only inside `record()` and `replay()`, and only those of this
model; leaving the context, normally or by an exception, puts the model back as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from onepolicy.config import UsageError
from onepolicy.replay.alignment import MIN_ROWS, check_alignment, check_captured
from onepolicy.replay.axes import Axis, trace_from
from onepolicy.replay.checks import (
    MisalignedRoutesError,
    RoutingError,
    check_trace,
    constant_layers,
    refuse_router_loss,
)
from onepolicy.replay.contexts import ReplayHandle, RouteRecorder
from onepolicy.replay.layers import Router, decoder_layer, find_routers
from onepolicy.replay.topk_hook import override_attribute
from onepolicy.types import RoutingTrace


def refuse_unknown_sharding(
    model: nn.Module, routers: Sequence[Router], *, wrapper: nn.Module
) -> None:
    """UsageError if a router would not see all tokens of its process's batch, or not as plain tensors.

    wrapper: what holds the model, or the model itself; FSDP2 may manage either.
    """
    distributed = getattr(getattr(model, "config", None), "distributed_config", None)
    if distributed is not None and distributed.pp_size > 1:
        raise UsageError(
            f"record and replay do not work under pipeline parallelism (pp_size={distributed.pp_size}): a stage has "
            "only some of the trace's layers; use FSDP2, tensor or expert parallelism"
        )
    if distributed is not None and "sequence_parallel" in _styles(model):
        raise UsageError(
            "record and replay do not work with sequence_parallel in the model's tp_plan: routers may see a part of "
            "the sequence; take it out of the plan"
        )
    managed = {
        part
        for module in wrapper.modules()
        if isinstance(module, FSDPModule)
        for part in module.modules()
    }
    for router in routers:
        sharded = [name for name, p in router.module.named_parameters() if isinstance(p, DTensor)]
        if sharded and router.module not in managed:
            raise UsageError(
                f"layer {router.layer}: {sharded[0]} of {router.path!r} is a DTensor that FSDP2 does not gather, so "
                "its scores are no plain tensor and cannot be replayed; leave the router out of the parallel plan"
            )


def masks_combine_weights(model: nn.Module) -> bool:
    """Do routers zero the combine weights of experts that live on other ranks (transformers' `ep_router`)?"""
    distributed = getattr(getattr(model, "config", None), "distributed_config", None)
    return distributed is not None and distributed.ep_size > 1 and "ep_router" in _styles(model)


def _styles(model: nn.Module) -> set[str]:
    plans = (getattr(model, "tp_plan", None), getattr(model, "ep_plan", None))
    return {style for plan in plans for style in (plan or {}).values()}


CHECK_EVERY = 32
"""Forwards of one trace source from one check of its routes to the next: a check costs up to 15% of a small model's
forward (docs/replay_checks.md), which is less than 1% of so many."""


class Routers:
    """The MoE routers of one model, in decoder order."""

    def __init__(self, model: Any, routers: Sequence[Router]) -> None:
        self._model = model
        self._routers = tuple(routers)
        self.layers = tuple(
            router.layer for router in routers
        )  # decoder index of each MoE layer, ascending
        self.num_experts = routers[0].num_experts
        self.top_k = routers[0].top_k
        self._unchecked: dict[str, int] = {}  # of each trace source that passed: forwards since

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Routers)
            and self._model is other._model
            and self._routers == other._routers
        )

    def __hash__(self) -> int:
        return hash((id(self._model), self.layers))

    @contextmanager
    def record(self, *, weights: bool = False) -> Iterator[RouteRecorder]:
        """Keep what every forward in here routes to: the top-k mask I of the R3 paper's eq. (5), as ids in the order of
        the router's own top-k. Recomputes of a backward are not forwards.

        weights: also keep what each expert's output was multiplied by, for weight replay.

        Open it once around a decode loop and `pop_ids()` after each forward: from a router's second forward on, recording
        costs two Python calls.
        """
        if weights and masks_combine_weights(self._model):
            raise UsageError(
                "record(weights=True): under transformers' ep_router a rank has the combine weights of its own experts "
                "only; record on a model without expert parallelism"
            )
        tape = RouteRecorder(self._routers, weights=weights)
        forwards = [(recorder.router.module, recorder.__call__) for recorder in tape.recorders]
        with (
            tape.watching_batches(decoder_layer(self._model, self._routers[0])),
            override_attribute("forward", forwards),
        ):
            yield tape
        tape.check()

    @contextmanager
    def replay(
        self,
        trace: RoutingTrace,
        *,
        native: bool = False,
        soft: float | None = None,
        weights: bool = False,
        check: bool = True,
    ) -> Iterator[ReplayHandle]:
        """One forward in here routes row t of its flattened tokens to `trace.ids[t]`; rows not valid route themselves.

        With the router's logits s = x W_r (R3 paper, eq. 4), its own top-k mask I (eq. 5) and the recorded mask I', the
        paper's router weighs by g = I exp(s) / sum(I exp(s)) (eq. 6) and its layer gives y = sum_i g_i E_i(x) (eq. 7);
        replay puts I' in the place of I: g' = I' exp(s) / sum(I' exp(s)) (eq. 8), y' = sum_i g'_i E_i(x) (eq. 9). Other
        families weigh by their own formulas; whichever it is, the model's own code computes it from the live scores, so
        gradients reach the router.

        native: also keep what the routers would have chosen from the same scores (group-limited ones: one more forward
        of the router). soft: a ratio in (0, 1], see `modes.soften`. weights: use the trace's combine weights in the
        forward and the live ones' gradient. See docs/replay.md.

        check: when the context is left, compare the routes with the routers' own choice, and raise RoutingError if they
        are not those of this forward's tokens and weights. Done for the first forward of every source of traces
        (`RoutingTrace.origin`), and for every 32nd after it. See docs/replay_checks.md.

        The backward may run anywhere: activation checkpoints made with torch.utils.checkpoint recompute with the routes
        of their own forward. A recompute made by other means (an autograd function that calls the model again) must
        have its backward in here.
        """
        if not isinstance(trace, RoutingTrace):
            raise UsageError(
                f"replay: expected a RoutingTrace, got {type(trace).__name__}; tape.trace() gives that of a recording, "
                "routers.trace_from(ids) that of an engine's ids"
            )
        refuse_router_loss(getattr(self._model, "config", None))
        _check_devices(trace)
        _check_steps(trace)
        check_trace(trace, layers=self.layers, num_experts=self.num_experts, top_k=self.top_k)
        if soft is not None and (not isinstance(soft, int | float) or weights or not 0 < soft <= 1):
            raise UsageError(
                f"replay: soft={soft} is a ratio in (0, 1] and cannot be combined with weights=True"
            )
        if weights and trace.weights is None:
            raise UsageError(
                "replay: the trace has no combine weights; record them with record(weights=True)"
            )
        suspicious = bool(constant_layers(trace).any())
        due = check and self._due(trace)
        own = suspicious or due
        replayed = ReplayHandle(
            self._routers, trace, native=native, soft=soft, weights=weights, checked=own
        )
        with replayed.replaying():
            yield replayed
        replayed.check()
        if suspicious:
            check_captured(replayed.trace, replayed.native_trace())
        if due:
            self._check(trace.origin.source, replayed)

    def _due(self, trace: RoutingTrace) -> bool:
        """Is it time to check a trace of this source? A source that failed is due until one of its traces passes."""
        source = trace.origin.source
        if source in self._unchecked:
            self._unchecked[source] += 1
            return self._unchecked[source] >= CHECK_EVERY
        if len(trace) and not trace.valid.any():
            raise RoutingError(
                f"none of the trace's {len(trace)} rows is valid, so replaying it would do nothing: no route was "
                "captured, or all are marked as missing. To let the model route these tokens itself, give check=False"
            )
        return True

    def recheck_all_sources(self) -> None:
        """Check the next trace of every source."""
        self._unchecked.clear()

    def _check(self, source: str, replayed: ReplayHandle) -> None:
        try:
            check_alignment(replayed.trace, replayed.native_trace())
        except MisalignedRoutesError as error:
            self._unchecked.pop(source, None)
            raise MisalignedRoutesError(
                f"{error}. To replay them all the same, give check=False",
                layers_wrong=error.layers_wrong,
            ) from None
        if int(replayed.trace.valid.sum()) >= MIN_ROWS:
            self._unchecked[source] = 0

    def trace_from(
        self, ids: Tensor, *, axis: Axis | None = None, valid: Tensor | None = None
    ) -> RoutingTrace:
        """An engine's routes [T, decoder layers or MoE layers, K] as a trace of this model, see `axes.trace_from`."""
        depth = self._model.config.get_text_config().num_hidden_layers
        return trace_from(
            ids,
            layers=self.layers,
            depth=depth,
            num_experts=self.num_experts,
            axis=axis,
            valid=valid,
        )

    def self_test(self) -> None:
        """RoutingError if this model's routers cannot be trusted. Costs L + 2 forwards of 8 tokens.

        Replaying its own routes must keep every bit; moving one layer to other experts must move the logits.
        """
        devices = (
            parameter.device for parameter in self._model.parameters() if not parameter.is_meta
        )
        device = next(devices, torch.device("cpu"))  # meta: offloaded
        tokens = (
            torch.arange(8, device=device).view(2, 4)
            % self._model.config.get_text_config().vocab_size
        )

        def forward() -> Tensor:
            logits: Tensor = self._model(input_ids=tokens, use_cache=False).logits
            return logits

        with torch.no_grad(), _evaluating(self._model):
            with self.record() as tape:
                expected = forward()
            trace = tape.trace()
            with self.replay(trace, check=False):
                if not torch.equal(forward(), expected):
                    raise RoutingError(
                        f"replaying its own routes changed the logits of {type(self._model).__name__}"
                    )
            for column, layer in enumerate(self.layers):
                ids = trace.ids.to(torch.int64)
                ids[:, column] = (ids[:, column] + 1) % self.num_experts
                with self.replay(
                    dataclasses.replace(trace, ids=ids.to(trace.ids.dtype)), check=False
                ):
                    if torch.equal(forward(), expected):
                        raise RoutingError(
                            f"layer {layer}: replaying other experts changed nothing"
                        )


def _check_devices(trace: RoutingTrace) -> None:
    """Any device with data will do: each layer's routes follow its router's scores."""
    named = (("ids", trace.ids), ("valid", trace.valid), ("weights", trace.weights))
    devices = {name: str(tensor.device) for name, tensor in named if tensor is not None}
    if len(set(devices.values())) > 1:
        where = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise UsageError(f"replay: the trace has {where}; pass trace.to(device) of one of them")
    if trace.ids.is_meta:
        raise UsageError(
            "replay: the trace is on meta, which holds no routes; pass one with data, on any device"
        )


def _check_steps(trace: RoutingTrace) -> None:
    if trace.origin.steps:
        first, later = trace.origin.steps[0], trace.origin.steps[1:]
        raise RoutingError(
            f"the trace's rows are not those of this forward: they were recorded in {1 + len(later)} forwards of "
            f"{first[0]} samples that continue each other ({first[1]} tokens each, then {later[0][1]}), so they lie "
            "step by step, and those of one forward sample by sample. Of a generate() give "
            "op.pad_routes(op.routes_of_generate(tape, sequences, attention_mask), attention_mask); of other forwards "
            "the rows in the order that this one takes them, with trace.at(rows)"
        )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def bind_routers(model: nn.Module) -> Routers:
    """Find the routers of a transformers MoE causal LM.

    UsageError if the model is dense or sharded in a way replay does not know, RoutingError if a block has experts but
    no router that can be replayed. Binding again finds the same routers; the model itself is not touched.
    """
    inner = _transformers_model(model)
    routers = find_routers(inner)
    refuse_unknown_sharding(inner, routers, wrapper=model)
    return Routers(inner, routers)


def _transformers_model(model: nn.Module) -> nn.Module:
    """`model`, or the one inside a wrapper that does not show its config (DDP, a module of the user's)."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"bind_routers: expected a model, got {type(model).__name__}")
    if hasattr(model, "config"):
        return model
    held = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, PreTrainedModel)
    }
    outer = [path for path in held if not any(path.startswith(f"{other}.") for other in held)]
    if len(outer) > 1:
        raise UsageError(
            f"{type(model).__name__} holds several models, {', '.join(outer)}; bind the one to replay"
        )
    return held[outer[0]] if outer else model
