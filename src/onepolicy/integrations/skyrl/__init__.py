"""onepolicy in SkyRL (0.4.0). docs/other_trainers.md is the guide.

import onepolicy.integrations.skyrl as op_skyrl

class Exp(BasePPOExp):
def get_trainer(self, *args, **kwargs):
trainer = super().get_trainer(*args, **kwargs)
op_skyrl.attach(trainer, correction="tis", dump="dump")
return trainer
"""

from __future__ import annotations

from onepolicy.integrations.skyrl.attach import attach
from onepolicy.integrations.skyrl.fsdp import replaying
from onepolicy.integrations.skyrl.loss import register_loss

__all__ = ["attach", "register_loss", "replaying"]
