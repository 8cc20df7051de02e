"""Our corrections beside the peers' own code, which runs in a venv of its own
(`make test-oracle` builds it).

Where we differ on purpose, the test asserts the difference and gives the reason, so that a change
on their side is noticed.
"""

from __future__ import annotations

import math
import subprocess
from typing import TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor

from onepolicy.config import CorrectionConfig
from onepolicy.correct.current_policy import live_weights
from onepolicy.correct.presets import preset
from onepolicy.correct.reweight import Applied, reweight
from onepolicy.divergence.logprob import mismatch
from support.oracle.venv import PYTHON, SCRIPTS

Peers: TypeAlias = dict[str, np.ndarray]
B3 = torch.tensor([0.3, 0.6, 1, 1.3, 1.9, 3])

pytestmark = [pytest.mark.oracle, pytest.mark.process, pytest.mark.timeout(600)]


def batch() -> dict[str, Tensor]:
    """Return 16 sequences of up to 24 tokens, right-padded, with small to large mismatch. No value
    is near a bound."""
    g = torch.Generator().manual_seed(3)
    rollout = -torch.rand(16, 24, generator=g) * 4 - 0.05
    old = rollout + torch.randn(16, 24, generator=g) * torch.linspace(0.02, 0.8, 16)[:, None]
    mask = torch.arange(24) < torch.randint(3, 25, (16, 1), generator=g)
    advantage = torch.randn(16, generator=g)
    return {"old": old.clamp(max=-0.01), "rollout": rollout, "mask": mask, "advantage": advantage}


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Peers:
    assert PYTHON.exists(), "the oracle venv is missing; `make test-oracle` builds it"
    folder = tmp_path_factory.mktemp("oracle")
    given = {name: value.numpy() for name, value in batch().items()}
    np.savez(folder / "in.npz", b3=B3.numpy(), **given)
    command = [PYTHON, SCRIPTS / "peers.py", folder / "in.npz", folder / "out.npz"]
    subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)
    return dict(np.load(folder / "out.npz"))


def ours(config: CorrectionConfig) -> Applied[Tensor]:
    given = batch()
    return reweight(given["old"], given["rollout"], given["mask"], config)


def gate(statistic: str, *how: str, **bounds: float) -> CorrectionConfig:
    where = dict(zip(("aggregate", "scope"), how, strict=False))
    return CorrectionConfig.model_validate({"gates": [{"statistic": statistic, **where, **bounds}]})


