"""Replay in one thread and another model's activation checkpoints in a second thread do not affect
each other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable
from torch.utils import checkpoint as checkpoint_module
from torch.utils.checkpoint import (
    CheckpointFunction,
    checkpoint,
)  # by name, as some trainers import them

from onepolicy import bind_routers
from onepolicy.replay import Routers, RoutingError
from support.replay_models import build, random_trace, same_bits, take_grads, tokens


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return logits.log_softmax(-1).gather(-1, ids.roll(1, -1)[..., None]).mean()


def _step(model: nn.Module, routers: Routers | None, ids: Tensor, seed: int) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    if routers is None:
        _loss(model, ids).backward()
    else:
        trace = random_trace(21, routers.layers, routers.num_experts, routers.top_k, seed=seed)
        with routers.replay(trace, check=False):
            loss = _loss(model, ids)
        loss.backward()
    return take_grads(model)


def _beside(first, second, steps: int) -> list[int]:
    """Run both in threads of their own, `steps` times each and in lockstep. Return the wrong
    steps."""
    barrier = threading.Barrier(2)

    def many(step, expected) -> list[int]:
        wrong = []
        for number in range(steps):
            barrier.wait(120)
            if not same_bits(step(number % 4), expected[number % 4]):
                wrong.append(number)
        return wrong

    alone = [[step(seed) for seed in range(4)] for step in (first, second)]
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


@pytest.mark.parametrize("steps", [40, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("other", ["moe", "dense"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_checkpoints_of_another_thread_are_unaffected(
    reentrant: bool, other: str, steps: int
) -> None:
    """Both get the gradients that each gets alone, to the bit."""
    model, ids = build("qwen3_moe"), tokens()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    routers = bind_routers(model)
    if other == "moe":
        second = build("mixtral", seed=1)
        second.gradient_checkpointing_enable({"use_reentrant": reentrant})
        theirs = bind_routers(second)
        beside = lambda seed: _step(second, theirs if seed % 2 else None, ids, seed)  # noqa: E731
    else:
        beside = Dense(reentrant).step
    before = CheckpointFunction.forward, checkpoint_module._checkpoint_without_reentrant_generator
    assert _beside(lambda seed: _step(model, routers, ids, seed), beside, steps) == []
    assert before == (
        CheckpointFunction.forward,
        checkpoint_module._checkpoint_without_reentrant_generator,
    )
    assert not any("forward" in router.module.__dict__ for router in routers._routers)


@pytest.mark.parametrize(
    "checkpointed", [None, False, True], ids=["plain", "non_reentrant", "reentrant"]
)
def test_a_forward_in_another_thread_than_its_replay(checkpointed: bool | None) -> None:
    """This is right without checkpoints. With them its recompute would route natively, so it is
    refused."""
    model, ids = build("qwen3_moe"), tokens()
    routers = bind_routers(model)
    expected = _step(model, routers, ids, 5)
    model.zero_grad(set_to_none=True)
    if checkpointed is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointed})
    trace = random_trace(21, routers.layers, routers.num_experts, routers.top_k, seed=5)
    with ThreadPoolExecutor(1) as pool:
        if checkpointed is None:
            with routers.replay(trace, check=False):
                loss = pool.submit(_loss, model, ids).result()
            loss.backward()
            assert same_bits(take_grads(model), expected)
        else:
            words = "replayed in one thread and checkpointed in another"
            with pytest.raises(RoutingError, match=words), routers.replay(trace, check=False):
                pool.submit(_loss, model, ids).result()
    assert not any("forward" in router.module.__dict__ for router in routers._routers)


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
    model, ids = build(family), tokens()
    routers = bind_routers(model)
    expected = _step(model, routers, ids, 5)
    how(model)
    assert same_bits(_step(model, routers, ids, 5), expected)
