"""Rules of options: on-policy numerics, quantised engines, pressure, staleness, adapters."""

from __future__ import annotations

from collections.abc import Callable

from onepolicy.config.cluster import RayCluster
from onepolicy.config.engine import (
    VLLM_FORMATS,
    SGLangConfig,
    VLLMEngineConfig,
    VLLMServerConfig,
)
from onepolicy.config.lora import LoraConfig
from onepolicy.config.numerics import ON_POLICY
from onepolicy.config.pressure import RoutingPressure
from onepolicy.config.quant import Int8, QuantFormat
from onepolicy.config.replay import RolloutReplay
from onepolicy.config.rules import Of, Rule, each_once, error
from onepolicy.config.run import RunConfig

Rules = tuple[Rule[RunConfig], ...]


def on_policy(run: RunConfig) -> bool:
    """Return whether engine and trainer are equal to the bit."""
    return run.numerics == ON_POLICY


def under_ray(run: RunConfig) -> bool:
    """Return whether Ray places the run's processes."""
    return isinstance(run.cluster, RayCluster)


def reprefills(run: RunConfig) -> bool:
    """Return whether a second copy of the model records the routes."""
    return isinstance(run.replay, RolloutReplay) and run.replay.source == "reprefill"


def native_adapter(run: RunConfig) -> bool:
    """Return whether the engine is sent A and B of an adapter."""
    return run.train.lora is not None and run.train.lora.sync == "native"


def _pressed(run: RunConfig) -> bool:
    return run.rollout.pressure is not None


def _runner_up(run: RunConfig, test: Callable[[RoutingPressure], bool]) -> bool:
    pressure = run.rollout.pressure
    return pressure is not None and pressure.kind == "runner-up" and test(pressure)


def _nf4(run: RunConfig) -> bool:
    return run.train.lora is not None and run.train.lora.base == "nf4"


def is_server(run: RunConfig) -> bool:
    """Return whether the engine is a server of its own."""
    return not run.rollout.engine.can.in_process


def _foreign_targets(lora: LoraConfig | None, run: RunConfig) -> str:
    """Return the targets whose A and B the engine cannot compute with."""
    if lora is None or lora.targets is None:
        return ""
    return " and ".join(
        each for each in lora.targets if each not in run.rollout.engine.can.adapters
    )


def _same_as_model(name: str) -> Rule[RunConfig]:
    """Return the rule that engine and model have the same value of this setting."""
    return error(
        f"rollout.engine.{name}: {{rollout.engine.{name}}} and model.{name}: {{model.{name}}}, but "
        "numerics = on-policy needs the same on both sides; leave "
        f"rollout.engine.{name} out, it then follows model.{name}",
        lambda run: (
            on_policy(run) and getattr(run.rollout.engine, name) != getattr(run.model, name)
        ),
    )


ON_POLICY_NUMERICS: Rules = (
    error(
        "rollout.engine.kind: {rollout.engine.kind}, but with numerics = on-policy engine and "
        "trainer compute with the same kernels, which only the embedded engine shares with it; "
        "use hf, or numerics = fast with replay.mode = r3 (docs/on_policy.md says how near vLLM "
        "comes)",
        lambda run: on_policy(run) and not run.rollout.engine.can.embedded,
    ),
    _same_as_model("dtype"),
    _same_as_model("lm_head"),
    error(
        "rollout.quant: {rollout.quant.format}, but with numerics = on-policy engine and trainer "
        "compute with the same weights; leave one out",
        lambda run: on_policy(run) and run.rollout.quant is not None,
    ),
    error(
        "train.autocast: {train.autocast}, but with numerics = on-policy the trainer computes on "
        "the parameters as they are; set it to off (model.dtype = bfloat16 trains bfloat16 with "
        "float32 masters)",
        lambda run: on_policy(run) and run.train.autocast != "off",
    ),
    error(
        "replay.source: reprefill is for engines that return no routes; with numerics = on-policy "
        "the embedded engine's own are exact, set it to engine",
        lambda run: on_policy(run) and reprefills(run),
    ),
)


