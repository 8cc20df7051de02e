"""Mismatch of the log-probabilities two engines gave to the same sampled tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import overload

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.layout import Layout, arguments, place_of


@dataclass(frozen=True, slots=True, eq=False)
class Mismatch:
    """Statistics of rho = pi_trainer / pi_rollout over n tokens sampled by the rollout engine (l = log rho, nats).

    k1 and k3 both estimate KL(rollout || trainer) without bias; k3 is never negative and far less noisy.
    """

    tokens: int  # n
    differing: int  # of these, log-probabilities that are not the same number
    k1: float  # mean(-l)
    k3: float  # mean(rho - 1 - l); R3 paper eq. 2
    chi2: float  # mean(rho^2) - 1
    ess: float  # (sum rho)^2 / (n sum rho^2): share of the tokens that importance weights rho would leave effective
    mean_dlogp: float  # mean |l|
    max_dlogp: float  # max |l|
    mean_dp: float  # mean |p_trainer - p_rollout|
    max_dp: float  # max |p_trainer - p_rollout|
    pearson: float  # correlation of the probabilities; 1 if all pairs are equal, nan if one side alone is constant
    ppl_ratio: float  # mean over samples of exp(mean(-l)): trainer over rollout perplexity; nan without `segment`
    abs_log_ratio: Tensor = field(
        repr=False
    )  # [n] float64, |l| ascending: `extreme` is a binary search

    @overload
    def extreme(self, tau: float) -> float: ...
    @overload
    def extreme(self, tau: Sequence[float]) -> list[float]: ...
    def extreme(self, tau: float | Sequence[float]) -> float | list[float]:
        """F(tau), the share of tokens with max(rho, 1 / rho) > tau (R3 paper eq. 3). One tau >= 1 or many."""
        taus = [tau] if isinstance(tau, int | float) else list(tau)
        for value in taus:
            if not value >= 1:
                raise UsageError(
                    f"extreme: tau = {value}, but max(rho, 1/rho) is never below 1; give tau >= 1"
                )
        logs = torch.tensor(
            [math.log(value) for value in taus],
            dtype=torch.float64,
            device=self.abs_log_ratio.device,
        )
        within = torch.searchsorted(self.abs_log_ratio, logs, right=True)
        shares = ((self.tokens - within).double() / self.tokens).tolist()
        return shares[0] if isinstance(tau, int | float) else shares

    def metrics(self, prefix: str = "mismatch") -> dict[str, float]:
        names = (
            "k1",
            "k3",
            "chi2",
            "ess",
            "max_dp",
            "mean_dp",
            "max_dlogp",
            "mean_dlogp",
            "pearson",
            "ppl_ratio",
        )
        numbers = {f"{prefix}/{name}": getattr(self, name) for name in names}
        numbers[f"{prefix}/differing"] = float(self.differing)
        taus = (1.25, 2, 5)
        return numbers | {
            f"{prefix}/f{tau}": share for tau, share in zip(taus, self.extreme(taus), strict=True)
        }


def mismatch(
    logp_old: Layout,  # [T] float32, trainer; or [B, T], or a list of [T_i]
    logp_rollout: Layout,  # the same, rollout engine
    mask: Layout,  # bool, the sampled tokens; the other slots may hold anything
    *,
    segment: Layout
    | None = None,  # int64, sample index of each slot; rows of [B, T] and lists need none
) -> Mismatch:
    """Compare both engines on the masked-in slots, in float64. Raises UsageError if none is, or one is not finite."""
    given = {"logp_old": logp_old, "logp_rollout": logp_rollout, "mask": mask}
    flat = arguments("mismatch", {**given, "segment": segment})
    old, rollout, samples = _masked(flat, mask)
    log_rho = old - rollout
    shifted = (
        log_rho - log_rho.max()
    ).exp()  # ess does not depend on rho's scale; this cannot overflow
    dp = (old.exp() - rollout.exp()).abs()
    dlogp = log_rho.abs().sort().values
    numbers = {
        "k1": (rollout - old).mean(),
        "k3": (log_rho.expm1() - log_rho).mean(),
        "chi2": (2 * log_rho).expm1().mean(),
        "ess": shifted.sum().square() / (len(log_rho) * shifted.square().sum()),
        "mean_dlogp": dlogp.mean(),
        "max_dlogp": dlogp[-1],
        "mean_dp": dp.mean(),
        "max_dp": dp.max(),
        "pearson": _pearson(old.exp(), rollout.exp()),
        "ppl_ratio": log_rho.new_tensor(math.nan)
        if samples is None
        else _ppl_ratio(log_rho, samples),
    }
    values = torch.stack(list(numbers.values())).tolist()
    differing = int((old != rollout).sum())
    return Mismatch(
        len(log_rho), differing, **dict(zip(numbers, values, strict=True)), abs_log_ratio=dlogp
    )


def _masked(flat: dict[str, Tensor | None], like: Layout) -> tuple[Tensor, Tensor, Tensor | None]:
    """Both sides [n] float64 and the samples [n] of the masked-in slots."""
    mask, sides = flat["mask"], []
    assert mask is not None
    for name in ("logp_old", "logp_rollout"):
        logp = flat[name]
        assert logp is not None
        broken = (mask & ~logp.isfinite()).nonzero()
        if len(broken):
            slot = int(broken[0, 0])
            raise UsageError(
                f"mismatch: {name} is not finite on {len(broken)} masked-in slots, first {place_of(slot, like)}: "
                f"{logp[slot].item()}; clear the mask there or mend the engine that returned it"
            )
        sides.append(logp.detach()[mask].double())
    if not mask.any():
        raise UsageError(
            f"mismatch: the mask selects none of {mask.numel()} slots; there is nothing to compare"
        )
    segment = flat["segment"]
    return sides[0], sides[1], None if segment is None else segment[mask]


def _pearson(x: Tensor, y: Tensor) -> Tensor:
    """Correlation of [n] and [n]: 1 if x == y throughout (even if constant), else nan if one of them is constant."""
    dx, dy = x - x.mean(), y - y.mean()
    correlation = ((dx @ dy) / (dx.norm() * dy.norm())).clamp(-1, 1)
    constant = (x.min() == x.max()) | (y.min() == y.max())
    return torch.where((x == y).all(), 1.0, torch.where(constant, math.nan, correlation))


def _ppl_ratio(log_rho: Tensor, segment: Tensor) -> Tensor:
    samples, index = segment.unique(return_inverse=True)
    total = log_rho.new_zeros(len(samples)).index_add(0, index, log_rho)
    mean = total / torch.bincount(index)
    return (-mean).exp().mean()
