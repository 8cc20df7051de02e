"""prime-rl's custom loss, called with its LossInputs.

Contract: prime-rl 0.8.0 at 559b447 (August 2026), whose trainer needs a GPU. With the path of a
checkout in PRIME_RL_CHECKOUT (and beartype, jaxtyping) prime-rl's own losses are compared too.
"""

import importlib
import math
import os
import sys
from itertools import product
from types import ModuleType, SimpleNamespace

import pytest
import torch

import onepolicy as op
from onepolicy.config import UsageError
from onepolicy.config.presets import correction_presets
from onepolicy.integrations import prime_rl
from onepolicy.integrations.core.advantages import needs_whole_step
from support.contracts import value_of

capability = pytest.mark.capability
CHECKOUT = os.environ.get("PRIME_RL_CHECKOUT")


def inputs(seed=0, length=12, **more):
    """Return one sample's inputs, with the fields of prime-rl's class."""
    random = torch.Generator().manual_seed(seed)
    logp = -0.05 - 2 * torch.rand(length, generator=random)
    new = (logp + 0.5 * torch.randn(length, generator=random)).clamp(max=-0.01)
    mask = torch.ones(length, dtype=torch.bool)
    mask[:3] = False
    mask[7] = False
    known = {
        "trainer_logprobs": new.requires_grad_(),
        "inference_logprobs": logp,
        "advantages": torch.randn(length, generator=random),
        "loss_mask": mask,
    }
    fields = dict.fromkeys(value_of("prime-rl", "loss inputs"))
    return SimpleNamespace(**(fields | known | more))


def gradient(given, **settings):
    given.trainer_logprobs.grad = None
    prime_rl.loss(given, **settings).loss.backward()
    return given.trainer_logprobs.grad


def test_the_loss_takes_and_gives_what_prime_rl_does():
    assert value_of("prime-rl", "custom loss is called") == [["inputs", "**"]]
    found = prime_rl.loss(inputs(), correction="tis")
    assert all(hasattr(found, name) for name in value_of("prime-rl", "loss outputs"))
    assert found.loss.dim() == 0


@capability("prime-rl", "live corrections", how="contract")
def test_dppo_tv_is_prime_rls_default_loss():
    """-A ratio on tokens whose probability has not moved further than 0.2 towards the advantage."""
    given = inputs(length=60)
    new, rollout, a = given.trainer_logprobs, given.inference_logprobs, given.advantages
    moved = (new.exp() - rollout.exp()).detach()
    bound = op.preset("dppo-tv").gates[0].high
    keep = given.loss_mask & ~torch.where(a > 0, moved > bound, moved < -bound)
    assert (given.loss_mask & ~keep).any()
    for kl_tau in (0.0, 0.001):
        squared = given.loss_mask * (new - rollout).square()
        expected = (keep * -a * (new - rollout).exp() + kl_tau * squared).sum()
        (by_hand,) = torch.autograd.grad(expected, new)
        torch.testing.assert_close(gradient(given, correction="dppo-tv", kl_tau=kl_tau), by_hand)


@capability("prime-rl", "fixed corrections", how="contract")
def test_fixed_corrections_weigh_as_the_library_does(subtests):
    for preset in ("tis", "icepop", "seq-tis", "geo-rs"):
        with subtests.test(preset=preset):
            given = inputs()
            sides = (given.trainer_logprobs.detach(), given.inference_logprobs, given.loss_mask)
            applied = op.reweight(*(side[None] for side in sides), op.preset(preset))
            found = gradient(given, correction=preset)
            torch.testing.assert_close(found, -applied.weight[0] * given.advantages)
            metrics = prime_rl.loss(given, correction=preset).metrics
            rejected = float(metrics["correction/rejected"].mean())
            assert rejected == pytest.approx(applied.report["correction/rejected"])


