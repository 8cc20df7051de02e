"""Incompatible combinations of vLLM version, platform and settings.

Their routes are wrong or missing, so they are refused before a run. Each names the upstream issue
or pull request. Faults that depend on a request (a preempted request, a stale row) are detected in
its reply by replay/checks.py, and by the detector before the first update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from onepolicy.config.rules import Rule, broken, require
from onepolicy.replay.payloads.vllm import ALL_ZERO_ISSUE, Version, parse_version

GITHUB = "https://github.com/"
VLLM = GITHUB + "vllm-project/vllm/"
CPU: Version = (0, 30)
"""The only version whose CPU build records routes."""
PREFILL_DECODE = ("Nixl", "MoRIIO", "Mooncake")
"""Prefixes of the names of connectors that split prefill and decode."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """The version and settings of a vLLM engine that decide whether its routes can be right."""

    version: Version
    platform: str
    """`device_type` of its platform: cpu, cuda, npu ..."""
    pipeline: int = 1
    """Ranks of pipeline parallelism. `context` is decode or prefill, `data` is data parallelism."""
    context: int = 1
    data: int = 1
    eplb: bool = False
    """Experts are moved between ranks during the run."""
    connector: str = ""
    """KV connector: offloading, split prefill and decode."""
    speculative: bool = False
    async_scheduling: bool = False
    prefix_caching: bool = True
    hybrid: bool = False
    """Recurrent layers beside attention."""
    ray: bool = False
    monolithic: bool = False
    """Some MoE kernel routes inside itself. Known after the model is loaded."""

    @property
    def release(self) -> str:
        """The version as vLLM writes it."""
        return ".".join(map(str, self.version))


def deployment_of(config: Any, version: str, platform: str) -> Deployment:
    """Read the deployment from a VllmConfig, or from its JSON (a server's /server_info).

    Settings that the config lacks are off.
    """
    parallel = _setting(config, "parallel_config")
    connector = _setting(_setting(config, "kv_transfer_config"), "kv_connector")
    executor = _setting(parallel, "distributed_executor_backend")
    scheduler = _setting(config, "scheduler_config")
    cache = _setting(config, "cache_config")
    return Deployment(
        version=parse_version(version),
        platform=platform,
        pipeline=_setting(parallel, "pipeline_parallel_size") or 1,
        context=max(
            _setting(parallel, f"{phase}_context_parallel_size") or 1
            for phase in ("decode", "prefill")
        ),
        data=_setting(parallel, "data_parallel_size") or 1,
        eplb=bool(_setting(parallel, "enable_eplb")),
        connector=connector or "",
        speculative=_setting(config, "speculative_config") is not None,
        async_scheduling=bool(_setting(scheduler, "async_scheduling")),
        prefix_caching=_setting(cache, "enable_prefix_caching") is not False,
        hybrid=bool(_setting(_setting(config, "model_config"), "is_hybrid")),
        ray="ray" in str(executor).lower(),
    )


def _setting(config: Any, name: str) -> Any:
    if isinstance(config, Mapping):
        return config.get(name)
    return getattr(config, name, None)


def check_route_compatibility(deployment: Deployment) -> None:
    """Raise UsageError with reason, fix and source if the deployment's routes are known wrong."""
    require(broken(INCOMPATIBILITIES, deployment))


def _routes(
    when: Callable[[Deployment], bool], why: str, fix: str, source: str
) -> Rule[Deployment]:
    """Return the rule of deployments whose routes are known to be wrong."""
    return Rule("vllm {release} with routes", when, why, fix, source=source)


_NEWER = "use 0.28 to 0.30"

INCOMPATIBILITIES = (
    _routes(lambda d: d.version < (0, 14), "it cannot return routes", _NEWER, VLLM + "pull/28284"),
    _routes(
        lambda d: d.platform == "cpu" and d.version < (0, 27),
        "the CPU's MoE kernel selects experts itself and all routes stay zero",
        "`make vllm` installs 0.30.0",
        ALL_ZERO_ISSUE,
    ),
    _routes(
        lambda d: d.platform == "cpu" and (0, 27) <= d.version < CPU,
        "the CPU's MoE kernel is monolithic, which stops its start",
        "`make vllm` installs 0.30.0",
        VLLM + "pull/44214",
    ),
    _routes(
        lambda d: d.platform == "cpu" and d.version > CPU,
        "routes need its second model runner, and that needs Triton, which CPU builds lack",
        "`make vllm` installs 0.30.0",
        VLLM + "pull/45635",
    ),
    _routes(
        lambda d: d.platform == "npu",
        "Ascend returns zeros, or the routes of one tensor-parallel rank as those of the batch",
        "record routes by a second forward (replay.source=reprefill)",
        f"{GITHUB}vllm-project/vllm-ascend/issues/16314 and /15451",
    ),
    _routes(
        lambda d: d.version == (0, 15),
        "the capture is bound before it exists and all routes stay zero",
        _NEWER,
        VLLM + "pull/33013",
    ),
    _routes(
        lambda d: d.eplb and d.version < (0, 16),
        "expert balancing is on and ids are physical, not logical",
        "turn it off or " + _NEWER,
        VLLM + "pull/33013",
    ),
    _routes(
        lambda d: d.monolithic and d.version < (0, 28),
        "a MoE kernel is monolithic and its routes stay zero without a sign",
        _NEWER + ", which refuses such kernels",
        ALL_ZERO_ISSUE,
    ),
    _routes(
        lambda d: d.pipeline > 1,
        "pipeline stages record different layers and overwrite each other's",
        "set pipeline_parallel_size=1",
        VLLM + "pull/35623",
    ),
    _routes(
        lambda d: d.context > 1,
        "context parallelism splits the tokens the rows stand for",
        "turn it off",
        VLLM + "pull/28284",
    ),
    _routes(
        lambda d: d.data > 1 and d.version != (0, 21),
        "the data-parallel rank of a row is guessed from tensor sizes, and wrong where they "
        "coincide",
        "start one engine per replica",
        VLLM + "pull/37879 and /50874",
    ),
    _routes(
        lambda d: d.async_scheduling and d.version < (0, 21),
        "asynchronous scheduling overwrites routes before they are read",
        "turn it off",
        VLLM + "pull/28284",
    ),
    _routes(
        lambda d: d.async_scheduling and d.version == (0, 21),
        "asynchronous scheduling is not supported",
        "turn it off",
        VLLM + "pull/39917",
    ),
    _routes(
        lambda d: d.speculative and d.version < (0, 21),
        "rows of rejected draft tokens were never checked",
        "turn speculative decoding off or " + _NEWER,
        VLLM + "pull/39917",
    ),
    _routes(
        lambda d: d.speculative and (0, 22) <= d.version < (0, 26),
        "the draft model's first layer overwrites the model's",
        "turn speculative decoding off or use 0.26 or newer",
        VLLM + "pull/48622",
    ),
    _routes(
        lambda d: bool(d.connector) and d.version < (0, 31),
        "tokens whose keys come through a KV connector have another request's routes",
        "leave out the connector",
        VLLM + "pull/39568",
    ),
    _routes(
        lambda d: d.connector.startswith(PREFILL_DECODE),
        "the routes of a split prefill never reach the decoding engine",
        "let one engine do both",
        VLLM + "issues/55584",
    ),
    _routes(
        lambda d: d.hybrid and d.version < (0, 18),
        "rows of a model with recurrent layers are looked up in another cache group",
        _NEWER,
        VLLM + "pull/35744",
    ),
    _routes(
        lambda d: d.ray and d.version < (0, 28),
        "the Ray executor hangs while it returns routes",
        "use the mp executor or " + _NEWER,
        GITHUB + "NVIDIA-NeMo/RL/pull/4057",
    ),
    _routes(
        lambda d: not d.prefix_caching and d.version >= (0, 31),
        "its store of routes is keyed by cached blocks, and prefix caching is off",
        "turn it on (rollout.engine.enable_prefix_caching=true)",
        VLLM + "pull/45635",
    ),
)
