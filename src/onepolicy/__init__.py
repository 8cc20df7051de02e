"""onepolicy: same weights, one policy. `import onepolicy` loads no torch until a name that needs it is used."""

from __future__ import annotations

import importlib
from typing import Any

from onepolicy.no_statistics import turn_off

turn_off()

__version__ = "0.1.0"

_PUBLIC = {
    "bind_routers": "onepolicy.replay.routers",
    "pad_routes": "onepolicy.replay.padding",
    "unpad_routes": "onepolicy.replay.padding",
    "mismatch": "onepolicy.measure.logprob",
    "routing_disagreement": "onepolicy.measure.routing",
    "reweight": "onepolicy.correct.weights",
    "preset": "onepolicy.correct.presets",
    "live_weights": "onepolicy.correct.live",
    "predict": "onepolicy.correct.predict",
    "diagnose": "onepolicy.correct.diagnose",
    "RoutingTrace": "onepolicy.types",
    "Sample": "onepolicy.types",
    "RunConfig": "onepolicy.config",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'onepolicy' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
