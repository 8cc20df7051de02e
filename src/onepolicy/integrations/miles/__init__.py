"""onepolicy in miles (August 2026). docs/other_trainers.md is the guide.

miles takes functions by path: `tis` for its TIS hook, `check_samples` for its hook on finished
rollouts. `setup` brings routing replay of every transformers family to its FSDP backend; it is a
`worker_process_setup_hook` of Ray and loads nothing by itself. Settings are a table `onepolicy` in
the file of `--custom-config-path`.
"""

from __future__ import annotations

from typing import Any

from onepolicy.integrations.core.on_import import after_import

REPLAY_MODULE = "miles.backends.fsdp_utils.adaptations.routing_replay"


def setup() -> None:
    """Prepare miles' FSDP backend to replay families for which it has no adapter.

    Give it to Ray: `ray job submit --runtime-env-json '{"worker_process_setup_hook":
    "onepolicy.integrations.miles.setup", ...}'`. Processes that do not train load nothing.
    """
    after_import(REPLAY_MODULE, _extend)


def tis(args: Any, **batch: Any) -> Any:
    """Apply the correction to a micro-batch's policy loss, as of `slime.tis`."""
    from onepolicy.integrations.slime.correction import weighed

    return weighed(args, **batch, top_p_replayed=False)


def check_samples(args: Any, samples: Any, *more: Any) -> None:
    """Check the routes of finished samples, as of `slime.check_samples`."""
    from onepolicy.integrations.slime.routes import check_samples as check

    check(args, samples, *more)


def _extend(module: Any) -> None:
    from onepolicy.integrations.miles.fsdp import extend

    extend(module)
