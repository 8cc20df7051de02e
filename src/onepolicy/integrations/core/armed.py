"""Replay for forwards that happen deep inside another trainer's code.

    armed = ArmedReplay(model)
    with armed.batch(traces):  # one trace per sample, in the order of the batch
        trainer._compute_loss(model, inputs)  # calls the model, in one forward or in chunks

Every forward of the model takes the traces of its samples, lays them out as its own arguments say,
and replays them. Recomputes of activation checkpoints carry their forward's replay by themselves.
Outside `batch()` the model is untouched.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from onepolicy.config import UsageError
from onepolicy.errors import describe_argument
from onepolicy.integrations.core.layout import fit, packed
from onepolicy.integrations.core.payload import missing_routes
from onepolicy.replay.checks import RoutingError
from onepolicy.replay.contexts import ReplayHandle
from onepolicy.replay.padding import pad_routes, unpad_routes
from onepolicy.replay.recompute import called_by_checkpoint
from onepolicy.replay.routers import Routers, bind_routers
from onepolicy.replay.sample_checks import OnMismatch
from onepolicy.replay.topk_hook import in_backward
from onepolicy.types import RoutingTrace

Trace = RoutingTrace | None
ExcInfo = tuple[type[BaseException] | None, BaseException | None, TracebackType | None]


class ArmedReplay:
    """The routers of a model, with hooks that replay the forwards inside `batch()`.

    Attributes:
        routers: the model's routers.

    Raises:
        UsageError: the model is compiled, or as of `bind_routers`.
    """

    def __init__(self, model: nn.Module) -> None:
        _refuse_compiled(model)
        self.routers: Routers = bind_routers(model)
        self._batch: ArmedBatch | None = None
        bound = self.routers.model
        self._hooks = [
            bound.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            bound.register_forward_hook(self._after_forward, always_call=True),
        ]

    @contextmanager
    def batch(
        self,
        traces: Sequence[Trace],
        *,
        native: bool = False,
        check: bool = True,
        on_mismatch: OnMismatch = "stop",
    ) -> Iterator[ArmedBatch]:
        """Replay these traces in the forwards of this context.

        Args:
            traces: one trace per sample, in the order in which the forwards feed them. A trace may
                be longer or shorter than its sample: it is cut, or the model routes the rest. A
                sample whose trace is None or has no valid row is routed by the model itself.
            native: keep the routers' own choice, for `ArmedBatch.native`.
            check, on_mismatch: as of `Routers.replay`.

        Yields:
            The batch, with the number of its forwards.

        Raises:
            RoutingError: a forward has more samples than there are traces left, traces are left
                over at the end, or as of `Routers.replay`.
            UsageError: another batch is open, or a forward asks for a router loss.
        """
        if self._batch is not None:
            raise UsageError(
                "ArmedReplay.batch: another batch of this model is open; leave it first"
            )
        opened = ArmedBatch(
            self.routers, traces, native=native, check=check, on_mismatch=on_mismatch
        )
        self._batch = opened
        try:
            yield opened
        finally:
            self._batch = None
            opened.abandon()
        opened.check_empty()

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        if self._batch is None:
            return
        _refuse_compiled(model)
        if not in_backward():  # else: another model's checkpoint runs this one anew
            refuse_outer_checkpoint()
            self._batch.enter(args, kwargs)

    def _after_forward(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._batch is not None and not in_backward():
            self._batch.leave(error_of(output))


def error_of(output: Any) -> ExcInfo:
    """Return the error of the forward after which a hook runs, three times None unless it failed.

    A hook with always_call then gets None for its output. Another error, in whose handler the
    caller runs this forward, is not its own.
    """
    if output is None:
        return sys.exc_info()
    return None, None, None


def refuse_outer_checkpoint() -> None:
    """Raise UsageError inside an activation checkpoint around the whole model.

    It began before the forward's replay did, so its recompute would not carry that.
    """
    if called_by_checkpoint():
        raise UsageError(
            "replay: an activation checkpoint around the whole model would recompute it with the "
            "routers' own experts; checkpoint its layers instead "
            "(model.gradient_checkpointing_enable())"
        )


class ArmedBatch:
    """The traces of one batch, and the forwards that took them.

    Attributes:
        forwards: the number of forwards so far.
        native: the routers' own choice of each sample so far, with a row for each token that was
            fed; None for a sample without routes. Empty without `native=True`.
        dropped: numbers of the samples so far that `on_mismatch="drop"` left to the routers.
    """

    def __init__(
        self,
        routers: Routers,
        traces: Sequence[Trace],
        *,
        native: bool,
        check: bool,
        on_mismatch: OnMismatch,
    ) -> None:
        self.forwards = 0
        self.native: list[Trace] = []
        self.dropped: list[int] = []
        self._routers = routers
        self._total = len(traces)
        self._waiting = deque(traces)
        self._keep_native = native
        self._how: dict[str, Any] = {"check": check, "on_mismatch": on_mismatch}
        # Of the forward that is running
        self._replay: AbstractContextManager[ReplayHandle] | None = None
        self._handle: ReplayHandle | None = None
        self._layout: _Layout | None = None
        self._without: list[bool] = []  # samples without routes

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Open the replay of a forward with these arguments."""
        if kwargs.get("output_router_logits"):
            raise UsageError(
                "this forward was given output_router_logits=True, which adds a router auxiliary "
                "loss: it counts experts that were not used and pulls the routers away from those "
                "that were; turn the loss off in the trainer"
            )
        layout = _layout_of(args, kwargs)
        if layout.samples > len(self._waiting):
            raise RoutingError(
                f"a forward has {layout.samples} samples, but only {len(self._waiting)} of "
                f"{self._total} traces are left; the trainer ran a forward more than expected, or "
                "another batch, or padded a packed row with position_ids of 0"
            )
        self.forwards += 1
        traces = [self._waiting.popleft() for _ in range(layout.samples)]
        self._layout, self._without = layout, [not _has_routes(trace) for trace in traces]
        if all(self._without):
            return
        whole = layout.trace(
            [self._fitted(t, n) for t, n in zip(traces, layout.lengths, strict=True)]
        )
        self._replay = self._routers.replay(whole, native=self._keep_native, **self._how)
        self._handle = self._replay.__enter__()

    def leave(self, error: ExcInfo) -> None:
        """Close the replay of the forward that ended, or that raised this error."""
        replay, handle, layout = self._replay, self._handle, self._layout
        self._replay = self._handle = self._layout = None
        if layout is None:
            return
        natives: list[Trace] = [None] * layout.samples
        if replay is not None and handle is not None:
            replay.__exit__(*error)
            first = self._total - len(self._waiting) - layout.samples
            self.dropped += [first + sample for sample in handle.dropped]
            if self._keep_native:
                natives = list(layout.split(handle.native()))
        if self._keep_native:
            pairs = zip(natives, self._without, strict=True)
            self.native += [None if without else trace for trace, without in pairs]

    def abandon(self) -> None:
        """Close a replay that a forward left open, as one does that was interrupted."""
        replay, self._replay, self._handle = self._replay, None, None
        if replay is not None:
            interrupted = RuntimeError("the forward did not end")
            replay.__exit__(type(interrupted), interrupted, None)

    def check_empty(self) -> None:
        """Raise RoutingError if traces are left over."""
        if self._waiting:
            raise RoutingError(
                f"{len(self._waiting)} of {self._total} traces were not used: the trainer's "
                f"{self.forwards} forwards fed {self._total - len(self._waiting)} samples"
            )

    def _fitted(self, trace: Trace, tokens: int) -> RoutingTrace:
        if trace is None:
            return missing_routes(self._routers, tokens)
        return fit(trace, tokens)


