"""onepolicy in slime (0.3.1, August 2026). docs/other_trainers.md is the guide.

slime takes functions by path: `step` for its whole-step hook, `tis` for its TIS hook,
`check_samples` for its hook on finished rollouts. Settings are a table `onepolicy` in the file of
`--custom-config-path`.
"""

from __future__ import annotations

from onepolicy.integrations.slime.correction import step, tis
from onepolicy.integrations.slime.routes import check_samples

__all__ = ["check_samples", "step", "tis"]
