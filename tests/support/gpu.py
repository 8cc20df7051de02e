"""Parts of tests that run on a CUDA device, and by the same code on the CPU."""

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from torch import Tensor

from onepolicy.cli.common import check_train_extra
from onepolicy.config import UsageError, resolve
from onepolicy.models.buckets import BucketedPacking
from onepolicy.models.prepare import prepare_for_training
from onepolicy.objective.loss import loss_weights, policy_loss
from onepolicy.replay.routers import bind_routers
from onepolicy.train.forward import SlotLayout, forward
from onepolicy.train.pack import pack
from onepolicy.types import Group
from support.learner_steps import BASE, random_sample
from support.models import MOE, make

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CUDA = [pytest.mark.gpu, NO_CUDA]
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]
LENGTHS = (20, 7, 31, 12)  # several buckets; longer and shorter than the sliding window of 8


def need_commands() -> None:
    """Skip a test of a command where torch or transformers are older than commands take."""
    try:
        check_train_extra()
    except UsageError as error:
        pytest.skip(f"this system's packages: {error}")


def waits(message: warnings.WarningMessage) -> bool:
    return "synchronizing CUDA operation" in str(message.message)


@contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """Raise RuntimeError where the host would wait for a CUDA device inside the context."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def counted_waits(device: torch.device) -> Iterator[list[str]]:
    """Yield a list that has, after the context, a line for each wait of the host for the device."""
    found: list[str] = []
    if device.type != "cuda":
        yield found
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found += [f"{each.filename}:{each.lineno}" for each in caught if waits(each)]


class TrainingStep:
    """Forward, loss and backward of a tiny model on a batch of random tokens.

    Values that a forward would read on the host are computed beforehand.
    """

    def __init__(
        self,
        family: str,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        autocast: torch.dtype | None = None,
    ) -> None:
        config = resolve(BASE, ["replay.mode=off", "objective.surrogate=pg"])  # no jump at a clip
        self.objective, self.autocast = config.objective, autocast
        self.model = make(family, dtype=dtype).to(device)
        prepare_for_training(self.model, device)
        self.routers = None
        if family in MOE:
            self.routers = bind_routers(self.model)
        generator = torch.Generator().manual_seed(0)
        samples = [random_sample(n + 1, (-1.0) ** n, generator) for n in LENGTHS]
        batch = pack([Group(0, tuple(dataclasses.replace(s, routing=None) for s in samples))])
        ones = torch.ones(batch.num_slots)
        batch = batch.replace(
            advantage=torch.where(batch.segment % 2 == 0, 1.0, -1.0),
            logp_old=torch.where(batch.trainable, -4.0, 0.0),
            weight=ones,
            keep=batch.trainable,
        )
        weights = loss_weights(batch, self.objective, max_tokens=64)
        slots = batch.trainable.nonzero()[:, 0].to(device)
        self.layout = SlotLayout(slots, BucketedPacking.of(batch.cu_seqlens, device))
        self.batch = batch.replace(loss_weight=weights).to(device)

    def routes(self):
        """Return the experts that the model chooses itself."""
        assert self.routers is not None
        with torch.no_grad(), self.routers.record() as tape:
            forward(self.model, self.batch, self.layout)
        return tape.trace()

    def replaying(self, routes) -> AbstractContextManager[object]:
        if routes is None:
            return nullcontext()
        assert self.routers is not None
        return self.routers.replay(routes, check=False)

    def run(self) -> Tensor:
        """Return the log-probabilities. Gradients are on the parameters afterwards."""
        scored = forward(self.model, self.batch, self.layout, autocast=self.autocast)
        old = self.batch.logp_old
        loss, _ = policy_loss(scored.logp, self.batch, config=self.objective, logp_behaviour=old)
        loss.backward()
        return scored.logp.detach()

    def gradients(self, routes=None) -> dict[str, Tensor]:
        """Return the gradients of one run, float32 on the CPU."""
        self.model.zero_grad()
        with self.replaying(routes):
            self.run()
        named = self.model.named_parameters()
        return {name: p.grad.float().cpu() for name, p in named if p.grad is not None}


def relative_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the norm of the difference of all gradients over that of the expected ones."""
    assert found.keys() == expected.keys()
    off = sum(float((found[name] - expected[name]).double().square().sum()) for name in expected)
    size = sum(float(gradient.double().square().sum()) for gradient in expected.values())
    return (off / size) ** 0.5
