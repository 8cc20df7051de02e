"""verl's FSDP engine (FSDP1 and FSDP2), with the rollout's routes replayed.

`VERL_ENGINE_VENDOR=onepolicy` chooses it. It replays whatever micro-batch carries `routed_experts`,
in scoring and in the update. A reference policy routes every token itself: the separate one
(`forward_only`), and the actor while its LoRA adapters are off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from verl.utils.metric import AggregationType, Metric
from verl.utils.ulysses import get_ulysses_sequence_parallel_rank
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead

from onepolicy.config import UsageError
from onepolicy.integrations.verl import VENDOR
from onepolicy.integrations.verl.metrics import replay_sums
from onepolicy.integrations.verl.routes import (
    NATIVE_ROUTES,
    ROUTES,
    MicroBatchRoutes,
    read_routes,
)
from onepolicy.replay.checks import RoutingError, refuse_router_loss
from onepolicy.replay.contexts import ReplayHandle
from onepolicy.replay.routers import Routers, bind_routers

BACKENDS = ["fsdp", "fsdp2"]
DEVICES = ["cuda", "npu"]


class ReplayingFSDPEngine(FSDPEngineWithLMHead):
    """verl's FSDP engine for language models, with replay.

    Attributes:
        routers: the model's routers; None until the model is built, and for a dense one.
        expects_routes: whether a micro-batch without routes is an error. onepolicy's trainer sets
            it. Without that trainer the first micro-batch decides.
        keeps_native: whether scoring returns the routers' own choice, for dumps.
        has_replayed: whether a sample had routes. Until then, samples without are the engine's
            fault; later, verl's or the agent loop's.
    """

    routers: Routers | None = None
    expects_routes: bool | None = None
    keeps_native: bool = False
    has_replayed: bool = False
    _unbound: Exception | None = None  # the reason why there are no routers
    _adapters_off: bool = False
    _forward: _Forward | None = None  # the forward that runs

    def _build_fsdp_module(self, module: nn.Module) -> Any:
        # LoRA has replaced linear layers before, and FSDP1 is about to flatten parameters.
        try:
            self.routers = bind_routers(module)
        except (UsageError, RoutingError) as error:  # raised once routes arrive
            self._unbound = error
        return super()._build_fsdp_module(module)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Switch LoRA off. The policy is then the reference."""
        self._adapters_off = True
        try:
            with super().disable_adapter():
                yield
        finally:
            self._adapters_off = False

    @property
    def _is_reference(self) -> bool:
        return self._adapters_off or bool(self.engine_config.forward_only)

    def bound_routers(self) -> Routers:
        """Return the model's routers.

        Raises:
            UsageError: the model has none that can be replayed, or its config asks for a router
                loss.
        """
        if self.routers is None:
            raise UsageError(
                "verl: the batch has the rollout's routes, but the model's routers cannot replay "
                f"them: {self._unbound}"
            )
        refuse_router_loss(self.routers.model.config)
        return self.routers

    def forward_step(
        self, micro_batch: Any, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        """Run verl's forward and loss, with the replay open in between.

        Raises:
            RoutingError: routes were expected and none came, or they are not of this forward.
        """
        with ExitStack() as stack:
            self._forward = _Forward(stack, keep_native=self.keeps_native or not forward_only)
            try:
                loss, output = super().forward_step(micro_batch, loss_function, forward_only)
                forward = self._forward
            finally:
                self._forward = None
        if forward_only and self.keeps_native and not self._is_reference:
            native = forward.native_routes(self.bound_routers(), micro_batch)
            output["model_output"][NATIVE_ROUTES] = native
        elif not forward_only and self.expects_routes:
            output["metrics"] |= {
                name: Metric(AggregationType.SUM, value) for name, value in forward.sums().items()
            }
        return loss, output

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Prepare verl's inputs, and open the replay of their routes."""
        inputs, arguments = super().prepare_model_inputs(micro_batch)
        if self._forward is not None and self._replays(micro_batch):
            routes = read_routes(self.bound_routers(), micro_batch)
            rank = 0
            if self.use_ulysses_sp:
                rank = get_ulysses_sequence_parallel_rank()
            self._forward.open(
                self.bound_routers(),
                routes,
                inputs,
                arguments.get("pad_size", 0),
                has_replayed=self.has_replayed,
                rank=rank,
                ranks=self.ulysses_sequence_parallel_size,
            )
            self.has_replayed |= self._forward.replays
        return inputs, arguments

    def _replays(self, micro_batch: Any) -> bool:
        """Return whether this micro-batch is replayed.

        Raises:
            RoutingError: its routes are missing.
        """
        if self._is_reference:
            return False
        found = ROUTES in set(micro_batch.keys())
        if self.expects_routes is None:
            self.expects_routes = found
        if self.expects_routes and not found:
            raise RoutingError(
                "verl: this micro-batch has no field routed_experts, so it would be routed "
                "natively while others are replayed. The rollout, the agent loop or a custom "
                "sampler dropped it; keep the field, or set "
                "actor_rollout_ref.rollout.enable_rollout_routing_replay=false"
            )
        return found


class _Forward:
    """The routes of one forward, and its replay."""

    def __init__(self, stack: ExitStack, *, keep_native: bool) -> None:
        self._stack, self._keep_native = stack, keep_native
        self._handle: ReplayHandle | None = None
        self._routes: MicroBatchRoutes | None = None
        self._mask: Tensor | None = None

    def open(
        self,
        routers: Routers,
        routes: MicroBatchRoutes,
        inputs: dict[str, Any],
        pad_size: int,
        *,
        has_replayed: bool,
        rank: int,
        ranks: int,
    ) -> None:
        """Open the replay of the forward with these inputs.

        A micro-batch of synthetic samples alone is routed natively, and so are the part of a rank
        that holds padding only and, once others have had routes, samples that lack them.

        Raises:
            RoutingError: no trained sample has a route, nor had any before.
        """
        self._routes, self._mask = routes, inputs["attention_mask"]
        if routes.missing and routes.missing == sum(routes.trained) and not has_replayed:
            raise RoutingError(
                f"verl: routed_experts is all zeros in all {routes.missing} trained samples of "
                "this micro-batch: the rollout returned no routes. Check its engine with "
                "`onepolicy engine check`"
            )
        trace = routes.laid_out(self._mask, pad_size, rank=rank, ranks=ranks)
        if trace.valid.any():
            trace = trace.to(inputs["input_ids"].device)
            replay = routers.replay(trace, native=self._keep_native)
            self._handle = self._stack.enter_context(replay)

    @property
    def replays(self) -> bool:
        return self._handle is not None

    def sums(self) -> dict[str, float]:
        """Return the sums of this forward's metrics. Every rank and micro-batch has all of them."""
        if self._routes is None:
            return replay_sums(None, None, samples=0, missing=0, rows=0)
        trace = native = None
        if self._handle is not None:
            trace, native = self._handle.trace, self._handle.native()
        return replay_sums(
            trace,
            native,
            samples=sum(self._routes.trained),
            missing=self._routes.missing,
            rows=self._routes.rows,
        )

    def native_routes(self, routers: Routers, micro_batch: Any) -> Tensor:
        """Return the routers' own choice, nested [B, tokens, layers, K] int16; -1 if unknown."""
        offsets = micro_batch["input_ids"].offsets()
        shape = int(offsets[-1]), len(routers.layers), routers.top_k
        ids = torch.full(shape, -1, dtype=torch.int16)
        if self._handle is not None and self._routes is not None:
            parts = self._routes.split(self._handle.native(), self._mask)
            ids = torch.cat([part.ids.to(torch.int16) for part in parts])
        return torch.nested.nested_tensor_from_jagged(ids.to(offsets.device), offsets)


def register(devices: list[str] = DEVICES) -> None:
    """Register the engine with verl under the vendor `onepolicy`, once."""
    known = EngineRegistry._engines.get("language_model", {}).get(BACKENDS[0], {})
    missing = [device for device in devices if (device, VENDOR) not in known]
    if missing:
        EngineRegistry.register("language_model", BACKENDS, missing, VENDOR)(ReplayingFSDPEngine)


register()
