"""onepolicy in prime-rl (0.8, August 2026). docs/other_trainers.md is the guide.

    [trainer.loss]
    type = "custom"
    import_path = "onepolicy.integrations.prime_rl.loss"
    kwargs = { correction = "icepop" }

prime-rl imports this module after it has built the model and before the first forward. In its
process the import also makes models of transformers replay the routes that they are handed, and
sampling masks that are not those of their tokens an error.
"""

from __future__ import annotations

import sys

from onepolicy.integrations.prime_rl.loss import loss
from onepolicy.integrations.prime_rl.replay import replay_in_transformers
from onepolicy.integrations.prime_rl.supports import refuse_wrong_supports

__all__ = ["loss", "refuse_wrong_supports", "replay_in_transformers"]

if "prime_rl" in sys.modules:
    replay_in_transformers()
    refuse_wrong_supports()
