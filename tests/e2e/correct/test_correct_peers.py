"""Our corrections beside the peers' own code, which runs in a venv of its own (`make test` builds
it).

Where we differ on purpose, the test asserts the difference and gives the reason, so that a change
on their side is noticed.
"""

from __future__ import annotations

import math
import subprocess

import numpy as np
import pytest
import torch
from torch import Tensor

from onepolicy.config import CorrectionConfig
from onepolicy.correct.current_policy import live_weights
from onepolicy.correct.presets import preset
from onepolicy.correct.weights import Applied, reweight
from onepolicy.divergence.logprob import mismatch
from support.oracle.venv import PYTHON, SCRIPTS

B3 = torch.tensor([0.3, 0.6, 1, 1.3, 1.9, 3])

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(600)]


def batch() -> dict[str, Tensor]:
    """Return 16 sequences of up to 24 tokens, right-padded, with small to large mismatch. No value
    is near a bound."""
    g = torch.Generator().manual_seed(3)
    rollout = -torch.rand(16, 24, generator=g) * 4 - 0.05
    old = rollout + torch.randn(16, 24, generator=g) * torch.linspace(0.02, 0.8, 16)[:, None]
    mask = torch.arange(24) < torch.randint(3, 25, (16, 1), generator=g)
    return {
        "old": old.clamp(max=-0.01),
        "rollout": rollout,
        "mask": mask,
        "advantage": torch.randn(16, generator=g),
    }


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    assert PYTHON.exists(), "the oracle venv is missing; `make test` builds it"
    folder = tmp_path_factory.mktemp("oracle")
    np.savez(
        folder / "in.npz", b3=B3.numpy(), **{name: value.numpy() for name, value in batch().items()}
    )
    command = [PYTHON, SCRIPTS / "peers.py", folder / "in.npz", folder / "out.npz"]
    subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)
    return dict(np.load(folder / "out.npz"))


def ours(config: CorrectionConfig) -> Applied[Tensor]:
    given = batch()
    return reweight(given["old"], given["rollout"], given["mask"], config)


def gate(statistic: str, *how: str, **bounds: float) -> CorrectionConfig:
    gate = {
        "statistic": statistic,
        **dict(zip(("aggregate", "scope"), how, strict=False)),
        **bounds,
    }
    return CorrectionConfig.model_validate({"gates": [gate]})


SEQUENCE = ("mean", "sequence")
VERL_WEIGHTS = {
    "token 2": preset("tis"),
    "token 0.5_5": preset("icepop"),
    "sequence 2": preset("seq-tis"),
    "sequence 0.5_2": preset("seq-tis", weight={"low": 0.5, "outside": "zero"}),
    "token 2 normalised": preset("tis", normalise="self"),
}
VERL_GATES = {
    "token_k1 0.5_2.0": gate("ratio", low=0.5, high=2.0),
    "token_k2 0.02": gate("k2", high=0.02),
    "token_k3 0.02": gate("k3", high=0.02),
    "seq_sum_k1 0.5_2.0": gate("ratio", "sum", "sequence", low=0.5, high=2.0),
    "seq_mean_k1 0.9_1.1111111111": gate("ratio", *SEQUENCE, low=0.9, high=1 / 0.9),
    "seq_mean_k3 0.02": gate("k3", *SEQUENCE, high=0.02),
    "seq_max_k2 0.1": gate("k2", "max", "sequence", high=0.1),
    "seq_max_k3 0.1": gate("k3", "max", "sequence", high=0.1),
}


@pytest.mark.parametrize("name", VERL_WEIGHTS)
def test_weights_as_verl(peers: dict[str, np.ndarray], name: str) -> None:
    applied = ours(VERL_WEIGHTS[name])
    np.testing.assert_allclose(applied.weight.numpy(), peers[f"verl/{name}/weight"], rtol=1e-5)
    assert 0 < applied.weight.count_nonzero() <= applied.denominator


@pytest.mark.parametrize("name", VERL_GATES)
def test_gates_as_verl(peers: dict[str, np.ndarray], name: str) -> None:
    keep = ours(VERL_GATES[name]).keep
    np.testing.assert_array_equal(keep.numpy(), peers[f"verl/{name}/keep"].astype(bool))
    assert 0 < keep.sum() < batch()["mask"].sum(), "the case decides nothing"


