"""Replay in one thread and another model's activation checkpoints in a second thread do not affect
each other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable
from torch.utils.checkpoint import CheckpointFunction, checkpoint  # as some trainers import them

from onepolicy import bind_routers
from onepolicy.replay import Routers, RoutingError
from support.replay_models import build, same_bits, take_grads, tokens
from support.replay_steps import checkpointed, loss, routes_of, torchs_checkpoints, untouched

IDS = tokens()


def _step(model: nn.Module, routers: Routers | None, seed: int) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    if routers is None:
        loss(model, IDS).backward()
    else:
        with routers.replay(routes_of(routers, seed=seed), check=False):
            found = loss(model, IDS)
        found.backward()
    return take_grads(model)


def _beside(first, second, steps: int) -> list[int]:
    """Run both in threads of their own, `steps` times each and in lockstep. Return the wrong
    steps."""
    barrier = threading.Barrier(2)

    def many(step, expected) -> list[int]:
        wrong = []
        for number in range(steps):
            barrier.wait(120)
            if not same_bits(step(number % 2), expected[number % 2]):
                wrong.append(number)
        return wrong

    alone = [[step(seed) for seed in range(2)] for step in (first, second)]
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(many, *pair) for pair in zip((first, second), alone, strict=True)]
        return [number for run in runs for number in run.result()]


class Dense(nn.Module):
    """A critic without replay, with checkpoints."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6))
        self.reentrant = reentrant

    def step(self, seed: int) -> dict[str, Tensor]:
        self.zero_grad(set_to_none=True)
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        x.square().mean().backward()
        return take_grads(self)


@pytest.mark.parametrize("steps", [4, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("other", ["moe", "dense"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_checkpoints_of_another_thread_are_unaffected(
    model, routers, reentrant: bool, other: str, steps: int
) -> None:
    """Both get the gradients that each gets alone, to the bit."""
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if other == "moe":
        second = build("mixtral", seed=1)
        second.gradient_checkpointing_enable({"use_reentrant": reentrant})
        theirs = bind_routers(second)
        beside = lambda seed: _step(second, theirs if seed % 2 else None, seed)  # noqa: E731
    else:
        beside = Dense(reentrant).step
    before = torchs_checkpoints()
    assert _beside(lambda seed: _step(model, routers, seed), beside, steps) == []
    assert torchs_checkpoints() == before
    assert untouched(model)


def test_a_forward_in_another_thread_than_its_replay(model, routers, subtests) -> None:
    """This is right without checkpoints. With them its recompute would route natively, so it is
    refused."""
    expected, trace = _step(model, routers, 5), routes_of(routers, seed=5)
    words = "replayed in one thread and checkpointed in another"
    with ThreadPoolExecutor(1) as pool:
        with subtests.test("without checkpoints"):
            with routers.replay(trace, check=False):
                found = pool.submit(loss, model, IDS).result()
            found.backward()
            assert same_bits(take_grads(model), expected)
        for reentrant in (False, True):
            with subtests.test(reentrant=reentrant), checkpointed(model, reentrant=reentrant):
                with pytest.raises(RoutingError, match=words), routers.replay(trace, check=False):
                    pool.submit(loss, model, IDS).result()
                assert untouched(model)


def _by_name(model: nn.Module) -> None:
    """Checkpoint every layer with the autograd function itself, imported before any replay."""
    for layer in model.model.layers:
        plain = layer.forward

        def forward(hidden: Tensor, *args, _plain=plain, **kwargs):
            return CheckpointFunction.apply(lambda x: _plain(x, *args, **kwargs), True, hidden)

        layer.forward = forward


def _composable(model: nn.Module) -> None:
    for layer in model.model.layers:
        composable(layer)


def _nested(model: nn.Module) -> None:
    """Put a checkpoint around each layer, and another around its MoE block."""
    for layer in model.model.layers:
        for module in (layer.mlp, layer):
            plain = module.forward

            def forward(hidden: Tensor, *args, _plain=plain, **kwargs):
                return checkpoint(lambda x: _plain(x, *args, **kwargs), hidden, use_reentrant=False)

            module.forward = forward


@pytest.mark.parametrize("how", [_by_name, _composable, _nested])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_every_kind_of_checkpoint_recomputes_with_its_own_routes(family: str, how) -> None:
    model = build(family)
    routers = bind_routers(model)
    expected = _step(model, routers, 5)
    how(model)
    assert same_bits(_step(model, routers, 5), expected)
