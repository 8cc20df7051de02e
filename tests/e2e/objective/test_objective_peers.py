"""Our objectives beside TRL's and verl's own code: the same loss and the same gradient in every
slot.

Where we differ on purpose, the test asserts the difference and gives the reason, so that a change
on their side is noticed.
"""

from __future__ import annotations

import subprocess
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor

from onepolicy.config import ObjectiveConfig
from onepolicy.config.objective import KLConfig
from onepolicy.objective.advantages import apply_group_baseline, compute_advantages
from onepolicy.objective.gae import value_loss
from onepolicy.objective.kl import kl_estimate
from onepolicy.objective.loss import loss_weights, policy_loss
from onepolicy.types import TokenBatch
from support.oracle.venv import PYTHON, SCRIPTS

ROWS, LENGTH = 9, 12
Peers: TypeAlias = dict[str, np.ndarray]

pytestmark = [pytest.mark.oracle, pytest.mark.process, pytest.mark.timeout(600)]


def given() -> dict[str, Tensor]:
    """Return 9 sequences of up to 12 tokens, right-padded, in groups of 4, 4 and 1. Ratios are up
    to a factor of 2."""
    g = torch.Generator().manual_seed(5)

    def near(logp: Tensor, by: float) -> Tensor:
        return (logp + torch.randn(ROWS, LENGTH, generator=g) * by).clamp(max=-0.01)

    old = -torch.rand(ROWS, LENGTH, generator=g) * 3 - 0.5
    return {
        "old": old,
        "new": near(old, 0.3),
        "reference": near(old, 0.4),
        "mask": torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (ROWS, 1), generator=g),
        "advantage": torch.randn(ROWS, generator=g),
        "weight": torch.rand(ROWS, LENGTH, generator=g) * 2,
        "value": torch.randn(ROWS, LENGTH, generator=g),
        "score": torch.rand(ROWS, generator=g),
        "group": torch.arange(ROWS) // 4,
    }


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Peers:
    assert PYTHON.exists(), "the oracle venv is missing; `make test-oracle` builds it"
    folder = tmp_path_factory.mktemp("oracle")
    np.savez(folder / "in.npz", **{name: value.numpy() for name, value in given().items()})
    command = [PYTHON, SCRIPTS / "objective_peers.py", folder / "in.npz", folder / "out.npz"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(np.load(folder / "out.npz"))


def packed() -> TokenBatch:
    """Return the same sequences without padding between them: the rows of the mask, one after the
    other."""
    x = given()
    slots, zeros = ROWS * LENGTH, torch.zeros(ROWS * LENGTH, dtype=torch.int64)
    mask = x["mask"].flatten()
    return TokenBatch(
        input_ids=zeros,
        target_ids=zeros,
        positions=zeros,
        cu_seqlens=torch.arange(0, slots + 1, LENGTH, dtype=torch.int32),
        segment=torch.arange(ROWS).repeat_interleave(LENGTH),
        trainable=mask,
        version=zeros.int(),
        turn=zeros.int(),
        logp_rollout=torch.zeros(slots),
        temperature=torch.ones(ROWS),
        outcome=x["advantage"],
        group=x["group"],
        logp_old=x["old"].flatten(),
        logp_ref=x["reference"].flatten(),
        advantage=x["advantage"].repeat_interleave(LENGTH),
        weight=torch.ones(slots),
        keep=mask,
    )


def ours(config: ObjectiveConfig, *, weighted: bool = False) -> tuple[Tensor, Tensor]:
    """Return loss and gradient [ROWS, LENGTH]."""
    batch = packed()
    if weighted:
        batch = batch.replace(weight=given()["weight"].flatten())
    leaf = given()["new"].requires_grad_()
    loss_weight = loss_weights(batch, config, max_tokens=LENGTH)
    batch, old = batch.replace(loss_weight=loss_weight), batch.logp_old
    loss, _ = policy_loss(leaf.flatten(), batch, config=config, logp_behaviour=old)
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def assert_same(found: tuple[Tensor, Tensor], peers: Peers, name: str) -> None:
    loss, grad = (torch.from_numpy(peers[f"{name}/{each}"]) for each in ("loss", "grad"))
    torch.testing.assert_close(found[0], loss, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(found[1], grad, rtol=2e-4, atol=1e-7)


SEQUENCES = "sequence-mean-token-mean"
TRL: dict[str, dict[str, Any]] = {
    "grpo": {"clip_high": 0.2, "reduction": SEQUENCES},
    "bnpo": {"clip_high": 0.2},
    "dr_grpo": {"preset": "dr-grpo"},
    "dapo": {},
    "cispo": {"preset": "cispo", "clip_high": 0.5},  # TRL's epsilon_high = 1.5 is the bound itself
    "sapo": {"preset": "sapo"},
    "gspo": {"preset": "gspo", "clip_low": 0.05, "clip_high": 0.1},
    "delta": {"clip_high": 0.2, "dual_clip": 1.5},
    "kl": {"clip_high": 0.2, "kl": {"coef": 0.3, "importance": "old"}},
    "plain kl": {"clip_high": 0.2, "kl": {"coef": 0.3}},
    "weights": {"clip_high": 0.2},
}


def test_losses_as_trl(peers: Peers, subtests: pytest.Subtests) -> None:
    for name, settings in TRL.items():
        with subtests.test(name):
            config = ObjectiveConfig.model_validate(settings)
            assert_same(ours(config, weighted=name == "weights"), peers, f"trl/{name}")


CLIP = {"clip_low": 0.1, "clip_high": 0.15}
VANILLA = {**CLIP, "dual_clip": 3.0}  # verl's is always on
VERL: dict[str, dict[str, Any]] = {
    "vanilla": VANILLA,
    "vanilla seq-mean-token-mean": {**VANILLA, "reduction": SEQUENCES},
    "vanilla seq-mean-token-sum": {**VANILLA, "reduction": "sequence-mean-token-sum"},
    "vanilla seq-mean-token-sum-norm": {**VANILLA, "reduction": "sequence-mean-token-constant"},
    "gspo": {"preset": "gspo", **CLIP, "ratio_level": "sequence-token"},
    "sapo": {"preset": "sapo"},
    "cispo": {"surrogate": "cispo", **CLIP},
    # verl clips log r to [-.1, .15]
    "geo_mean": {
        "preset": "gmpo",
        "clip_low": 1 - float(np.exp(-0.1)),
        "clip_high": float(np.exp(0.15)) - 1,
    },
}


def test_losses_as_verl(peers: Peers, subtests: pytest.Subtests) -> None:
    for name, weighted in product(VERL, (False, True)):
        if (name, weighted) == ("geo_mean", True):
            continue  # below
        with subtests.test(name, weighted=weighted):
            found = ours(ObjectiveConfig.model_validate(VERL[name]), weighted=weighted)
            assert_same(found, peers, f"verl/{name}" + weighted * " weighted")


def test_gmpo_takes_the_mean_of_a_samples_weights(peers: Peers) -> None:
    """verl takes the geometric mean of a sample's weights, which one zero weight makes zero. We
    take their mean.

    A zero weight is a rejected slot, and rejecting one slot is not rejecting the sample.
    """
    found = ours(ObjectiveConfig.model_validate(VERL["geo_mean"]), weighted=True)[1]
    plain, theirs = (
        torch.from_numpy(peers[f"verl/geo_mean{suffix}/grad"]) for suffix in ("", " weighted")
    )
    mask, weight = given()["mask"], given()["weight"]
    mean = (weight * mask).sum(1) / mask.sum(1)
    geometric = ((weight.log() * mask).sum(1) / mask.sum(1)).exp()
    torch.testing.assert_close(found, plain * mean[:, None], rtol=2e-4, atol=1e-7)
    torch.testing.assert_close(theirs, plain * geometric[:, None], rtol=2e-4, atol=1e-7)


def test_value_loss_as_verl(peers: Peers) -> None:
    x = given()
    leaf = x["old"].requires_grad_()
    loss, _ = value_loss(leaf, x["value"], x["reference"], clip=0.2)
    total = loss[x["mask"]].mean()
    total.backward()
    assert leaf.grad is not None
    assert_same((total.detach(), leaf.grad), peers, "verl/value")


def test_kl_estimates_as_verl(peers: Peers, subtests: pytest.Subtests) -> None:
    for estimator in ("k1", "k2", "k3"):
        with subtests.test(estimator):
            settings = {"coef": 1, "where": "reward", "estimator": estimator}
            config = KLConfig.model_validate(settings)
            found = kl_estimate(given()["new"], given()["reference"], config)
            theirs = torch.from_numpy(peers[f"verl/{estimator}"])
            torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-6)


ADVANTAGES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr-grpo": {"normalise": "none"},
    "rloo": {"preset": "rloo"},
    "reinforce++-baseline": {"preset": "reinforce++-baseline"},
    "reinforce++": {"preset": "reinforce++", "gamma": 0.9},
    "gae": {"preset": "ppo", "gamma": 0.9, "lam": 0.8},
}
ALONE = slice(8, 9)  # the sample that is alone in its group


