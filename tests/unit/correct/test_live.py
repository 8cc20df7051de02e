"""The correction inside the loss: coefficients (B1), OPSM (B4), the split of a config."""

import math

import pytest
import torch
from torch import Tensor

from onepolicy.config import CorrectionConfig, UsageError
from onepolicy.config.presets import correction_presets
from onepolicy.correct.current_policy import live_weights
from onepolicy.correct.presets import preset
from onepolicy.correct.report import combine, report
from onepolicy.correct.reweight import reweight

ON = torch.ones(9, dtype=torch.bool)
LIVE = [name for name in correction_presets() if preset(name).live]


def ppo(new: Tensor, anchor: Tensor, advantage: float) -> Tensor:
    ratio = (new - anchor).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def coefficient(name: str, rho: float, advantage: float) -> float:
    """Return -dL/dlogp of one slot at theta = theta_old, in the preset's form."""
    config, old, rollout = preset(name), torch.tensor([-2.0]), torch.tensor([-2.0 - math.log(rho)])
    new, segment = old.clone().requires_grad_(), torch.tensor([0])
    weight = reweight(old, rollout, ON[:1], config.fixed_part, segment=segment).weight
    if (live := config.live_part) is not None:
        weight = weight * live_weights(new, rollout, ON[:1], live, segment=segment).weight
    match config.surrogate:
        case "any":
            loss = weight * ppo(new, old, advantage)
        case "ppo":
            loss = weight * ppo(new, rollout, advantage)
        case "pg":
            loss = -weight * advantage * new
    loss.sum().backward()
    return -float(new.grad)


COEFFICIENTS = {  # rho -> coefficients at advantages 1 and -1
    0.25: {
        **{"recompute": (1, -1), "vanilla-is": (0.25, -0.25), "tis": (0.25, -0.25)},
        **{"ppo-is": (0.25, 0), "icepop": (0, 0)},
    },
    1.5: {"tis": (1.5, -1.5), "ppo-is": (0, -1.5), "icepop": (1.5, -1.5)},
    4: {"tis": (2, -2), "ppo-is": (0, -4), "icepop": (4, -4)},
    10: {
        **{"tis": (2, -2), "ppo-is": (0, -10), "icepop": (0, 0)},
        **{"cispo-rollout": (5, -5), "pg-tis": (2, -2)},
    },
}


def test_gradient_coefficients_b1(subtests) -> None:
    """PPO-IS is clipped before the first step, or unbounded. TIS never is."""
    for rho, expected in COEFFICIENTS.items():
        for name, both in expected.items():
            with subtests.test(name, rho=rho):
                found = [coefficient(name, rho, advantage) for advantage in (1.0, -1.0)]
                assert found == pytest.approx(both, abs=1e-5)


def test_opsm_b4() -> None:
    """Mean k1 is ln 2 = .693 > .5 at rho = 1/2."""
    gates = [{**preset("opsm").gates[0].model_dump(), "high": 0.5}]
    config = preset("opsm", gates=gates).live_part
    for rho, advantage, kept in ((0.5, -1.0, False), (0.5, 1.0, True), (2.0, -1.0, True)):
        new, zeros = torch.full((3,), math.log(rho)), torch.zeros(3)
        more = {"segment": zeros.long(), "advantage": torch.full((3,), advantage)}
        assert live_weights(new, zeros, ON[:3], config, **more).keep.tolist() == [kept] * 3


def test_dppo_rejects_only_moves_along_the_advantage() -> None:
    rollout, new = torch.tensor([[0.5, 0.5, 0.5, 0.5], [0.8, 0.8, 0.2, 0.2]]).log()
    advantage = torch.tensor([1.0, -1, 1, -1])
    live = live_weights(new, rollout, ON[:4], preset("dppo-tv").live_part, advantage=advantage)
    assert live.keep.tolist() == [False, True, True, False]
    assert live.weight.tolist() == pytest.approx([0, 1.6, 0.4, 0])
    assert not live.weight.requires_grad


def test_live_presets_split_into_a_fixed_and_a_live_part(subtests) -> None:
    zeros, logp, segment = torch.zeros(3), -torch.rand(6), torch.tensor([0, 0, 0, 1, 1, 1])
    for name in LIVE:
        with subtests.test(name):
            config = preset(name)
            words = f"{name} needs the ratio of the policy that is being trained"
            with pytest.raises(UsageError, match=words):
                reweight(zeros, zeros, ON[:3], config)
            fixed, live = config.fixed_part, config.live_part
            assert not fixed.live
            assert live.ratio == "new/rollout"
            assert len(fixed.gates) + len(live.gates) == len(config.gates)
            more = {"segment": segment, "advantage": torch.randn(6)}
            same = live_weights(logp, logp, ON[:6], live, **more)
            assert (same.weight == 1).all()
            assert same.keep.all()
    with pytest.raises(UsageError, match="is for reweight; give its `live_part`"):
        live_weights(zeros, zeros, ON[:3], preset("tis"))


def test_an_old_weight_and_a_live_gate_are_evaluated_separately() -> None:
    """TRL's default pair has weights of the recomputed policy, and OPSM on the live one."""
    config = preset("opsm", weight={"level": "token", "high": 2.0})
    assert config.fixed_part == CorrectionConfig(weight=config.weight)
    assert config.live_part.weight.level == "none"
    assert preset("tis").live_part is None
    assert preset("tis").fixed_part == preset("tis")


def test_sums_of_micro_batches_add_up_to_a_receipt() -> None:
    config = preset("dppo-tv").live_part
    fields = [-torch.rand(40) - 0.1, -torch.rand(40) - 0.1, torch.rand(40) < 0.7, torch.randn(40)]

    def weigh(new, rollout, mask, advantage):
        return live_weights(new, rollout, mask, config, advantage=advantage)

    whole = weigh(*fields)
    parts = [weigh(*(field[i : i + 10] for field in fields)) for i in range(0, 40, 10)]
    assert torch.equal(torch.cat([p.weight for p in parts]), whole.weight)
    found = report(config, combine(p.sums for p in parts))
    assert found == pytest.approx(report(config, whole.sums), rel=1e-9)
    fields[2] = torch.zeros(40, dtype=torch.bool)
    nothing = weigh(*fields)
    assert nothing.weight.sum() == 0
    assert combine([whole.sums, nothing.sums]).slots == whole.sums.slots


def test_garbage_in_masked_slots_changes_neither_loss_nor_gradient() -> None:
    config = preset("pg-tis").live_part
    mask = torch.tensor([True, False, True])
    new = torch.tensor([-1.0, math.nan, -2.0], requires_grad=True)
    live = live_weights(new, torch.tensor([-1.0, math.inf, -1.0]), mask, config)
    (live.weight * torch.where(live.keep, new, 0.0)).sum().backward()
    assert new.grad.tolist() == pytest.approx([1, 0, math.exp(-1)])
