"""What vLLM returns as routes, by version. One generation so far: 0.22 to 0.30, of which 0.28 to 0.30 are accepted.

`CompletionOutput.routed_experts` is an array [prompt + completion - 1, decoder layers, K], uint8 up to 256 experts and
uint16 beyond; dense layers hold zeros, the columns are in the router's own top-k order, ids are logical. Another
generation is another function beside `trace_of`, chosen in `check_version`.
"""

from __future__ import annotations

import re

import numpy as np
import torch

from onepolicy.config import UsageError
from onepolicy.replay.axes import trace_from
from onepolicy.replay.checks import RouteRules
from onepolicy.types import RouteSource, RouteSpan, RoutingTrace

# Newest version refused, and why; the first line that covers a version is the one quoted.
_REFUSED_ROUTES = (
    ((0, 13), "it cannot return routes"),
    ((0, 20), "its routes are int32 rows read when a request stops, which no adapter here reads"),
    ((0, 21), "it returns prompt and completion routes apart and of MoE layers only, which no adapter here reads"),
    ((0, 26), "monolithic MoE kernels leave all routes zero (https://github.com/vllm-project/vllm/issues/54730)"),
    (
        (0, 27),
        "only from 0.28 on does it refuse kernels without routes (https://github.com/vllm-project/vllm/pull/44214)",
    ),
)
OLDEST, NEWEST, CPU = (0, 28), (0, 30), (0, 30)


def check_version(version: str, *, cpu: bool, routes: bool) -> None:
    """UsageError if this vLLM cannot be used, or (routes) its routes could be wrong."""
    match = re.match(r"(\d+)\.(\d+)", version)
    found = (int(match[1]), int(match[2])) if match else (0, 0)
    where = f"rollout.engine.kind: vllm {version}"
    if cpu and found != CPU:
        raise UsageError(
            f"{where}: on the CPU only 0.30 is known to work: older ones return no routes or zeros, newer ones need "
            "Triton (https://github.com/vllm-project/vllm/pull/45635); `make vllm` installs 0.30.0"
        )
    if found > NEWEST:
        raise UsageError(f"{where}: from 0.31 on routes are stored in another way that no adapter here reads; use 0.30")
    if found < OLDEST:
        why = next((why for newest, why in _REFUSED_ROUTES if found <= newest), "") if routes else "it is not tested"
        raise UsageError(f"{where}: {why}; use 0.30")


def trace_of(
    rows: np.ndarray | None,  # [prompt + completion - 1, decoder layers, K]
    *,
    prompt: int,
    cached: int,
    rules: RouteRules,
    depth: int,
    version: int,
) -> RoutingTrace:
    """The routes of one request. prompt, cached: its tokens, and how many of them the prefix cache had.

    UsageError if they are missing, or not of this model's layers.
    """
    if rows is None:
        raise UsageError("vLLM returned no routes for a request although it was started to record them")
    ids = torch.from_numpy(rows)
    trace = trace_from(ids, layers=rules.layers, depth=depth, num_experts=rules.num_experts, axis="all")
    parts: dict[RouteSource, tuple[int, int]] = {
        "cache": (0, cached),
        "prefill": (cached, prompt),
        "decode": (prompt, len(rows)),
    }
    spans = [RouteSpan(start, stop - start, source, version) for source, (start, stop) in parts.items() if stop > start]
    return RoutingTrace(trace.ids, trace.valid, trace.layers, trace.num_experts, tuple(spans))