def test_diagnostics_as_verl(peers: dict[str, np.ndarray]) -> None:
    given = batch()
    segment = torch.arange(16)[:, None].expand(16, 24)
    found = mismatch(given["old"], given["rollout"], given["mask"], segment=segment)
    k3, chi2, k1, ppl_ratio = peers["verl/metrics"]
    assert (found.k3, found.chi2, found.k1) == pytest.approx((k3, chi2, k1), rel=1e-4)
    assert found.ppl_ratio == pytest.approx(ppl_ratio, rel=1e-4)


def test_verl_inverts_bounds_that_are_not_reciprocal(peers: dict[str, np.ndarray]) -> None:
    """B3: verl compares -log rho with the logs of bounds for rho (verl pull request 6377, closed
    unmerged)."""
    config = gate("ratio", low=0.6, high=1.4)
    keep = reweight(B3.log(), torch.zeros(6), torch.ones(6, dtype=torch.bool), config).keep
    assert B3[keep].tolist() == pytest.approx([0.6, 1, 1.3])
    assert B3[torch.from_numpy(peers["verl/b3/keep"][0]) > 0].tolist() == pytest.approx([1, 1.3])


def test_verl_normalises_before_it_rejects(peers: dict[str, np.ndarray]) -> None:
    """Self-normalised sampling divides by the weights that are used. Ours average 1 over the
    original count."""
    k3 = gate("k3", *SEQUENCE, high=0.02).gates
    config = preset("tis", normalise="self").model_copy(update={"gates": k3})
    applied = ours(config)
    assert applied.weight.sum() / applied.denominator == pytest.approx(1, rel=1e-5)
    name = "verl/token 2 normalised, seq_mean_k3"
    theirs = peers[f"{name}/weight"] * peers[f"{name}/keep"]
    np.testing.assert_array_equal(theirs > 0, applied.keep.numpy())
    assert theirs.sum() / applied.denominator < 0.9


def opsm(new: Tensor) -> list[bool]:
    given = batch()
    config = preset(
        "opsm", gates=[{**preset("opsm").gates[0].model_dump(), "high": 0.01}]
    ).live_part
    assert config is not None
    mask, segment = given["mask"], torch.arange(16).repeat_interleave(24)
    advantage = given["advantage"].repeat_interleave(24)
    live = live_weights(
        new.flatten(),
        given["rollout"].flatten(),
        mask.flatten(),
        config,
        segment=segment,
        advantage=advantage,
    )
    return live.keep.reshape(16, 24).any(1).tolist()


def test_opsm_as_trl(peers: dict[str, np.ndarray]) -> None:
    theirs = peers["trl/opsm/keep"][:, 0].astype(bool).tolist()
    assert opsm(batch()["old"]) == theirs
    assert 0 < sum(theirs) < 16


def test_trl_takes_a_nan_ratio_as_one(peers: dict[str, np.ndarray]) -> None:
    """TRL issue 6693: TRL takes a NaN ratio as 1, we reject its sequence. Both decide every other
    sequence alike."""
    broken = batch()["old"].clone()
    broken[0, 0] = math.nan
    assert opsm(broken)[1:] == peers["trl/opsm nan/keep"][1:, 0].astype(bool).tolist()
    assert (opsm(broken)[0], bool(peers["trl/opsm nan/keep"][0, 0])) == (False, True)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("token clip", preset("tis")),
        ("token mask", preset("icepop")),
        (
            "seq mask",
            CorrectionConfig(
                weight=preset("vanilla-is").weight,
                gates=gate("ratio", *SEQUENCE, low=0.9, high=1.1).gates,
            ),
        ),
        ("seq binary_kl", preset("flash-reinforce")),
        (
            "token tv",
            CorrectionConfig(weight=preset("vanilla-is").weight, gates=gate("tv", high=0.1).gates),
        ),
    ],
)
def test_weights_as_openrlhf(
    peers: dict[str, np.ndarray], name: str, config: CorrectionConfig
) -> None:
    applied = ours(config)
    np.testing.assert_allclose(
        applied.weight.numpy(), peers[f"openrlhf/{name}/weight"], rtol=1e-4, atol=1e-6
    )
    assert applied.weight.count_nonzero() > 0
