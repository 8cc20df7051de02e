"""Combinations of vLLM version, platform and settings whose routes are wrong or missing: refused before work starts.

Every row names the upstream issue or pull request. What cannot be known at the start (a preempted request, a stale row)
is caught on arrival by replay/checks.py and by the detector before the first update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from onepolicy.config import UsageError
from onepolicy.replay.payloads.vllm import ALL_ZERO_ISSUE, Version, parse_version

GITHUB = "https://github.com/"
VLLM = GITHUB + "vllm-project/vllm/"
CPU: Version = (0, 30)
"""The one version whose CPU build records routes."""
PREFILL_DECODE = ("Nixl", "MoRIIO", "Mooncake")
"""Connectors of split prefill and decode, by the start of their names."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """What of a vLLM engine decides whether its routes can be right."""

    version: Version
    platform: str
    """`device_type` of its platform: cpu, cuda, npu ..."""
    pipeline: int = 1
    """Ranks of pipeline, context (decode and prefill) and data parallelism."""
    context: int = 1
    data: int = 1
    eplb: bool = False
    """Experts are moved between ranks while it runs."""
    connector: str = ""
    """KV connector: offloading, split prefill and decode."""
    speculative: bool = False
    async_scheduling: bool = False
    prefix_caching: bool = True
    hybrid: bool = False
    """Recurrent layers beside attention."""
    ray: bool = False
    monolithic: bool = False
    """Some MoE kernel routes inside itself. Known once the model is loaded."""


def deployment_of(config: Any, version: str, platform: str) -> Deployment:
    """config: a VllmConfig, or the tree of one (the JSON of a server's /server_info). What it does not name is off."""
    parallel = _part(config, "parallel_config")
    connector = _part(_part(config, "kv_transfer_config"), "kv_connector")
    executor = _part(parallel, "distributed_executor_backend")
    return Deployment(
        version=parse_version(version),
        platform=platform,
        pipeline=_part(parallel, "pipeline_parallel_size") or 1,
        context=max(
            _part(parallel, f"{phase}_context_parallel_size") or 1
            for phase in ("decode", "prefill")
        ),
        data=_part(parallel, "data_parallel_size") or 1,
        eplb=bool(_part(parallel, "enable_eplb")),
        connector=connector or "",
        speculative=_part(config, "speculative_config") is not None,
        async_scheduling=bool(_part(_part(config, "scheduler_config"), "async_scheduling")),
        prefix_caching=_part(_part(config, "cache_config"), "enable_prefix_caching") is not False,
        hybrid=bool(_part(_part(config, "model_config"), "is_hybrid")),
        ray="ray" in str(executor).lower(),
    )


def _part(config: Any, name: str) -> Any:
    if isinstance(config, Mapping):
        return config.get(name)
    return getattr(config, name, None)


@dataclass(frozen=True, slots=True)
class Incompatibility:
    holds: Callable[[Deployment], bool]
    why: str
    mend: str
    source: str


def check_route_compatibility(deployment: Deployment) -> None:
    """UsageError for a combination whose routes are known to be wrong, naming why, what to do and the source."""
    for bad in INCOMPATIBILITIES:
        if bad.holds(deployment):
            version = ".".join(map(str, deployment.version))
            raise UsageError(f"vllm {version} with routes: {bad.why}; {bad.mend} ({bad.source})")


_NEWER = "use 0.28 to 0.30"

INCOMPATIBILITIES = (
    Incompatibility(
        lambda d: d.version < (0, 14), "it cannot return routes", _NEWER, VLLM + "pull/28284"
    ),
    Incompatibility(
        lambda d: d.platform == "cpu" and d.version < (0, 27),
        "the CPU's MoE kernel selects experts itself and all routes stay zero",
        "`make vllm` installs 0.30.0",
        ALL_ZERO_ISSUE,
    ),
    Incompatibility(
        lambda d: d.platform == "cpu" and (0, 27) <= d.version < CPU,
        "the CPU's MoE kernel is monolithic, which stops its start",
        "`make vllm` installs 0.30.0",
        VLLM + "pull/44214",
    ),
    Incompatibility(
        lambda d: d.platform == "cpu" and d.version > CPU,
        "routes need its second model runner, and that needs Triton, which CPU builds lack",
        "`make vllm` installs 0.30.0",
        VLLM + "pull/45635",
    ),
    Incompatibility(
        lambda d: d.platform == "npu",
        "Ascend returns zeros, or the routes of one tensor-parallel rank as those of the batch",
        "record routes by a second forward (replay.source=reprefill)",
        f"{GITHUB}vllm-project/vllm-ascend/issues/16314 and /15451",
    ),
    Incompatibility(
        lambda d: d.version == (0, 15),
        "the capture is bound before it exists and all routes stay zero",
        _NEWER,
        VLLM + "pull/33013",
    ),
    Incompatibility(
        lambda d: d.eplb and d.version < (0, 16),
        "expert balancing is on and ids are physical, not logical",
        "turn it off or " + _NEWER,
        VLLM + "pull/33013",
    ),
    Incompatibility(
        lambda d: d.monolithic and d.version < (0, 28),
        "a MoE kernel is monolithic and its routes stay zero without a sign",
        _NEWER + ", which refuses such kernels",
        ALL_ZERO_ISSUE,
    ),
    Incompatibility(
        lambda d: d.pipeline > 1,
        "pipeline stages record different layers and overwrite each other's",
        "set pipeline_parallel_size=1",
        VLLM + "pull/35623",
    ),
    Incompatibility(
        lambda d: d.context > 1,
        "context parallelism splits the tokens the rows stand for",
        "turn it off",
        VLLM + "pull/28284",
    ),
    Incompatibility(
        lambda d: d.data > 1 and d.version != (0, 21),
        "which rows belong to which data-parallel rank is guessed from tensor sizes, and wrong where they coincide",
        "start one engine per replica",
        VLLM + "pull/37879 and /50874",
    ),
    Incompatibility(
        lambda d: d.async_scheduling and d.version < (0, 21),
        "asynchronous scheduling overwrites routes before they are read",
        "turn it off",
        VLLM + "pull/28284",
    ),
    Incompatibility(
        lambda d: d.async_scheduling and d.version == (0, 21),
        "asynchronous scheduling is not supported",
        "turn it off",
        VLLM + "pull/39917",
    ),
    Incompatibility(
        lambda d: d.speculative and d.version < (0, 21),
        "rows of rejected draft tokens were never checked",
        "turn speculative decoding off or " + _NEWER,
        VLLM + "pull/39917",
    ),
    Incompatibility(
        lambda d: d.speculative and (0, 22) <= d.version < (0, 26),
        "the draft model's first layer overwrites the model's",
        "turn speculative decoding off or use 0.26 or newer",
        VLLM + "pull/48622",
    ),
    Incompatibility(
        lambda d: bool(d.connector) and d.version < (0, 31),
        "tokens whose keys come through a KV connector have another request's routes",
        "leave out the connector",
        VLLM + "pull/39568",
    ),
    Incompatibility(
        lambda d: d.connector.startswith(PREFILL_DECODE),
        "the routes of a split prefill never reach the decoding engine",
        "let one engine do both",
        VLLM + "issues/55584",
    ),
    Incompatibility(
        lambda d: d.hybrid and d.version < (0, 18),
        "rows of a model with recurrent layers are looked up in another cache group",
        _NEWER,
        VLLM + "pull/35744",
    ),
    Incompatibility(
        lambda d: d.ray and d.version < (0, 28),
        "the Ray executor hangs while it returns routes",
        "use the mp executor or " + _NEWER,
        GITHUB + "NVIDIA-NeMo/RL/pull/4057",
    ),
    Incompatibility(
        lambda d: not d.prefix_caching and d.version >= (0, 31),
        "its store of routes is keyed by cached blocks, and prefix caching is off",
        "turn it on (rollout.engine.enable_prefix_caching=true)",
        VLLM + "pull/45635",
    ),
)
