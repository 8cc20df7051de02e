"""Routing pressure: the embedded engine's routers choose other experts than they would.

A study needs a routing mismatch of a known size. The trainer's router selects by its weight W
[E, H]; a pressed router selects by W + D, D = scale * rms(row of W) * N(0, 1), and by default
weighs the selected experts by W. Then engine and trainer differ in their routes alone, and
replaying these (R3, arXiv:2510.11370) removes the difference. With kind = runner-up a token's
router takes the best expert that it left out, with a fixed probability (`runner_up.py`). No engine
does either: docs/evidence_tables.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from onepolicy.config import RoutingPressure, UsageError
from onepolicy.replay.layers import Router, find_routers, is_moe, moe_layers_of
from onepolicy.replay.selection import answer, groups_of, topk_operands
from onepolicy.replay.topk_hook import TopkHook, TopkRecorder
from onepolicy.rollout.hf.runner_up import FedTokens, RunnerUpRouter


def check_pressure(pressure: RoutingPressure, hf_config: Any) -> None:
    """Raise UsageError if a model of this transformers config cannot be pressed so.

    Needs no weights.
    """
    if not is_moe(hf_config):
        raise UsageError(
            f"rollout.pressure: {pressure.kind} needs a Mixture-of-Experts model, but "
            f"model_type={hf_config.model_type!r} has no routed experts; leave it out"
        )
    layers = moe_layers_of(hf_config)
    if layers is not None:
        _check_layers(pressure, layers)


def _check_layers(pressure: RoutingPressure, layers: Sequence[int]) -> None:
    wrong = [layer for layer in pressure.layers or () if layer not in layers]
    if wrong:
        raise UsageError(
            f"rollout.pressure.layers: {wrong} are no MoE layers of the model, which has them in "
            f"{sorted(set(layers))}"
        )


class Pressure:
    """The pressure on the routers of one model, which it changes for good."""

    def __init__(self, model: PreTrainedModel, settings: RoutingPressure) -> None:
        """Take over the forwards of the model's routers. `refresh` must come before a forward.

        Raises UsageError for a family whose routers cannot be pressed, or layers without experts.
        """
        self.settings = settings
        routers = find_routers(model)
        _check_layers(settings, [router.layer for router in routers])
        press: Callable[[Router], _PressedRouter | RunnerUpRouter]
        if settings.kind == "runner-up":
            press = partial(RunnerUpRouter, fed=FedTokens(model))
        else:
            press = partial(_PressedRouter, combine_weights=settings.weights)
        for router in routers:
            _check_answerable(router)
        self._pressed = {
            column: press(router)
            for column, router in enumerate(routers)
            if settings.layers is None or router.layer in settings.layers
        }
        self._drawn: int | None = None  # the version that was drawn for

    def refresh(self, version: int) -> None:
        """Press the routers with the weights that the model has now, which are of this version.

        What is drawn depends on (seed, version, router), with redraw = never on (seed, router).
        """
        if self.settings.redraw == "never":
            version = 0
        for column, router in self._pressed.items():
            if version != self._drawn:
                router.draw(self.settings.seed, version, column)
            router.refresh(self.settings.scale)
        self._drawn = version

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Let the routers choose without pressure inside the context."""
        for router in self._pressed.values():
            router.active = False
        try:
            yield
        finally:
            for router in self._pressed.values():
                router.active = True


class _PressedRouter:
    """A stand-in for one router's `forward`."""

    def __init__(self, router: Router, *, combine_weights: bool) -> None:
        """combine_weights: the combine weights come from the noisy weight too."""
        self.active = True
        self._owner, self._name = _weight_of(router)
        self._weight = self._owner.get_parameter(self._name)  # [E, H]
        self._noise = torch.empty(0)  # [E, H] float32
        self._noisy = self._weight  # [E, H] in its dtype
        self._combine_weights = combine_weights
        self._plain = router.module.forward
        self._recorder, self._answer = TopkRecorder(router), TopkAnswer(router)
        router.module.__dict__["forward"] = self.forward

    def draw(self, seed: int, version: int, column: int) -> None:
        """Draw N(0, 1) for every element of the weight, on the CPU: the same on every device."""
        state = np.random.SeedSequence([seed, version, column]).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(state[0]))
        self._noise = torch.randn(self._weight.shape, generator=generator).to(self._weight.device)

    @torch.no_grad()
    def refresh(self, scale: float) -> None:
        weight = self._weight.float()
        rms = weight.square().mean(1, keepdim=True).sqrt()
        noisy = (weight + scale * rms * self._noise).to(self._weight.dtype)
        self._noisy = nn.Parameter(noisy, requires_grad=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the router with the experts that its noisy weight selects.

        Around a plain router a recorder sees one selection, and it does so here: the noisy one.
        """
        if not self.active:
            return self._plain(*args, **kwargs)
        with self._noisy_weight():
            if self._combine_weights:
                return self._plain(*args, **kwargs)
            _, ids = self._recorder.observe(args, kwargs)
        return self._answer.run(ids, args, kwargs)

    @contextmanager
    def _noisy_weight(self) -> Iterator[None]:
        self._owner._parameters[self._name] = self._noisy
        try:
            yield
        finally:
            self._owner._parameters[self._name] = self._weight


class TopkAnswer(TopkHook):
    """A hook that answers one router's top-k with given experts, without running it.

    It has nothing of a replay's checks: the experts are those of another top-k of the same router.
    """

    def __init__(self, router: Router) -> None:
        super().__init__(router)
        self._ids = torch.empty(0)  # [N, K] int64 while the router runs
        self._selected = 0  # experts per token that this forward has selected

    def run(self, ids: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the router on these arguments with the experts `ids` [N, K] int64.

        The router gets `ids` itself, so that a recorder finds the same tensor in its output.
        """
        self._ids, self._selected = ids, 0
        try:
            with self:
                out = self.forward(*args, **kwargs)
        finally:
            self._ids = torch.empty(0, device="cpu")
        self._check_one_selection(self._selected)
        return out

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scores, k, width = topk_operands(self.router, func, args, kwargs)
        if k and width == self.router.num_experts:
            self._selected += k
            return answer(func, scores, self._ids)
        if k and width == self.router.num_groups:
            return answer(func, scores, groups_of(self._ids, self.router))
        return func(*args, **(kwargs or {}))


def _check_answerable(router: Router) -> None:
    if router.by_max:
        raise UsageError(
            f"rollout.pressure: {type(router.module).__name__} selects expert after expert with "
            "one max each, not with a top-k that can be answered; leave it out"
        )


def _weight_of(router: Router) -> tuple[nn.Module, str]:
    """Return the module and the name of the weight [E, H] that scores the experts."""
    found = [
        (module, name)
        for module in router.module.modules()
        for name, weight in module.named_parameters(recurse=False)
        if weight.dim() == 2 and len(weight) == router.num_experts
    ]
    if len(found) != 1:
        raise UsageError(
            f"rollout.pressure: {type(router.module).__name__} at {router.path!r} has {len(found)} "
            "weights with a row per expert, and noise needs one; leave it out"
        )
    return found[0]
