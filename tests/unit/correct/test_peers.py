"""Presets that are named after a framework, and the rows of the table that name its settings,
against the framework's formulas, written down by hand for plain arrays.

mis: `compute_mis_weights` of miles 31f1ca9 (slime 624b824 has the same), and their OPSM and losses
anchored at the rollout. TRL: 1.16.0's vLLM importance sampling and off-policy mask. verl: 0.9.1's
rollout_corr_helper and losses. NeMo-RL: 7ea279a's masking by the sequence's log-probability error
and its importance weights. AReaL: functional.py's rejection and M2PO. prime-rl: 559b447's losses.
SkyRL: a956457's cispo and off-policy correction. OpenRLHF: 0.11.2's is_correction. verl, TRL and
OpenRLHF themselves run in tests/e2e/correct.
"""

import pytest
import torch
from torch import Tensor

from onepolicy.config.presets import correction_presets
from onepolicy.correct.current_policy import live_weights
from onepolicy.correct.presets import preset
from onepolicy.correct.reweight import reweight

MIS = {  # preset: settings of mis beside use_tis=true
    "vanilla-is": {"mode": "truncate", "tis": (None, 1e9)},
    "tis": {"mode": "truncate", "tis": (None, 2.0)},
    "cis": {"tis": (0.5, 2.0)},
    "icepop": {"mode": "mask", "tis": (0.5, 5.0)},  # icepop_function, without mis
    "seq-tis": {"level": "sequence", "mode": "truncate", "tis": (None, 2.0)},
    "seq-mis": {"level": "sequence", "mode": "truncate", "tis": (0.5, 2.0), "rs": "sequence"},
    "trl-default": {"level": "sequence", "mode": "mask", "tis": (0.0, 3.0)},
    "geo-rs-token-tis": {
        "mode": "truncate",
        "tis": (None, 2.0),
        "rs": "geometric",
        "rs_bounds": (0.999, 1.001),
    },
    "seq-mask-tis": {
        "mode": "truncate",
        "tis": (None, 1e9),
        "rs": "geometric",
        "rs_bounds": (0.999, 1.002),
    },
    "miles-moe": {"tis": (0.5, 1.5), "rs": "geometric", "rs_bounds": (0.99, 1.001)},
    "miles-moe-bn": {
        "tis": (0.5, 1.5),
        "rs": "geometric",
        "rs_bounds": (0.99, 1.001),
        "normalise": True,
    },
    "miles-moe-wide": {
        "tis": (0.5, 2.0),
        "rs": "geometric",
        "rs_bounds": (0.99, 1.001),
        "normalise": True,
    },
    "miles-moe-tis": {"tis": (0.5, 1.5)},
    "mis": {"mode": "truncate", "tis": (0.5, 2.0), "rs": "token", "veto": 1e-4, "normalise": True},
}
TRL = {  # preset: mode, clip_min, clip_max
    "vanilla-is": ("token_truncate", None, None),
    "tis": ("token_truncate", None, 2.0),
    "cis": ("token_truncate", 0.5, 2.0),
    "icepop": ("token_mask", 0.5, 5.0),
    "seq-tis": ("sequence_truncate", None, 2.0),
    "seq-mis": ("sequence_mask", 0.5, 2.0),
    "trl-default": ("sequence_mask", None, 3.0),
    "miles-moe-tis": ("token_truncate", 0.5, 1.5),
}

