"""The gap to a bf16 rollout in verl's worker, without and with replay, in every layout: the numbers
of docs/trainers.md. `VERL_ENGINE_VENDOR=onepolicy python -m support.verl.gap`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

LAYOUTS = {
    "fsdp2 packed": {},
    "fsdp2 padded": {"packed": False},
    "fsdp2 packed, checkpointing": {"checkpointing": True},
    "fsdp2 padded, checkpointing": {"packed": False, "checkpointing": True},
    "fsdp2 packed in buckets": {"bucket": 64},
    "fsdp1 packed": {"strategy": "fsdp", "checkpointing": True},
    "fsdp1 padded": {"strategy": "fsdp", "packed": False},
}


def k3(logp, rollout) -> float:
    log_rho = (logp - rollout.logp)[rollout.mask].double()
    return (log_rho.expm1() - log_rho).mean().item()


def advantages(rollout):
    return torch.randn(rollout.logp.shape, generator=torch.Generator().manual_seed(1))


def main() -> None:
    from support.verl import worker as verl  # imports verl

    with tempfile.TemporaryDirectory() as folder:
        model = verl.save_model(Path(folder))
        rollout = verl.sample(model)
        lines = []
        for layout, settings in LAYOUTS.items():
            worker = verl.make_worker(model, **settings)
            native = k3(verl.score(worker, rollout.batch(routed_experts=None)), rollout)
            worker.engine.expects_routes = None
            old = verl.score(worker, rollout.batch())
            found = verl.update(worker, rollout.batch(), old, advantages(rollout))
            lines.append(
                f"{layout:28} k3 {native:.2e} -> {k3(old, rollout):.2e}  "
                f"ppo_kl {found['actor/ppo_kl'][0]}  gradient {found['grad_norm'][0]:.6f}"
            )
        worker = verl.make_worker(model)
        old = verl.score(worker, rollout.batch())
        worker.engine.expects_routes = False
        batch = rollout.batch(routed_experts=None)
        found = verl.update(worker, batch, old, advantages(rollout))
        lines.append(f"update not replayed: ppo_kl {found['actor/ppo_kl'][0]:.2e}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
