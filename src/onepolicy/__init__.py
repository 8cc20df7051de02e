"""onepolicy: same weights, one policy.

`import onepolicy` loads torch only when a name that needs it is used.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Any

from onepolicy.telemetry import disable_telemetry

disable_telemetry()

__version__ = "0.1.0"

if TYPE_CHECKING:  # the names of _PUBLIC, for type checkers and editors
    from onepolicy.config import CorrectionConfig, RunConfig, UsageError
    from onepolicy.correct.current_policy import live_weights
    from onepolicy.correct.predict import predict
    from onepolicy.correct.presets import preset
    from onepolicy.correct.report import combine
    from onepolicy.correct.reweight import finish, partials, reweight, slots
    from onepolicy.divergence.logprob import mismatch
    from onepolicy.divergence.routing import routing_disagreement
    from onepolicy.models.packing_check import check_packing
    from onepolicy.replay.alignment import check_alignment
    from onepolicy.replay.axes import trace_from
    from onepolicy.replay.checks import RoutingError
    from onepolicy.replay.padding import pad_routes, routes_of_generate, unpad_routes
    from onepolicy.replay.routers import Routers, bind_routers
    from onepolicy.support.checks import SupportError
    from onepolicy.support.score import log_probs
    from onepolicy.support.trace import SupportTrace
    from onepolicy.types import RoutingTrace, Sample
    from onepolicy.verdict.bug_signatures import diagnose

_PUBLIC = {
    "CorrectionConfig": "onepolicy.config",
    "RunConfig": "onepolicy.config",
    "UsageError": "onepolicy.config",
    "diagnose": "onepolicy.verdict.bug_signatures",
    "live_weights": "onepolicy.correct.current_policy",
    "predict": "onepolicy.correct.predict",
    "preset": "onepolicy.correct.presets",
    "combine": "onepolicy.correct.report",
    "finish": "onepolicy.correct.reweight",
    "partials": "onepolicy.correct.reweight",
    "reweight": "onepolicy.correct.reweight",
    "slots": "onepolicy.correct.reweight",
    "mismatch": "onepolicy.divergence.logprob",
    "routing_disagreement": "onepolicy.divergence.routing",
    "check_packing": "onepolicy.models.packing_check",
    "check_alignment": "onepolicy.replay.alignment",
    "trace_from": "onepolicy.replay.axes",
    "RoutingError": "onepolicy.replay.checks",
    "pad_routes": "onepolicy.replay.padding",
    "routes_of_generate": "onepolicy.replay.padding",
    "unpad_routes": "onepolicy.replay.padding",
    "Routers": "onepolicy.replay.routers",
    "bind_routers": "onepolicy.replay.routers",
    "SupportError": "onepolicy.support.checks",
    "log_probs": "onepolicy.support.score",
    "SupportTrace": "onepolicy.support.trace",
    "RoutingTrace": "onepolicy.types",
    "Sample": "onepolicy.types",
}
__all__ = [
    "CorrectionConfig",
    "Routers",
    "RoutingError",
    "RoutingTrace",
    "RunConfig",
    "Sample",
    "SupportError",
    "SupportTrace",
    "UsageError",
    "__version__",
    "bind_routers",
    "check_alignment",
    "check_packing",
    "combine",
    "diagnose",
    "finish",
    "live_weights",
    "log_probs",
    "mismatch",
    "pad_routes",
    "partials",
    "predict",
    "preset",
    "reweight",
    "routes_of_generate",
    "routing_disagreement",
    "slots",
    "trace_from",
    "unpad_routes",
]

if not TYPE_CHECKING:  # with __getattr__, a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            near = "".join(difflib.get_close_matches(name, _PUBLIC, n=1))
            hint = f"; did you mean {near}?" if near else ""
            raise AttributeError(f"module 'onepolicy' has no attribute {name!r}{hint}")
        return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
