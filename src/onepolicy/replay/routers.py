"""`bind_routers(model)`: record and replay the expert choices of any transformers MoE causal LM.

A bound model is not changed. Routers are intercepted only inside `record()` and `replay()`, and only those of this
model; leaving the context, normally or by an exception, puts the model back as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from onepolicy.config import UsageError
from onepolicy.replay.alignment import check_captured
from onepolicy.replay.axes import Axis, trace_from
from onepolicy.replay.checks import RoutingError, check_trace, constant_layers, refuse_router_loss
from onepolicy.replay.contexts import Replayed, Tape
from onepolicy.replay.layers import Router, find_routers
from onepolicy.replay.parallel import masks_weights, refuse_unknown_sharding
from onepolicy.replay.seam import override
from onepolicy.types import RoutingTrace


class Routers:
    """The MoE routers of one model, in decoder order."""

    def __init__(self, model: PreTrainedModel, routers: Sequence[Router]) -> None:
        self._model = model
        self._routers = tuple(routers)
        self.layers = tuple(router.layer for router in routers)  # decoder index of each MoE layer, ascending
        self.num_experts = routers[0].num_experts
        self.top_k = routers[0].top_k

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Routers) and self._model is other._model and self._routers == other._routers

    def __hash__(self) -> int:
        return hash((id(self._model), self.layers))

    @contextmanager
    def record(self, *, weights: bool = False) -> Iterator[Tape]:
        """Keep what every forward in here routes to: the top-k mask I of the R3 paper's eq. (5), as ids in the order of
        the router's own top-k. Recomputes of a backward are not forwards.

        weights: also keep what each expert's output was multiplied by, for weight replay.

        Open it once around a decode loop and `take()` after each forward: from a router's second forward on, recording
        costs two Python calls.
        """
        if weights and masks_weights(self._model):
            raise UsageError(
                "record(weights=True): under transformers' ep_router a rank has the combine weights of its own experts "
                "only; record on a model without expert parallelism"
            )
        tape = Tape(self._routers, weights=weights)
        with override("forward", [(recorder.router.module, recorder.__call__) for recorder in tape.recorders]):
            yield tape
        tape.check()

    @contextmanager
    def replay(
        self, trace: RoutingTrace, *, native: bool = False, soft: float | None = None, weights: bool = False
    ) -> Iterator[Replayed]:
        """One forward in here routes row t of its flattened tokens to `trace.ids[t]`; rows not valid route themselves.

        With the router's logits s = x W_r (R3 paper, eq. 4), its own top-k mask I (eq. 5) and the recorded mask I', the
        paper's router weighs by g = I exp(s) / sum(I exp(s)) (eq. 6) and its layer gives y = sum_i g_i E_i(x) (eq. 7);
        replay puts I' in the place of I: g' = I' exp(s) / sum(I' exp(s)) (eq. 8), y' = sum_i g'_i E_i(x) (eq. 9). Other
        families weigh by their own formulas; whichever it is, the model's own code computes it from the live scores, so
        gradients reach the router.

        native: also keep what the routers would have chosen from the same scores (group-limited ones: one more forward
        of the router). soft: a ratio in (0, 1], see `modes.soften`. weights: use the trace's combine weights in the
        forward and the live ones' gradient. See docs/replay.md.

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
        self._check_device(trace)
        check_trace(trace, layers=self.layers, num_experts=self.num_experts, top_k=self.top_k)
        if soft is not None and (weights or not 0 < soft <= 1):
            raise UsageError(f"replay: soft={soft} is a ratio in (0, 1] and cannot be combined with weights=True")
        if weights and trace.weights is None:
            raise UsageError("replay: the trace has no combine weights; record them with record(weights=True)")
        suspicious = bool(constant_layers(trace).any())
        kept = native or suspicious
        replayed = Replayed(self._routers, trace, native=kept, soft=soft, weights=weights)
        with replayed.active():
            yield replayed
        replayed.check()
        if suspicious:
            check_captured(trace, replayed.native())

    def trace_from(self, ids: Tensor, *, axis: Axis | None = None, valid: Tensor | None = None) -> RoutingTrace:
        """An engine's routes [T, decoder layers or MoE layers, K] as a trace of this model, see `axes.trace_from`."""
        depth = self._model.config.get_text_config().num_hidden_layers
        return trace_from(ids, layers=self.layers, depth=depth, num_experts=self.num_experts, axis=axis, valid=valid)

    def self_test(self) -> None:
        """RoutingError if this model's routers cannot be trusted. Costs L + 2 forwards of 8 tokens.

        Replaying its own routes must keep every bit; moving one layer to other experts must move the logits.
        """
        device = next(self._model.parameters()).device
        tokens = torch.arange(8, device=device).view(2, 4) % self._model.config.get_text_config().vocab_size

        def forward() -> Tensor:
            return self._model(input_ids=tokens, use_cache=False).logits

        with torch.no_grad(), _evaluating(self._model):
            with self.record() as tape:
                expected = forward()
            trace = tape.trace()
            with self.replay(trace):
                if not torch.equal(forward(), expected):
                    raise RoutingError(f"replaying its own routes changed the logits of {type(self._model).__name__}")
            for column, layer in enumerate(self.layers):
                ids = trace.ids.to(torch.int64)
                ids[:, column] = (ids[:, column] + 1) % self.num_experts
                with self.replay(dataclasses.replace(trace, ids=ids.to(trace.ids.dtype))):
                    if torch.equal(forward(), expected):
                        raise RoutingError(f"layer {layer}: replaying other experts changed nothing")

    def _check_device(self, trace: RoutingTrace) -> None:
        device = next(self._model.parameters()).device
        if trace.ids.device != device or trace.valid.device != device:
            raise UsageError(f"trace is on {trace.ids.device}, the model on {device}; pass trace.to({str(device)!r})")


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def bind_routers(model: PreTrainedModel) -> Routers:
    """Find the routers of a transformers MoE causal LM.

    UsageError if the model is dense or sharded in a way replay does not know, RoutingError if a block has experts but
    no router that can be replayed. Binding again finds the same routers; the model itself is not touched.
    """
    inner = _transformers_model(model)
    routers = find_routers(inner)
    refuse_unknown_sharding(inner, routers, wrapper=model)
    return Routers(inner, routers)


def _transformers_model(model: PreTrainedModel) -> PreTrainedModel:
    """`model`, or the one inside a wrapper that does not show its config (DDP, a module of the user's)."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"bind_routers: expected a model, got {type(model).__name__}")
    if hasattr(model, "config"):
        return model
    held = {path: module for path, module in model.named_modules() if isinstance(module, PreTrainedModel)}
    outer = [path for path in held if not any(path.startswith(f"{other}.") for other in held)]
    if len(outer) > 1:
        raise UsageError(f"{type(model).__name__} holds several models, {', '.join(outer)}; bind the one to replay")
    return held[outer[0]] if outer else model