K1 = ("k1", "mean", (0.999, 1.001))
K3 = ("k3", "mean", (None, 0.01))
VERL = {  # preset: rollout_is, its threshold (C, or a band that zeroes), rollout_rs
    "vanilla-is": ("token", 1e9),
    "tis": ("token", 2.0),
    "icepop": ("token", (0.5, 5.0)),
    "seq-tis": ("sequence", 2.0),
    "seq-mis": ("sequence", 2.0, ("k1", "sum", (0.5, 2.0))),
    "trl-default": ("sequence", (0.0, 3.0)),
    "geo-rs": ("", None, K1),
    "geo-rs-token-tis": ("token", 2.0, K1),
    "seq-mask-tis": ("token", 1e9, ("k1", "mean", (0.998, 1.001))),
    "k3-rs": ("", None, K3),
    "k3-rs-token-tis": ("token", 2.0, K3),
    "trm": ("", None, ("k2", "max", (None, 0.5)), K3),
}
NEMO = {  # preset: type, min, max
    "vanilla-is": ("tis", 0.0, 1e9),
    "tis": ("tis", 0.0, 2.0),
    "cis": ("tis", 0.5, 2.0),
    "icepop": ("icepop", 0.5, 5.0),
    "seq-tis": ("gspo", 0.0, 2.0),
    "seq-mask-tis": ("seq-mask-tis", 0.999, 1.002),
    "miles-moe-tis": ("tis", 0.5, 1.5),
}
OPENRLHF = {  # preset: level, mode, gating, threshold
    "vanilla-is": ("token", "clip", "ratio", (0, 1e9)),
    "tis": ("token", "clip", "ratio", (0, 2.0)),
    "cis": ("token", "clip", "ratio", (0.5, 2.0)),
    "icepop": ("token", "mask", "ratio", (0.5, 5.0)),
    "seq-mask-tis": ("seq", "mask", "ratio", (0.999, 1.002)),
    "miles-moe-tis": ("token", "clip", "ratio", (0.5, 1.5)),
    "flash-reinforce": ("seq", "mask", "binary_kl", (0, 0.01)),
}
LIVE = {  # presets of the policy that is trained, and whose they are
    "ppo-is": {"verl", "miles"},
    "opsm": {"miles", "trl"},
    "ipo": {"prime-rl"},
    "dppo-tv": {"verl", "prime-rl", "skyrl"},
    "pg-tis": {"verl"},
    "pg-seq-tis": {"verl"},
    "cispo-rollout": {"verl", "miles", "skyrl"},
}
HELD = {  # framework: presets whose cell of the table a test below computes
    "verl": {*VERL},
    "miles": {*MIS, "veto"},
    "trl": {*TRL},
    "openrlhf": {*OPENRLHF},
    "nemo": {*NEMO, "nemo-seq-error"},
    "skyrl": {"tis", "seq-tis"},  # as verl's
    "areal": {"m2po", "kpop"},
    "prime-rl": set(),
}
NOTHING = "recompute"