SEQUENCE = ("mean", "sequence")
VERL_WEIGHTS = {
    "token 2": preset("tis"),
    "token 0.5_5": preset("icepop"),
    "sequence 2": preset("seq-tis"),
    "sequence 0.5_2": preset("seq-tis", weight={"low": 0.5, "outside": "zero"}),
    "token 2 normalised": preset("tis", normalise="self"),
    "sequence 2 normalised": preset("seq-tis", normalise="batch"),
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


def test_weights_and_gates_as_verl(peers: Peers, subtests: pytest.Subtests) -> None:
    for name, config in VERL_WEIGHTS.items():
        with subtests.test(name):
            applied = ours(config)
            theirs = peers[f"verl/{name}/weight"]
            np.testing.assert_allclose(applied.weight.numpy(), theirs, rtol=1e-5)
            assert 0 < applied.weight.count_nonzero() <= applied.denominator
    for name, config in VERL_GATES.items():
        with subtests.test(name):
            keep = ours(config).keep
            np.testing.assert_array_equal(keep.numpy(), peers[f"verl/{name}/keep"].astype(bool))
            assert 0 < keep.sum() < batch()["mask"].sum(), "the case decides nothing"


def test_diagnostics_as_verl(peers: Peers) -> None:
    given = batch()
    segment = torch.arange(16)[:, None].expand(16, 24)
    found = mismatch(given["old"], given["rollout"], given["mask"], segment=segment)
    k3, chi2, k1, ppl_ratio = peers["verl/metrics"]
    assert (found.k3, found.chi2, found.k1) == pytest.approx((k3, chi2, k1), rel=1e-4)
    assert found.ppl_ratio == pytest.approx(ppl_ratio, rel=1e-4)


def test_verl_inverts_bounds_that_are_not_reciprocal(peers: Peers) -> None:
    """B3: verl compares -log rho with the logs of bounds for rho (verl pull request 6377, closed
    unmerged)."""
    config = gate("ratio", low=0.6, high=1.4)
    keep = reweight(B3.log(), torch.zeros(6), torch.ones(6, dtype=torch.bool), config).keep
    assert B3[keep].tolist() == pytest.approx([0.6, 1, 1.3])
    assert B3[torch.from_numpy(peers["verl/b3/keep"][0]) > 0].tolist() == pytest.approx([1, 1.3])


def test_verl_normalises_before_it_rejects(peers: Peers) -> None:
    """`batch` does so too. `self` divides by the weights that are used, which then average 1 over
    the original count."""
    k3 = [gate.model_dump() for gate in gate("k3", *SEQUENCE, high=0.02).gates]
    name = "verl/token 2 normalised, seq_mean_k3"
    theirs = peers[f"{name}/weight"] * peers[f"{name}/keep"]
    applied = ours(preset("tis", normalise="batch", gates=k3))
    np.testing.assert_allclose(applied.weight.numpy(), theirs, rtol=1e-5)
    assert theirs.sum() / applied.denominator < 0.9
    applied = ours(preset("tis", normalise="self", gates=k3))
    assert applied.weight.sum() / applied.denominator == pytest.approx(1, rel=1e-5)


def opsm(new: Tensor) -> list[bool]:
    given = batch()
    gate = {**preset("opsm").gates[0].model_dump(), "high": 0.01}
    config = preset("opsm", gates=[gate]).live_part
    assert config is not None
    flat = [each.flatten() for each in (new, given["rollout"], given["mask"])]
    segment = torch.arange(16).repeat_interleave(24)
    advantage = given["advantage"].repeat_interleave(24)
    live = live_weights(*flat, config, segment=segment, advantage=advantage)
    return live.keep.reshape(16, 24).any(1).tolist()


def test_opsm_as_trl(peers: Peers) -> None:
    theirs = peers["trl/opsm/keep"][:, 0].astype(bool).tolist()
    assert opsm(batch()["old"]) == theirs
    assert 0 < sum(theirs) < 16


def test_trl_takes_a_nan_ratio_as_one(peers: Peers) -> None:
    """TRL issue 6693: TRL takes a NaN ratio as 1, we reject its sequence. Both decide every other
    sequence alike."""
    broken = batch()["old"].clone()
    broken[0, 0] = math.nan
    assert opsm(broken)[1:] == peers["trl/opsm nan/keep"][1:, 0].astype(bool).tolist()
    assert (opsm(broken)[0], bool(peers["trl/opsm nan/keep"][0, 0])) == (False, True)


PLAIN = preset("vanilla-is").weight
OPENRLHF = {
    "token clip": preset("tis"),
    "token mask": preset("icepop"),
    "seq mask": CorrectionConfig(
        weight=PLAIN, gates=gate("ratio", *SEQUENCE, low=0.9, high=1.1).gates
    ),
    "seq binary_kl": preset("flash-reinforce"),
    "token tv": CorrectionConfig(weight=PLAIN, gates=gate("tv", high=0.1).gates),
}


def test_weights_as_openrlhf(peers: Peers, subtests: pytest.Subtests) -> None:
    for name, config in OPENRLHF.items():
        with subtests.test(name):
            weight, theirs = ours(config).weight, peers[f"openrlhf/{name}/weight"]
            np.testing.assert_allclose(weight.numpy(), theirs, rtol=1e-4, atol=1e-6)
            assert weight.count_nonzero() > 0
