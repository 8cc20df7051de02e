"""`bind_routers(model)`: record and replay the experts of a transformers MoE causal LM.

A bound model is not changed. Only its own routers are intercepted, and only inside `record()` and
`replay()`. Leaving the context, normally or by an exception, restores the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from onepolicy.config import UsageError
from onepolicy.replay.bound import BoundRouters
from onepolicy.replay.checks import RoutingError, refuse_router_loss
from onepolicy.replay.contexts import ReplayHandle, RouteRecorder
from onepolicy.replay.layers import (
    Router,
    find_routers,
    layer_stacks,
    masks_combine_weights,
    refuse_unknown_sharding,
    transformers_model,
)
from onepolicy.replay.private_names import check_private_names
from onepolicy.replay.recompute import check_checkpoints
from onepolicy.replay.sample_checks import OnMismatch, SampleChecks
from onepolicy.replay.topk_hook import override_attribute
from onepolicy.types import RoutingTrace


class Routers(BoundRouters):
    """The MoE routers of one model, in decoder order. `bind_routers` makes it."""

    def __init__(self, model: Any, routers: Sequence[Router]) -> None:
        self._model = model
        self._routers = tuple(routers)
        self.layers = tuple(router.layer for router in routers)
        self.num_experts = routers[0].num_experts
        self.top_k = routers[0].top_k
        self._stacks = layer_stacks(model, routers)

    @cached_property
    def _checks(self) -> SampleChecks:
        return SampleChecks()

    @property
    def depth(self) -> int:  # type: ignore[override]
        config = getattr(self._model, "config", None)
        if config is None:  # a module of one's own
            return max(self.layers) + 1
        layers: int = config.get_text_config().num_hidden_layers
        return layers

    def __repr__(self) -> str:
        return f"Routers({len(self.layers)} layers, {self.top_k} of {self.num_experts} experts)"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Routers)
            and self._model is other._model
            and self._routers == other._routers
        )

    def __hash__(self) -> int:
        return hash((id(self._model), self.layers))

    @property
    def model(self) -> nn.Module:
        """The bound model, inside wrappers that do not show its config."""
        bound: nn.Module = self._model
        return bound

    @contextmanager
    def record(self, *, weights: bool = False) -> Iterator[RouteRecorder]:
        """Record the routes of every forward in this context.

        A route is the top-k mask I of the R3 paper's eq. 5 (arXiv:2510.11370): the ids of the
        chosen experts, in the order of the router's own top-k. Recomputes of a backward are not
        recorded.

            with routers.record() as tape:
                model(input_ids)
            trace = tape.trace()  # ids [T, L, K] uint8 or uint16, T = B * S flattened tokens

        In a decode loop, open the context once and call `tape.pop_ids()` after each forward. From
        a router's second forward on, recording costs two Python calls.

        Args:
            weights: also record the combine weights [T, L, K] in the router's dtype, for
                `replay(trace, weights=True)`.

        Yields:
            The recording, with `trace()` and `pop_ids()`.

        Raises:
            RoutingError: the model is being recorded or replayed already, or has more or fewer
                layers than when it was bound. Also when the context is left, unless every router
                ran once per forward on the same rows.
            UsageError: `weights` where a block selects the experts itself and returns no combine
                weights, or under transformers' `ep_router`, where a rank has the combine weights of
                its own experts only.
        """
        self._check_layers()
        if weights:
            self._check_weights_are_returned()
        tape = RouteRecorder(self._routers, weights=weights)
        forwards = [(recorder.router.module, recorder.__call__) for recorder in tape.recorders]
        with (
            tape.watching_batches(_decoder_layer(self._model, self._routers[0])),
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
        on_mismatch: OnMismatch = "stop",
    ) -> Iterator[ReplayHandle]:
        """Make the next forward in this context use the trace's experts.

        Row t of the forward's flattened tokens is routed to the experts `trace.ids[t]`. Rows that
        are not valid are routed by the model itself.

            with routers.replay(trace):
                loss = model(input_ids).logits.logsumexp(-1).sum()
            loss.backward()

        The equations of the R3 paper (arXiv:2510.11370), with logits s = x W_r (eq. 4), the
        router's own top-k mask I (eq. 5) and the recorded mask I': a router weighs by
        g_i = I_i exp(s_i) / sum_j I_j exp(s_j) (eq. 6), and its layer returns y = sum_i g_i E_i(x)
        (eq. 7). Replay puts I' in the place of I:
        g'_i = I'_i exp(s_i) / sum_j I'_j exp(s_j) (eq. 8), y' = sum_i g'_i E_i(x) (eq. 9). Other
        families weigh by other formulas. In all of them the model's own code computes the weights
        from the live scores, so gradients reach the router.

        The backward may run anywhere. Activation checkpoints recompute with the routes of their own
        forward. A recompute by other means must have its backward in this context.

        Args:
            trace: ids [T, L, K] and valid [T] for the T = B * S flattened tokens, on any device.
                It is copied.
            native: also keep the routers' own choice from the same scores, for `native()`,
                `check_alignment()` and `gate_mass()`. A router with groups of experts runs once
                more for it.
            soft: in (0, 1]. Replace replayed experts whose probability is below `soft` times the
                lowest one of the router's own choice, see `modes.soften`.
            weights: use the trace's combine weights in the forward. Their gradient goes to the live
                weights.
            check: when the context is left, compare the routes of every sample with the routers'
                own choice, see docs/replay.md.
            on_mismatch: "stop" raises at the first sample that is wrong. "drop" leaves all tokens
                of a sample to the routers if the first one finds it wrong, and notes it in
                `dropped`. What shows in later layers only still raises.

        Raises:
            UsageError: the trace is not one of this model, `soft` or `weights` cannot be used with
                it, or the model's config asks for a router loss.
            RoutingError: a router was not called, was called twice, or was given another number of
                rows. Or the model has more or fewer layers than when it was bound, the trace's rows
                are ordered by step, or none of them is valid. Or, with `check`, the routes are not
                those of this forward's tokens and weights.
        """
        self.check_replayable(trace, soft, weights)
        planned = None
        if check:
            planned = self._checks.plan(trace, on_mismatch=on_mismatch)
        how: dict[str, Any] = {"native": native, "soft": soft, "weights": weights}
        if planned is None:
            with self.replay_known(trace, **how) as handle:
                yield handle
            return
        with self.replay_known(trace, compared=planned.rows, **how) as handle:
            planned.prepare(handle)
            yield handle
        planned(handle)

    @contextmanager
    def replay_known(
        self,
        trace: RoutingTrace,
        *,
        native: bool = False,
        soft: float | None = None,
        weights: bool = False,
        compared: Tensor | None = None,  # [m] int64
    ) -> Iterator[ReplayHandle]:
        """Replay a trace that is known to be one of this model.

        The learner's are: `Learner.score` checks a step's, and `train/checks.py` compares them with
        the routers' own choice. Arguments are those of `replay` and `ReplayHandle`.

        Raises:
            RoutingError: a router was not called, was called twice, or was given another number of
                rows.
        """
        assert not weights or trace.weights is not None, "the trace has no combine weights"
        how: dict[str, Any] = {"native": native, "soft": soft, "weights": weights}
        handle = ReplayHandle(self._routers, trace, compared=compared, **how)
        with handle.replaying():
            yield handle
        handle.check()

    def self_test(self) -> None:
        """Raise unless this model's routers record and replay as they should.

        Replaying the model's own routes must keep the logits to the bit. Moving one layer to other
        experts must change them. Costs L + 2 forwards of 8 tokens.

        Raises:
            RoutingError: one of the two does not hold.
        """
        with torch.no_grad(), _evaluating(self._model):
            with self.record() as tape:
                expected = self._test_logits()
            trace = tape.trace()
            with self.replay(trace, check=False):
                if not torch.equal(self._test_logits(), expected):
                    raise RoutingError(
                        "replaying its own routes changed the logits of "
                        f"{type(self._model).__name__}"
                    )
            for column, layer in enumerate(self.layers):
                with self.replay(self._with_other_experts(trace, column), check=False):
                    if torch.equal(self._test_logits(), expected):
                        raise RoutingError(
                            f"layer {layer}: replaying other experts changed nothing"
                        )

    def _check_weights_are_returned(self) -> None:
        if masks_combine_weights(self._model):
            raise UsageError(
                "record(weights=True): under transformers' ep_router a rank has the combine "
                "weights of its own experts only; record on a model without expert parallelism"
            )
        for router in self._routers:
            if hasattr(router.module, "experts"):
                raise UsageError(
                    f"record(weights=True): layer {router.layer}: {type(router.module).__name__} "
                    "of this transformers selects experts in the block and returns no combine "
                    "weights; record the experts alone, without weights=True (in a recipe: "
                    "replay.mode=r3), or install a transformers whose model has a router module "
                    "(docs/reference/versions.md)"
                )

    def _check_layers(self) -> None:
        for stack, layers in self._stacks:
            if len(stack) != layers:
                raise RoutingError(
                    f"the model has {len(stack)} decoder layers, and had {layers} when its routers "
                    "were bound: those of a new layer would choose for themselves; call "
                    "bind_routers again"
                )

    def check_replayable(
        self, trace: RoutingTrace, soft: float | None = None, weights: bool = False
    ) -> None:
        """Raise UsageError or RoutingError unless `replay` can replay this trace so."""
        self._check_layers()
        refuse_router_loss(getattr(self._model, "config", None))
        self.check_trace(trace, self.layers)
        if soft is not None and (not isinstance(soft, int | float) or weights or not 0 < soft <= 1):
            raise UsageError(
                f"replay: soft={soft} is a ratio in (0, 1] and cannot be combined with weights=True"
            )
        if weights and trace.weights is None:
            raise UsageError(
                "replay: the trace has no combine weights; record them with record(weights=True)"
            )

    def _test_logits(self) -> Tensor:
        """Return the logits of 8 tokens, in 2 samples."""
        devices = (
            parameter.device for parameter in self._model.parameters() if not parameter.is_meta
        )
        device = next(devices, torch.device("cpu"))  # offloaded parameters are on meta
        vocabulary = self._model.config.get_text_config().vocab_size
        tokens = torch.arange(8, device=device).view(2, 4) % vocabulary
        logits: Tensor = self._model(input_ids=tokens, use_cache=False).logits
        return logits

    def _with_other_experts(self, trace: RoutingTrace, column: int) -> RoutingTrace:
        ids = trace.ids.to(torch.int64)
        ids[:, column] = (ids[:, column] + 1) % self.num_experts
        return dataclasses.replace(trace, ids=ids.to(trace.ids.dtype))


def bind_routers(model: nn.Module) -> Routers:
    """Return the routers of a transformers MoE causal LM.

    The model is not changed. It may be wrapped by peft, FSDP2, DDP, torch.compile or a module of
    your own. Binding again gives equal routers.

    Args:
        model: a transformers causal LM, or a module that contains one.

    Raises:
        UsageError: the model is dense, contains several models, or is sharded in a way that replay
            does not support. Or this torch lacks a name that replay needs (private_names.py).
        RoutingError: a block has experts but no router that can be replayed.
    """
    check_private_names()
    check_checkpoints()
    inner = transformers_model(model)
    routers = find_routers(inner)
    refuse_unknown_sharding(inner, routers, wrapper=model)
    return Routers(inner, routers)


def _decoder_layer(model: nn.Module, router: Router) -> nn.Module:
    """Return the decoder layer that contains a router."""
    parts = router.path.split(".")
    index = next(i for i, part in enumerate(parts) if part.isdecimal())
    return model.get_submodule(".".join(parts[: index + 1]))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