def vllm_quant_rules(
    quant: Callable[[Of], QuantFormat | None], dtype: Callable[[Of], str], section: str, engine: str
) -> tuple[Rule[Of], ...]:
    """Return the rules of the format that a vLLM engine is asked for.

    quant, dtype: of the engine. section, engine: paths of these settings, with a dot.
    """

    def where(test: Callable[[QuantFormat], bool]) -> Callable[[Of], bool]:
        def when(of: Of) -> bool:
            asked = quant(of)
            return asked is not None and test(asked)

        return when

    name = f"{section}quant"
    return (
        error(
            f"{name}: vLLM has no method of its own for {{{name}.format}}; use fp8 or int8, or "
            "rollout.engine.kind = hf",
            where(lambda asked: asked.format not in VLLM_FORMATS),
        ),
        error(
            f"{name}.extra_modules: vLLM cannot quantise {{{name}.extra_modules}}; leave it out, "
            "or use rollout.engine.kind = hf",
            where(lambda asked: bool(asked.extra_modules)),
        ),
        error(
            f"{name}.activations: static, but vLLM's int8 leaves activations in bfloat16; leave "
            "it out, or use rollout.engine.kind = hf",
            where(lambda asked: isinstance(asked, Int8) and asked.activations == "static"),
        ),
        error(
            f"{engine}dtype: {{{engine}dtype}}, but vLLM quantises bfloat16 engines only; leave it "
            f"out with {name}",
            lambda of: quant(of) is not None and dtype(of) != "bfloat16",
        ),
    )


def _vllm_quant(run: RunConfig) -> QuantFormat | None:
    if isinstance(run.rollout.engine, VLLMEngineConfig | VLLMServerConfig):
        return run.rollout.quant
    return None


QUANT: Rules = (
    error(
        "rollout.quant: {rollout.quant.format} is not available with rollout.engine.kind = "
        "{rollout.engine.kind}; use hf or vllm, or leave it out",
        lambda run: run.rollout.quant is not None and not run.rollout.engine.can.quant,
    ),
    *vllm_quant_rules(
        _vllm_quant, lambda run: run.rollout.engine.dtype, "rollout.", "rollout.engine."
    ),
    error(
        "rollout.quant.extra_modules: lm_head contradicts rollout.engine.lm_head = float32; leave "
        "one out",
        lambda run: (
            run.rollout.quant is not None
            and "lm_head" in run.rollout.quant.extra_modules
            and run.rollout.engine.lm_head == "float32"
        ),
    ),
)

PRESSURE: Rules = (
    error(
        "rollout.pressure: {rollout.pressure.kind} is pressure on the routers of the embedded "
        "engine, but rollout.engine.kind = {rollout.engine.kind}; use hf, or leave it out",
        lambda run: _pressed(run) and not run.rollout.engine.can.embedded,
    ),
    error(
        "rollout.pressure: {rollout.pressure.kind} is for an engine in this process; set "
        "cluster.kind = local, or leave it out",
        lambda run: _pressed(run) and under_ray(run),
    ),
    error(
        "rollout.pressure: {rollout.pressure.kind} makes engine and trainer differ, but with "
        "numerics = on-policy they are equal to the bit; leave it out, or set numerics to fast",
        lambda run: _pressed(run) and on_policy(run),
    ),
    error(
        "rollout.pressure: {rollout.pressure.kind} on an engine of rollout.quant = "
        "{rollout.quant.format} would mix two gaps; leave one out",
        lambda run: _pressed(run) and run.rollout.quant is not None,
    ),
    error(
        "rollout.pressure: {rollout.pressure.kind}, but replay.source = reprefill records the "
        "routes of a copy without it; set replay.source to engine",
        lambda run: _pressed(run) and reprefills(run),
    ),
    error(
        "replay.min_agreement: {replay.min_agreement} refuses routes that the trainer would not "
        "choose, and rollout.pressure makes such routes on purpose; set it to 0",
        lambda run: (
            _pressed(run)
            and not reprefills(run)
            and isinstance(run.replay, RolloutReplay)
            and run.replay.min_agreement > 0
        ),
    ),
    error(
        "rollout.pressure.layers: {rollout.pressure.layers} is empty or names a layer twice; name "
        "each layer once, or leave it out for all",
        lambda run: (
            run.rollout.pressure is not None
            and run.rollout.pressure.layers is not None
            and not each_once(run.rollout.pressure.layers)
        ),
    ),
    error(
        "rollout.pressure.scale: {rollout.pressure.scale:g}, but with kind = runner-up it is the "
        "share of the tokens; set it to at most 1",
        lambda run: _runner_up(run, lambda pressure: pressure.scale > 1),
    ),
    error(
        "rollout.pressure.weights: {rollout.pressure.weights}, but kind = runner-up has no noisy "
        "weights; leave it out",
        lambda run: _runner_up(run, lambda pressure: pressure.weights),
    ),
)

