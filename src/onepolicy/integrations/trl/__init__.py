"""onepolicy in TRL's GRPOTrainer and RLOOTrainer (TRL 1.16). docs/trainers.md is the guide.

    import onepolicy.integrations.trl as op_trl

    op_trl.attach(trainer, replay="r3", correction="tis", dump="dump")  # before trainer.train()

With vLLM in the trainer's process, build the trainer under `with op_trl.routed_vllm():`.
"""

from __future__ import annotations

from onepolicy.integrations.trl.attach import attach
from onepolicy.integrations.trl.vllm_routes import routed_vllm

__all__ = ["attach", "routed_vllm"]
