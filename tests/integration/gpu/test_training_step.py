"""Forward, loss and backward on a device: no waits of the host, dtypes, gradients, recompute."""

import pytest
import torch

from support.gpu import TrainingStep, no_waits, relative_difference
from support.models import CONFIGS, MOE

PRECISIONS = {"bfloat16": {"dtype": torch.bfloat16}, "autocast": {"autocast": torch.bfloat16}}
TOLERANCE = 2e-2
"""Of gradients in bfloat16, whose numbers have 8 bits, with the routes of float32."""


@pytest.mark.full
@pytest.mark.parametrize("family", CONFIGS)
def test_the_host_never_waits_in_forward_and_backward(family, device):
    """A wait per layer would leave a GPU idle for as long as Python needs."""
    step = TrainingStep(family, device, dtype=torch.bfloat16)
    replayed = [None]
    if family in MOE:
        replayed.append(step.routes())
    for routes in replayed:
        step.gradients(routes)  # libraries load their kernels
        step.model.zero_grad()
        with step.replaying(routes), no_waits(device):
            step.run()
        assert all(p.grad is None or p.grad.isfinite().all() for p in step.model.parameters())


@pytest.mark.few(2)
@pytest.mark.parametrize("family", CONFIGS)
def test_gradients_in_bfloat16_are_those_of_float32(family, device, monkeypatch):
    """And the experts' grouped_mm, which has no kernel for float32 on a GPU, gets bfloat16. On the
    CPU our own function takes its place, but for experts with biases."""
    exact, routes = TrainingStep(family, device), None
    if family in MOE:
        routes = exact.routes()
    expected = exact.gradients(routes)
    real, seen = torch.nn.functional.grouped_mm, []

    def spy(rows, weight, **options):
        seen.append((rows.dtype, weight.dtype))
        return real(rows, weight, **options)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", spy)
    for precision, options in PRECISIONS.items():
        step = TrainingStep(family, device, **options)
        seen.clear()  # of what prepares the model
        found = step.gradients(routes)
        if device.type == "cuda" and family in MOE:
            assert set(seen) == {(torch.bfloat16, torch.bfloat16)}, precision
        assert relative_difference(found, expected) < TOLERANCE, precision


@pytest.mark.full
@pytest.mark.parametrize("family", CONFIGS)
def test_gradients_are_those_of_the_cpu(family, device):
    on_cpu = TrainingStep(family, torch.device("cpu"))
    routes = None
    if family in MOE:
        routes = on_cpu.routes()
    expected = on_cpu.gradients(routes)
    there = TrainingStep(family, device)
    if routes is not None:
        routes = routes.to(device)
    assert relative_difference(there.gradients(routes), expected) < 1e-4


@pytest.mark.parametrize("family", CONFIGS)
def test_recomputed_activations_change_no_gradient(family, device):
    """A layer that is recomputed in the backward replays the routes of its forward."""
    step = TrainingStep(family, device)
    routes = None
    if family in MOE:
        routes = step.routes()
        routes.ids[:, 0] = routes.ids[:, 0].flip(0)  # other experts than the model's own
    expected = step.gradients(routes)
    step.model.train()
    step.model.gradient_checkpointing_enable({"use_reentrant": False})
    found = step.gradients(routes)
    assert relative_difference(found, expected) < 1e-6