def test_ppo_is_clips_the_ratio_to_the_rollout():
    for clip in (0.2, 0.05):
        given = inputs()
        new, a = given.trainer_logprobs, given.advantages
        ratio = (new - given.inference_logprobs).exp()
        surrogate = torch.min(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
        (expected,) = torch.autograd.grad(-(given.loss_mask * surrogate).sum(), new)
        found = gradient(given, correction="ppo-is", clip_low=clip, clip_high=clip)
        torch.testing.assert_close(found, expected)


@capability("prime-rl", "preflight", how="contract")
def test_every_preset_trains_or_is_refused_by_name(subtests):
    for name in sorted(correction_presets()):
        given, config = inputs(), op.preset(name)
        with subtests.test(name=name):
            if needs_whole_step(config) or config.centering != "none":
                with pytest.raises(UsageError, match=f"one sample for {name}|score centering"):
                    prime_rl.loss(given, correction=name)
            else:
                found = gradient(given, correction=name)
                assert found.isfinite().all()
                assert not found[~given.loss_mask].any()


def test_a_name_that_is_none():
    with pytest.raises(UsageError, match=r"trainer\.loss\.kwargs"):
        prime_rl.loss(inputs(), correction="tsi")


@capability("prime-rl", "measured", how="contract")
def test_metrics_are_values_of_tokens():
    """prime-rl joins them over samples and ranks, so their mean is that of the tokens."""
    parts = [inputs(seed=seed, length=8 + seed) for seed in range(3)]
    rows = [prime_rl.loss(part).metrics["mismatch/k3"] for part in parts]
    old, rollout, mask = (
        torch.cat([getattr(part, name).detach() for part in parts])
        for name in ("trainer_logprobs", "inference_logprobs", "loss_mask")
    )
    found = op.mismatch(old, rollout, mask)
    assert float(torch.cat(rows).mean()) == pytest.approx(found.k3)


def test_weights_of_the_component_scale_the_tokens():
    given, half = inputs(), inputs(loss_weights=torch.full((12,), 0.5))
    expected = 0.5 * gradient(given, correction="tis")
    torch.testing.assert_close(gradient(half, correction="tis"), expected)


def test_a_sample_without_tokens_has_a_gradient_of_zero():
    """All ranks must run backward."""
    given = inputs(loss_mask=torch.zeros(12, dtype=torch.bool))
    assert not gradient(given, correction="tis").any()


def test_a_log_probability_that_is_not_finite_is_rejected(subtests):
    """A sample is no whole batch: in a short one a token is more than max_nonfinite allows."""
    for correction, value, length in product(["tis", "ppo-is"], [math.nan, -math.inf], [40, 9]):
        with subtests.test(correction=correction, value=value, length=length):
            given = inputs(length=length)
            given.inference_logprobs[5] = value
            found = gradient(given, correction=correction, kl_tau=0.1)
            assert found.isfinite().all()
            assert found[5] == 0


def test_a_token_that_is_not_finite_is_left_out_of_the_means():
    given = inputs(length=20)
    given.inference_logprobs[5] = math.nan
    metrics = prime_rl.loss(given, correction="tis").metrics
    kept = given.loss_mask.clone()
    kept[5] = False
    found = op.mismatch(given.trainer_logprobs.detach(), given.inference_logprobs, kept)
    assert float(metrics["mismatch/k3"].mean()) == pytest.approx(found.k3)
    assert float(metrics["mismatch/k1"].mean()) == pytest.approx(found.k1)
    assert len(metrics["mismatch/nonfinite"]) == given.loss_mask.sum()
    assert float(metrics["mismatch/nonfinite"].sum()) == 1


def compare_with_prime_rls_own_losses(monkeypatch):
    """Through its own setup and scaling, of several samples."""
    configs, utils = ModuleType("prime_rl.configs.trainer"), ModuleType("prime_rl.utils.utils")
    names = ("CustomLossConfig", "DefaultLossConfig", "IPOLossConfig", "LossConfig")
    for name in names:
        setattr(configs, name, type(name, (SimpleNamespace,), {}))
    utils.import_object = lambda path: getattr(
        importlib.import_module(path.rpartition(".")[0]), path.rpartition(".")[2]
    )
    for name in ("prime_rl", "prime_rl.configs", "prime_rl.utils"):
        package = ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, "prime_rl.configs.trainer", configs)
    monkeypatch.setitem(sys.modules, "prime_rl.utils.utils", utils)
    path = f"{CHECKOUT}/src/prime_rl/trainer/rl/loss.py"
    spec = importlib.util.spec_from_file_location("prime_rl_loss", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "prime_rl_loss", module)
    spec.loader.exec_module(module)
    bound = op.preset("dppo-tv").gates[0].high
    default = configs.DefaultLossConfig(
        dppo_mask_high=bound, dppo_mask_low=bound, adv_tau=1.0, kl_tau=0.001
    )
    custom = configs.CustomLossConfig(
        import_path="onepolicy.integrations.prime_rl.loss.loss",
        kwargs={"correction": "dppo-tv", "kl_tau": 0.001},
    )
    found = []
    for config in (default, custom):
        parts = [inputs(seed=seed, length=60) for seed in range(3)]
        fields = ("trainer_logprobs", "inference_logprobs", "advantages", "loss_mask")
        total, _ = module.compute_loss(
            **{field: [getattr(part, field) for part in parts] for field in fields},
            **dict.fromkeys(("ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights")),
            **{"rl_scale": 30, "ce_scale": 1, "ref_kl_scale": 1},
            rl_loss_fn=module.setup_rl_loss_fn(config),
        )
        total.backward()
        found.append(torch.cat([part.trainer_logprobs.grad for part in parts]))
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-8)


if CHECKOUT:
    test_prime_rls_own_losses = compare_with_prime_rls_own_losses