def advantages(config: ObjectiveConfig) -> TokenBatch:
    x = given()
    score = apply_group_baseline(x["score"].double(), x["group"], config).float()
    batch = packed().replace(outcome=score, value=x["value"].flatten())
    return compute_advantages(batch.select(list(range(ROWS))), config)


def test_advantages_as_verl(peers: Peers, subtests: pytest.Subtests) -> None:
    mask = given()["mask"]
    for name, settings in ADVANTAGES.items():
        with subtests.test(name):
            config = ObjectiveConfig.model_validate(settings)
            found = advantages(config)
            assert found.advantage is not None
            mine = found.advantage.reshape(ROWS, LENGTH)
            theirs = torch.where(mask, torch.from_numpy(peers[f"verl/{name}"]), 0.0)
            if config.normalise == "global" and config.baseline in ("group", "leave-one-out"):
                # the sample alone is in everybody's mean: see below
                assert not torch.allclose(mine, theirs, atol=1e-3)
                continue
            rows = 8 if config.baseline in ("group", "leave-one-out") else ROWS
            torch.testing.assert_close(mine[:rows], theirs[:rows], rtol=1e-4, atol=1e-5)
            if name == "gae":
                assert found.value_target is not None
                returns = torch.where(mask, torch.from_numpy(peers["verl/returns"]), 0.0)
                target = found.value_target.reshape(ROWS, LENGTH)
                torch.testing.assert_close(target, returns, rtol=1e-4, atol=1e-5)


def test_a_sample_without_siblings_has_no_advantage(
    peers: Peers, subtests: pytest.Subtests
) -> None:
    """verl takes 0 as its baseline, so its raw reward is its advantage: it is reinforced for being
    alone. Ours is 0."""
    expected = given()["score"][ALONE, None] * given()["mask"][ALONE]
    for name in ("grpo", "dr-grpo", "rloo"):
        with subtests.test(name):
            found = advantages(ObjectiveConfig.model_validate(ADVANTAGES[name])).advantage
            assert found is not None
            assert (found.reshape(ROWS, LENGTH)[ALONE] == 0).all()
            theirs = torch.from_numpy(peers[f"verl/{name}"])[ALONE]
            torch.testing.assert_close(theirs, expected, rtol=1e-4, atol=1e-6)