class _Layout(ABC):
    """The samples of one forward and the order of their tokens."""

    lengths: list[int]

    @property
    def samples(self) -> int:
        return len(self.lengths)

    @abstractmethod
    def trace(self, traces: Sequence[RoutingTrace]) -> RoutingTrace:
        """Return the trace of the forward, from its samples' traces."""

    @abstractmethod
    def split(self, trace: RoutingTrace) -> Sequence[RoutingTrace]:
        """Return each sample's rows of the forward's trace."""


class _Padded(_Layout):
    """Samples in rows [B, S] with padding on either side."""

    def __init__(self, attention_mask: Tensor) -> None:
        self._mask = attention_mask
        self.lengths = (attention_mask != 0).sum(1).tolist()

    def trace(self, traces: Sequence[RoutingTrace]) -> RoutingTrace:
        return pad_routes([trace.to(self._mask.device) for trace in traces], self._mask)

    def split(self, trace: RoutingTrace) -> Sequence[RoutingTrace]:
        return unpad_routes(trace, self._mask)


class _Packed(_Layout):
    """Samples one after the other in a row [1, T], where the positions restart."""

    def __init__(self, position_ids: Tensor) -> None:
        starts = (position_ids.reshape(-1) == 0).nonzero()[:, 0].tolist()
        self._bounds = [*starts, position_ids.numel()]
        self.lengths = [b - a for a, b in zip(self._bounds, self._bounds[1:], strict=False)]

    def trace(self, traces: Sequence[RoutingTrace]) -> RoutingTrace:
        return packed(traces, self.lengths)

    def split(self, trace: RoutingTrace) -> Sequence[RoutingTrace]:
        bounds = zip(self._bounds, self._bounds[1:], strict=False)
        return [trace.rows(first, last) for first, last in bounds]


def _has_routes(trace: Trace) -> bool:
    return trace is not None and bool(trace.valid.any())


def _layout_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Layout:
    """Return the layout of a forward, by its `input_ids`, `attention_mask` and `position_ids`."""
    if len(args) > 1:
        raise UsageError(
            f"a forward has {len(args)} arguments without a name; replay must know which is the "
            "mask: pass attention_mask=... and position_ids=..."
        )
    tokens = kwargs.get("input_ids")
    if tokens is None and args:
        tokens = args[0]
    if not isinstance(tokens, Tensor) or tokens.dim() != 2:
        raise UsageError(
            f"a forward has input_ids {describe_argument(tokens)}, expected a tensor [B, S]: "
            "replay must know which tokens are fed"
        )
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is None and isinstance(positions, Tensor) and len(tokens) == 1:
        return _Packed(positions)
    if mask is None:
        mask = torch.ones_like(tokens)
    if not isinstance(mask, Tensor) or mask.shape != tokens.shape:
        raise UsageError(
            f"a forward has attention_mask {describe_argument(mask)}, expected a tensor "
            f"{list(tokens.shape)}, as input_ids"
        )
    return _Padded(mask)


def _refuse_compiled(model: nn.Module) -> None:
    """Raise UsageError if torch.compile traces or will trace the model's forward with our hooks."""
    compiled = (
        hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None
    )
    if compiled or torch.compiler.is_compiling():
        raise UsageError(
            "the model is compiled, and hooks around a compiled forward cannot replay; attach "
            "onepolicy to the model without torch.compile (compile its layers instead, "
            "before or after)"
        )