def batch(seed: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return log-probabilities and masks of 400 samples, a tenth of them with a small gap."""
    g = torch.Generator().manual_seed(seed)
    old = [-3 * torch.rand(40, generator=g, dtype=torch.float64) - 3 for _ in range(400)]
    shift = [0.02 * (i % 10 > 0) for i in range(400)]
    rollout = [
        row + 0.02 * torch.randn(40, generator=g, dtype=torch.float64) + gap
        for row, gap in zip(old, shift, strict=True)
    ]
    masks = [torch.rand(40, generator=g) < 0.9 for _ in range(400)]
    old[3][7] -= 12  # for the veto
    rollout[5] -= 0.05
    return old, rollout, masks


def wide_batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the batch as [400, 40], every fourth sample with a large gap."""
    old, rollout, mask = (torch.stack(rows) for rows in batch(seed))
    g = torch.Generator().manual_seed(seed + 100)
    rollout[::4] += 0.5 * torch.randn(100, 40, generator=g, dtype=torch.float64)
    return old, rollout, mask


def mis_of_miles(
    old: list[Tensor],
    rollout: list[Tensor],
    masks: list[Tensor],
    *,
    level: str = "token",
    mode: str = "clip",
    tis: tuple[float | None, float],
    rs: str = "",
    rs_bounds: tuple[float, float] | None = None,
    veto: float | None = None,
    normalise: bool = False,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights and the masks of mis: the product is what its loss is multiplied by."""
    low, high = tis
    weights, kept = [], []
    for trainer, sampler, mask in zip(old, rollout, masks, strict=True):
        log_ratio, here = trainer - sampler, mask.double()
        total = (log_ratio * here).sum().expand_as(here)
        of_level = {"token": log_ratio, "sequence": total, "geometric": total / here.sum()}
        ratio = of_level[level].clamp(-20, 20).exp()
        keep = here.clone()
        if mode == "mask":
            assert low is not None
            keep *= (ratio >= low) & (ratio <= high)
        elif mode == "truncate":
            ratio = ratio.clamp(0, high)
        else:
            ratio = ratio.clamp(low, high)
        if rs:
            least, most = rs_bounds or tis
            judged = of_level[rs].clamp(-20, 20).exp()
            keep *= (judged >= least) & (judged <= most)
        if veto is not None and (log_ratio[mask] < torch.tensor(veto).log()).any():
            keep *= 0
        weights.append(ratio * here)
        kept.append(keep)
    if normalise:  # over all weights, the rejected ones included
        assert level == "token"
        mean = torch.cat(weights).sum() / torch.cat(masks).sum()
        weights = [weight / mean for weight in weights]
    return weights, kept


@pytest.mark.parametrize("name", MIS)
def test_weights_of_mis(name: str) -> None:
    """`mis` itself normalises over the kept weights, on purpose: with `batch` it is mis.yaml."""
    config = preset(name)
    if name == "mis":
        config = preset(name, normalise="batch")
    for seed in (0, 1):
        arrays = batch(seed)
        applied = reweight(*arrays, config)
        weights, kept = mis_of_miles(*arrays, **MIS[name])
        keep = torch.cat(applied.keep)
        assert torch.equal(keep, torch.cat(kept).bool())
        theirs = (torch.cat(weights) * torch.cat(kept)).float()
        torch.testing.assert_close(torch.cat(applied.weight), theirs, rtol=1e-6, atol=0)
        assert 0 < keep.sum() < 16000


def test_a_gate_that_keeps_little_does_not_raise_the_weights_of_miles() -> None:
    """Divided by the mean of the kept, weights within [0.5, 1.5] would be about 10."""
    applied = reweight(*batch(0), preset("miles-moe-bn"))
    assert 0.05 < torch.cat(applied.keep).sum() / applied.denominator < 0.15
    assert 0.9 < torch.cat(applied.weight).max() < 1.2
    assert applied.report["correction/scale"] == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("name", TRL)
def test_weights_of_trl(name: str) -> None:
    """TRL multiplies a ratio of a sequence into each of its tokens. It has no separate mask."""
    mode, low, high = TRL[name]
    old, rollout, mask = (torch.stack(rows) for rows in batch(2))
    log_ratio = (old - rollout) * mask
    if mode.startswith("sequence"):
        log_ratio = log_ratio.sum(1, keepdim=True)
    ratio = log_ratio.exp()
    if mode.endswith("truncate"):
        if (low, high) != (None, None):
            ratio = ratio.clamp(low, high)
    else:
        outside = (ratio < (low or -torch.inf)) | (ratio > (high or torch.inf))
        ratio = ratio.masked_fill(outside, 0)
    applied = reweight(old, rollout, mask, preset(name))
    torch.testing.assert_close(applied.weight, (ratio * mask).float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", VERL)
def test_weights_of_verl(name: str) -> None:
    """Bounds of its k1 are on 1 / rho: log L <= -log rho <= log U."""
    level, threshold, *gates = VERL[name]
    old, rollout, mask = wide_batch(5)
    log_ratio = (old - rollout).clamp(-20, 20)
    weight, keep = mask.double(), mask.clone()
    if level == "token":
        weight = log_ratio.exp() * mask
    elif level == "sequence":
        weight = (log_ratio * mask).sum(1, keepdim=True).clamp(-20, 20).exp() * mask
    if isinstance(threshold, tuple):
        weight = weight * ((weight >= threshold[0]) & (weight <= threshold[1]))
    elif threshold is not None:
        weight = weight.clamp(max=threshold)
    for statistic, aggregate, (low, high) in gates:
        value = {
            "k1": -log_ratio,
            "k2": log_ratio.square() / 2,
            "k3": log_ratio.expm1() - log_ratio,
        }[statistic] * mask
        whole = value.amax(1) if aggregate == "max" else value.sum(1)
        if aggregate == "mean":
            whole = whole / mask.sum(1)
        least, most = torch.tensor([-torch.inf, high])
        if statistic == "k1":
            least, most = torch.tensor([low, high], dtype=torch.float64).log()
        keep &= ((whole >= least) & (whole <= most))[:, None]
    applied = reweight(old, rollout, mask, preset(name))
    torch.testing.assert_close(applied.weight, (weight * keep).float(), rtol=1e-6, atol=0)
    assert applied.weight.count_nonzero() < mask.sum() or name in ("vanilla-is", "tis", "seq-tis")


@pytest.mark.parametrize("name", NEMO)
def test_weights_of_nemo(name: str) -> None:
    kind, low, high = NEMO[name]
    old, rollout, mask = wide_batch(6)
    log_ratio = (old - rollout) * mask
    weight = log_ratio.exp()
    if kind == "gspo":
        weight = log_ratio.sum(1, keepdim=True).exp()
    if kind in ("tis", "gspo"):
        weight = weight.clamp(low, high)
    else:
        judged = weight
        if kind == "seq-mask-tis":
            judged = (log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True)).exp()
        weight = weight * ((judged >= low) & (judged <= high))
    applied = reweight(old, rollout, mask, preset(name))
    torch.testing.assert_close(applied.weight, (weight * mask).float(), rtol=1e-6, atol=0)


def test_the_gate_of_kpop() -> None:
    """AReaL keeps a token whose binary KL is at most 2 nats in both directions; weights are rho."""
    old, rollout, mask = wide_batch(7)
    old[::7, 3], rollout[::7, 3] = -0.1, -5.0
    old[1::7, 4], rollout[1::7, 4] = -5.0, -0.1
    p, q = old.exp(), rollout.exp().clamp(max=1 - 1e-6)

    def binary(a: Tensor, b: Tensor) -> Tensor:
        return a * (a / b).log() + (1 - a) * ((1 - a) / (1 - b)).log()

    keep = mask & (torch.maximum(binary(p, q), binary(q, p)) <= 2)
    applied = reweight(old, rollout, mask, preset("kpop"))
    assert torch.equal(applied.keep, keep)
    assert 50 < (mask & ~keep).sum() < 400
    weight = ((old - rollout).exp() * keep).float()
    torch.testing.assert_close(applied.weight, weight, rtol=1e-6, atol=0)


def test_the_budget_of_m2po() -> None:
    """AReaL drops the largest squares of log rho until the mean of those left is below 0.04."""
    old, rollout, mask = wide_batch(8)
    square = (old - rollout).square()
    left = mask.clone()
    while square[left].mean() > 0.04:
        left &= square < square[left].max()
    assert torch.equal(reweight(old, rollout, mask, preset("m2po")).keep, left)
    assert 0 < (mask & ~left).sum() < mask.sum() / 4


def test_the_veto_of_mis() -> None:
    old, rollout, mask = wide_batch(9)
    low = (((old - rollout) < torch.tensor(1e-4).log()) & mask).any(1)
    assert 0 < low.sum() < 400
    keep = reweight(old, rollout, mask, preset("veto")).keep
    assert torch.equal(keep, mask & ~low[:, None])


def test_the_gate_of_nemo_seq_error() -> None:
    old, rollout, mask = (torch.stack(rows) for rows in batch(3))
    rollout[:200] += 0.4
    error = ((old - rollout).abs().exp() * mask).sum(1) / mask.sum(1)
    keep = reweight(old, rollout, mask, preset("nemo-seq-error")).keep
    assert torch.equal(keep, mask & (error <= 1.5)[:, None])
    assert 0 < keep.sum() < mask.sum()


@pytest.mark.parametrize("name", LIVE)
def test_gradients_of_losses_of_the_new_policy(name: str) -> None:
    """The gradient of a token's loss by its log-probability, with the rollout as the old policy.

    prime-rl's dppo and ipo without their KL, verl's reinforce with a truncated ratio, cispo, and
    PPO's clip, which OPSM masks for samples that moved away and have a negative advantage.
    """
    g = torch.Generator().manual_seed(4)
    new, rollout, mask = (torch.stack(rows) for rows in batch(4))
    new, rollout = new + 2.7, rollout + 2.7
    rollout = (rollout + 0.5 * torch.randn(new.shape, generator=g)).clamp(max=-1e-3)
    rollout[200:300] = (rollout[200:300] + 0.4).clamp(max=-1e-3)
    advantage = torch.randn(400, 1, generator=g).expand_as(new).double()
    graph = new.clone().requires_grad_()
    wanted = torch.autograd.grad(
        (live_loss(name, graph, rollout, advantage, mask) * mask).sum(), graph
    )[0]
    config = preset(name)
    assert config.live_part is not None
    live = live_weights(new, rollout, mask, config.live_part, advantage=advantage)
    if config.surrogate == "ppo":
        loss = live.weight * clipped(graph, rollout, advantage)
    elif name == "opsm":  # a gate of any loss
        loss = live.keep * clipped(graph, rollout, advantage)
    else:
        loss = -live.weight * advantage * graph
    (found,) = torch.autograd.grad((loss * mask).sum(), graph)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    assert wanted[mask].count_nonzero() > 0.5 * mask.sum()


def clipped(new: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    ratio = (new - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def live_loss(name: str, new: Tensor, old: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """Return the loss [B, T] of the framework."""
    ratio, moved = (new - old).exp(), new.detach().exp() - old.exp()
    match name:
        case "ppo-is":
            return clipped(new, old, advantage)
        case "opsm":
            away = ((old - new.detach()) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
            return clipped(new, old, advantage) * ~((away > 0.1) & (advantage < 0))
        case "ipo":
            return -((moved.abs() <= 0.1) * advantage * ratio)
        case "dppo-tv":
            wrong = torch.where(advantage > 0, moved > 0.2, moved < -0.2)
            return -(~wrong * advantage * ratio)
        case "pg-tis":
            return -(ratio.detach().clamp(max=2) * advantage * new)
        case "pg-seq-tis":
            whole = ((new - old) * mask).sum(1, keepdim=True).exp().detach()
            return -(whole.clamp(max=2) * advantage * new)
    assert name == "cispo-rollout"
    return -(ratio.detach().clamp(0, 5) * advantage * new)


@pytest.mark.parametrize("name", OPENRLHF)
def test_weights_of_openrlhf(name: str) -> None:
    """The mask of a sequence leaves the ratios of its tokens as they are."""
    level, mode, gating, (low, high) = OPENRLHF[name]
    old, rollout, mask = wide_batch(10)
    old[1::5] += 2.4
    rollout[1::5] = rollout[1::5].add(1.8).clamp(max=-0.05)
    log_ratio, (p, q) = old - rollout, (old.exp(), rollout.exp())
    judged = log_ratio.exp()
    if gating == "binary_kl":
        judged = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
    if level == "seq":
        values = log_ratio if gating == "ratio" else judged
        judged = (values * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        if gating == "ratio":
            judged = judged.exp()
    weight = log_ratio.exp()
    if mode == "clip":
        weight = weight.clamp(low, high)
    else:
        weight = weight * ((judged >= low) & (judged <= high))
        assert 0 < weight[mask].count_nonzero() < mask.sum()
    applied = reweight(old, rollout, mask, preset(name))
    torch.testing.assert_close(applied.weight, (weight * mask).float(), rtol=1e-6, atol=0)


def test_nothing_is_corrected_by_recompute() -> None:
    old, rollout, mask = wide_batch(11)
    applied = reweight(old, rollout, mask, preset(NOTHING))
    assert torch.equal(applied.weight, mask.float())
    assert torch.equal(applied.keep, mask)


def test_every_cell_of_the_table_is_computed_here() -> None:
    """A row that names a framework's settings is held against its formula, or says `cannot`."""
    named = {
        (framework, name)
        for name, row in correction_presets().items()
        for framework, cell in row.items()
        if framework not in ("question", "settings", "source") and not cell.startswith("cannot")
    }
    held = {(framework, name) for framework, names in HELD.items() for name in names}
    held |= {(framework, name) for name, frameworks in LIVE.items() for framework in frameworks}
    held |= {(framework, name) for framework, name in named if name == NOTHING}
    assert named == held
