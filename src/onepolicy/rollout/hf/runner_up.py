"""Routing pressure that does not depend on how close a router's choice was.

With a fixed probability a router loses the last of the experts that it would choose, and takes the
runner-up in its place: the best of those that it left out. Whether it does depends on the token,
its position, the router and the seed, and not on the router's scores.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.config import UsageError
from onepolicy.replay.layers import Router
from onepolicy.replay.selection import topk_operands
from onepolicy.replay.topk_hook import TopkHook

LOW_32_BITS = 0xFFFFFFFF


class FedTokens:
    """The tokens of the model's running forward, and their positions."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.ids = self.positions = torch.empty(0, dtype=torch.int64)  # [N]
        model.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = dict(zip(("input_ids",), args, strict=False)) | kwargs
        ids: Tensor = named["input_ids"]  # [B, S]
        positions: Tensor | None = named.get("position_ids")
        if positions is None:
            first, cache = 0, named.get("past_key_values")
            if cache is not None:
                first = int(cache.get_seq_length())
            positions = torch.arange(first, first + ids.shape[1], device=ids.device)
        self.ids = ids.flatten().to(torch.int64)
        self.positions = positions.expand(ids.shape).flatten().to(torch.int64)


class RunnerUpRouter:
    """A stand-in for one router's `forward`, which takes the runner-up for some tokens."""

    def __init__(self, router: Router, fed: FedTokens) -> None:
        """Take over the router's forward.

        Raises UsageError for a router that leaves out no expert.
        """
        if router.top_k >= router.num_experts:
            raise UsageError(
                f"rollout.pressure: {type(router.module).__name__} selects all of its "
                f"{router.num_experts} experts and leaves out none; leave it out"
            )
        self.active = True
        self._plain = router.module.forward
        self._hook = _LosesLast(router)
        self._fed = fed
        self._keys = (1, 1, 0)
        self._probability = 0.0
        router.module.__dict__["forward"] = self.forward

    def draw(self, seed: int, version: int, column: int) -> None:
        """Draw which tokens lose an expert at which position."""
        state = np.random.SeedSequence([seed, version, column]).generate_state(3, np.uint64)
        first, second, third = (int(word) for word in state.view(np.int64))
        self._keys = (first, second, third)

    def refresh(self, probability: float) -> None:
        self._probability = probability

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the router with the runner-up for the tokens that were drawn.

        Around it a recorder sees one selection, the one that is made.
        """
        if not self.active:
            return self._plain(*args, **kwargs)
        drawn = uniform_of(self._keys, self._fed.positions, self._fed.ids) < self._probability
        return self._hook.run(drawn, args, kwargs)


class _LosesLast(TopkHook):
    """A hook that hides, for some tokens, the last of the experts that the router's top-k finds."""

    def __init__(self, router: Router) -> None:
        super().__init__(router)
        self._drawn = torch.empty(0, dtype=torch.bool)  # [N]
        self._selected = 0  # experts per token that this forward has selected

    def run(self, drawn: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the router on these arguments. drawn [N] bool: the tokens that get the runner-up."""
        self._drawn, self._selected = drawn, 0
        with self:
            out = self.forward(*args, **kwargs)
        self._check_one_selection(self._selected)
        return out

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scores, k, width = topk_operands(self.router, func, args, kwargs)
        if not (k and width == self.router.num_experts):
            return func(*args, **(kwargs or {}))
        self._selected += k
        last = scores.kthvalue(width - k + 1, dim=-1).indices[..., None]
        lost = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, last, True)
        lost &= self._drawn.to(scores.device).view(*scores.shape[:-1], 1)
        rest = {name: value for name, value in (kwargs or {}).items() if name != "input"}
        return func(scores.masked_fill(lost, float("-inf")), *args[1:], **rest)


def uniform_of(keys: tuple[int, int, int], positions: Tensor, ids: Tensor) -> Tensor:
    """Return a number in [0, 1) per token [N] float64, the same on every device.

    Multiply-shift hashing of pairs: with random keys a, b, c of 64 bits it is the upper half of
    (a * position + b * id + c) mod 2^64. Over the keys, two different pairs of 32 bits get
    independent numbers (Dietzfelbinger 1996, "Universal hashing and k-wise independent random
    variables via integer arithmetic without primes").
    """
    first, second, third = keys
    upper = ((first * positions + second * ids + third) >> 32) & LOW_32_BITS
    return upper.double() / 2**32
