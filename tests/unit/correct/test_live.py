"""The correction inside the loss: gradient coefficients (B1), OPSM (B4), and the split of a
config."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from onepolicy.config import CorrectionConfig, UsageError
from onepolicy.config.correction import correction_presets
from onepolicy.correct.current_policy import live_weights
from onepolicy.correct.presets import preset
from onepolicy.correct.report import combine, report
from onepolicy.correct.weights import reweight

ONE = torch.ones(1, dtype=torch.bool)
LIVE = [name for name in correction_presets() if preset(name).live]


def ppo(new: Tensor, anchor: Tensor, advantage: float) -> Tensor:
    ratio = (new - anchor).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def coefficient(name: str, rho: float, advantage: float) -> float:
    """Return -dL/dlogp of one slot at theta = theta_old, in the preset's form."""
    config, old, rollout = preset(name), torch.tensor([-1.0]), torch.tensor([-1.0 - math.log(rho)])
    new = old.clone().requires_grad_()
    weight = reweight(old, rollout, ONE, config.fixed_part, segment=torch.zeros(1).long()).weight
    if (live := config.live_part) is not None:
        weight = (
            weight * live_weights(new, rollout, ONE, live, segment=torch.zeros(1).long()).weight
        )
    match config.surrogate:
        case "any":
            loss = weight * ppo(new, old, advantage)
        case "ppo":
            loss = weight * ppo(new, rollout, advantage)
        case "pg":
            loss = -weight * advantage * new
    loss.sum().backward()
    assert new.grad is not None
    return -float(new.grad)


@pytest.mark.parametrize(
    ("rho", "expected"),
    [
        (
            0.25,
            {
                "recompute": (1, -1),
                "vanilla-is": (0.25, -0.25),
                "tis": (0.25, -0.25),
                "ppo-is": (0.25, 0),
            },
        ),
        (0.25, {"icepop": (0, 0)}),
        (1.5, {"tis": (1.5, -1.5), "ppo-is": (0, -1.5), "icepop": (1.5, -1.5)}),
        (4, {"tis": (2, -2), "ppo-is": (0, -4), "icepop": (4, -4)}),
        (
            10,
            {
                "tis": (2, -2),
                "ppo-is": (0, -10),
                "icepop": (0, 0),
                "cispo-rollout": (5, -5),
                "pg-tis": (2, -2),
            },
        ),
    ],
)
def test_gradient_coefficients_b1(rho: float, expected: dict[str, tuple[float, float]]) -> None:
    """PPO-IS (slides: can break out of the trust region) is clipped before the first step, or
    unbounded. TIS never is."""
    for name, (positive, negative) in expected.items():
        assert coefficient(name, rho, 1.0) == pytest.approx(positive, abs=1e-5), name
        assert coefficient(name, rho, -1.0) == pytest.approx(negative, abs=1e-5), name


@pytest.mark.parametrize(
    ("rho", "advantage", "kept"), [(0.5, -1, False), (0.5, 1, True), (2.0, -1, True)]
)
def test_opsm_b4(rho: float, advantage: float, kept: bool) -> None:
    """Mean k1 is ln 2 = .693 > .5 at rho = 1/2."""
    gates = [{**preset("opsm").gates[0].model_dump(), "high": 0.5}]
    config = preset("opsm", gates=gates).live_part
    assert config is not None
    new = torch.full((3,), math.log(rho))
    slots = {"segment": torch.zeros(3).long(), "advantage": torch.full((3,), float(advantage))}
    assert (
        live_weights(new, torch.zeros(3), ONE.expand(3), config, **slots).keep.tolist()
        == [kept] * 3
    )


def test_dppo_rejects_only_moves_along_the_advantage() -> None:
    rollout, new = (
        torch.tensor([0.5, 0.5, 0.5, 0.5]).log(),
        torch.tensor([0.8, 0.8, 0.2, 0.2]).log(),
    )
    config = preset("dppo-tv").live_part
    assert config is not None
    live = live_weights(
        new, rollout, ONE.expand(4), config, advantage=torch.tensor([1.0, -1, 1, -1])
    )
    assert live.keep.tolist() == [False, True, True, False]
    assert live.weight.tolist() == pytest.approx([0, 1.6, 0.4, 0])
    assert not live.weight.requires_grad


@pytest.mark.parametrize("name", LIVE)
def test_live_presets_split_into_a_fixed_and_a_live_part(name: str) -> None:
    config = preset(name)
    with pytest.raises(
        UsageError, match=f"{name} needs the ratio of the policy that is being trained"
    ):
        reweight(torch.zeros(3), torch.zeros(3), ONE.expand(3), config)
    fixed, live = config.fixed_part, config.live_part
    assert not fixed.live
    assert live is not None
    assert live.ratio == "new/rollout"
    assert len(fixed.gates) + len(live.gates) == len(config.gates)
    with pytest.raises(UsageError, match="is for reweight; give its `live_part`"):
        live_weights(torch.zeros(3), torch.zeros(3), ONE.expand(3), preset("tis"))
    logp, segment = -torch.rand(6), torch.tensor([0, 0, 0, 1, 1, 1])
    same = live_weights(logp, logp, ONE.expand(6), live, segment=segment, advantage=torch.randn(6))
    assert (same.weight == 1).all()
    assert same.keep.all()


def test_an_old_weight_and_a_live_gate_are_evaluated_separately() -> None:
    """TRL's default pair has importance weights of the recomputed policy, and OPSM on the live
    one."""
    config = preset("opsm", weight={"level": "token", "high": 2.0})
    assert config.fixed_part == CorrectionConfig(weight=config.weight)
    assert config.live_part is not None
    assert config.live_part.weight.level == "none"
    assert preset("tis").live_part is None
    assert preset("tis").fixed_part is preset("tis") or preset("tis").fixed_part == preset("tis")


def test_sums_of_micro_batches_add_up_to_a_receipt() -> None:
    config = preset("dppo-tv").live_part
    assert config is not None
    rollout, new, advantage = -torch.rand(40) - 0.1, -torch.rand(40) - 0.1, torch.randn(40)
    mask = torch.rand(40) < 0.7
    parts = [
        live_weights(
            new[i : i + 10],
            rollout[i : i + 10],
            mask[i : i + 10],
            config,
            advantage=advantage[i : i + 10],
        )
        for i in range(0, 40, 10)
    ]
    whole = live_weights(new, rollout, mask, config, advantage=advantage)
    assert torch.equal(torch.cat([p.weight for p in parts]), whole.weight)
    assert report(config, combine(p.sums for p in parts)) == pytest.approx(
        report(config, whole.sums), rel=1e-9
    )
    nothing = live_weights(
        new, rollout, torch.zeros(40, dtype=torch.bool), config, advantage=advantage
    )
    assert nothing.weight.sum() == 0
    assert combine([whole.sums, nothing.sums]).slots == whole.sums.slots


def test_garbage_in_masked_slots_changes_neither_loss_nor_gradient() -> None:
    config = preset("pg-tis").live_part
    assert config is not None
    mask = torch.tensor([True, False, True])
    new = torch.tensor([-1.0, math.nan, -2.0], requires_grad=True)
    live = live_weights(new, torch.tensor([-1.0, math.inf, -1.0]), mask, config)
    (live.weight * torch.where(live.keep, new, 0.0)).sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([1, 0, math.exp(-1)])