STALENESS: Rules = (
    error(
        "rollout.max_staleness: an engine of kind {rollout.engine.kind} takes weights only "
        "between requests, so that nothing could be sampled over an update; use "
        "rollout.engine.kind = hf, or without Ray vllm-server",
        lambda run: run.rollout.overlaps and not run.rollout.engine.can.updates_while_sampling,
    ),
    error(
        "replay.source: reprefill records routes when a step's samples are complete, with other "
        "weights than sampled them where rollout.max_staleness = {rollout.max_staleness}; set it "
        "to engine, or set rollout.max_staleness to 0 or off",
        lambda run: run.rollout.overlaps and reprefills(run),
    ),
)

ADAPTERS: Rules = (
    error(
        "train.lora: the trainer adds B A x to W x and the engine multiplies by W + B A, which "
        "numerics = on-policy forbids; set numerics to fast, or leave it out",
        lambda run: run.train.lora is not None and on_policy(run),
    ),
    error(
        "train.lora: a critic is trained whole, with as much memory as full training; choose an "
        "objective without one, or leave it out",
        lambda run: run.train.lora is not None and run.objective.has_critic,
    ),
    error(
        "optim.state: {optim.state} is for the state of whole models; that of adapters is small, "
        "so leave it out beside train.lora",
        lambda run: run.train.lora is not None and run.optim.state != "device",
    ),
    error(
        "train.lora: under cluster.kind = ray only rollout.engine.kind = hf was run with "
        "adapters, not {rollout.engine.kind}; use hf, or cluster.kind = local",
        lambda run: (
            run.train.lora is not None
            and under_ray(run)
            and not run.rollout.engine.can.adapters_under_ray
        ),
    ),
    error(
        "train.lora.base: nf4 with train.lora.sync = native: the engine would add A and B to the "
        "weights that it loaded, which are not the trainer's dequantised ones; use "
        "train.lora.sync = merged",
        lambda run: _nf4(run) and native_adapter(run),
    ),
    error(
        "train.lora.base: nf4 is not sharded over train.ranks = {train.ranks}; set train.ranks to "
        "0, or leave it out, and the frozen weights keep model.dtype",
        lambda run: _nf4(run) and run.train.ranks > 0,
    ),
    error(
        "train.lora.base: nf4 was not run under cluster.kind = ray; use local, or leave it out, "
        "and the frozen weights keep model.dtype",
        lambda run: _nf4(run) and under_ray(run),
    ),
    error(
        "train.lora.sync: native is not sent to replicas of Ray; use train.lora.sync = merged",
        lambda run: native_adapter(run) and under_ray(run),
    ),
    error(
        "train.lora.sync: native computes with the frozen weights as the engine started with "
        "them, but rollout.quant makes them anew at every sync; use train.lora.sync = merged",
        lambda run: native_adapter(run) and run.rollout.quant is not None,
    ),
    error(
        "train.lora.sync: native, but replay.source = reprefill pushes whole weights to its copy; "
        "use train.lora.sync = merged",
        lambda run: native_adapter(run) and reprefills(run),
    ),
    error(
        "train.lora.sync: native, but with rollout.engine.pause = {rollout.engine.pause} a "
        "request keeps the adapter that it began with, and SGLang waits for it before it unloads "
        "that; set rollout.engine.pause to abort, or use train.lora.sync = merged",
        lambda run: (
            native_adapter(run)
            and isinstance(run.rollout.engine, SGLangConfig)
            and run.rollout.engine.pause != "abort"
        ),
    ),
    error(
        "train.lora.sync: native to a server was never run with train.ranks = {train.ranks}; use "
        "train.lora.sync = merged",
        lambda run: native_adapter(run) and is_server(run) and run.train.ranks > 0,
    ),
    Rule(
        "train.lora.sync",
        lambda run: native_adapter(run) and _foreign_targets(run.train.lora, run) != "",
        lambda run: (
            f"native, but rollout.engine.kind = {run.rollout.engine.kind} cannot compute with "
            f"adapters of {_foreign_targets(run.train.lora, run)}"
        ),
        "use train.lora.sync = merged, or drop them from train.lora.targets",
    ),
    error(
        "train.lora.targets: {train.lora.targets} is empty or names a kind of weight twice; name "
        "each kind of weight once, or leave it out",
        lambda run: (
            run.train.lora is not None
            and run.train.lora.targets is not None
            and not each_once(run.train.lora.targets)
        ),
    ),
)
