"""Settings of a run that contradict each other, across sections. A run with one does not start."""

from __future__ import annotations

from onepolicy.config.cluster import RayCluster
from onepolicy.config.engine import SGLangConfig, VLLMEngineConfig
from onepolicy.config.lora import LoraConfig
from onepolicy.config.numerics import ON_POLICY
from onepolicy.config.quant import Int8
from onepolicy.config.replay import R2, RolloutReplay, WeightsReplay
from onepolicy.config.rules import Rule
from onepolicy.config.sections import Sections
from onepolicy.config.task import EpisodeTask

Rules = tuple[Rule[Sections], ...]


def on_policy(run: Sections) -> bool:
    """Return whether engine and trainer are equal to the bit."""
    return run.numerics == ON_POLICY


def under_ray(run: Sections) -> bool:
    """Return whether Ray places the run's processes."""
    return isinstance(run.cluster, RayCluster)


def reprefills(run: Sections) -> bool:
    """Return whether a second copy of the model records the routes."""
    return isinstance(run.replay, RolloutReplay) and run.replay.source == "reprefill"


def native_adapter(run: Sections) -> bool:
    """Return whether the engine is sent A and B of an adapter."""
    return run.train.lora is not None and run.train.lora.sync == "native"


def _pressed(run: Sections) -> bool:
    return run.rollout.pressure is not None


def _nf4(run: Sections) -> bool:
    return run.train.lora is not None and run.train.lora.base == "nf4"


def _is_server(run: Sections) -> bool:
    return not run.rollout.engine.can.in_process


def _tensor_parallel(run: Sections) -> int:
    engine = run.rollout.engine
    if isinstance(engine, VLLMEngineConfig):
        return engine.tensor_parallel_size
    return 1


def _gpus_per_replica(run: Sections) -> float | None:
    if isinstance(run.cluster, RayCluster):
        return run.cluster.gpus_per_replica
    return None


def _foreign_targets(lora: LoraConfig | None, run: Sections) -> str:
    """Return the targets whose A and B the engine cannot compute with."""
    if lora is None or lora.targets is None:
        return ""
    return " and ".join(
        each for each in lora.targets if each not in run.rollout.engine.can.adapters
    )


SAMPLING: Rules = (
    Rule(
        "rollout.sampling",
        lambda run: run.rollout.sampling.top_p < 1 or run.rollout.sampling.top_k > 0,
        "top_p={rollout.sampling.top_p} top_k={rollout.sampling.top_k} narrow the sampled "
        "distribution, but the trainer's softmax has full support, so every importance ratio would "
        "be wrong",
        "train with top_p=1 top_k=0 (0 is every token; the vocabulary's size, which recipes do not "
        "know, is refused too; eval.top_p and eval.top_k may narrow evaluation)",
    ),
    Rule(
        "rollout.group_size",
        lambda run: run.rollout.group_size < 2 and run.objective.compares_groups,
        "GRPO compares siblings, so a group of 1 never has an advantage",
        "use 2 or more, or objective.baseline = none or critic",
    ),
    Rule(
        "objective.num_minibatches",
        lambda run: run.rollout.prompts_per_step % run.objective.num_minibatches != 0,
        "{objective.num_minibatches} does not divide rollout.prompts_per_step "
        "{rollout.prompts_per_step}",
        "groups are never split, so set it to a divisor",
    ),
    Rule(
        "objective.overlong_buffer",
        lambda run: isinstance(run.task, EpisodeTask) and run.objective.overlong_buffer > 0,
        "measures one response against rollout.sampling.max_tokens, but an episode of task.kind = "
        "{task.kind} has several",
        "set it to 0 (task.max_tokens limits an episode)",
    ),
    Rule(
        "replay.mode",
        lambda run: (
            isinstance(run.replay, WeightsReplay)
            and run.replay.source == "engine"
            and not run.rollout.engine.can.combine_weights
        ),
        "weights needs the combine weights, which rollout.engine.kind = {rollout.engine.kind} does "
        "not return",
        "use r3",
    ),
    Rule(
        "rollout.engine.dtype",
        lambda run: (
            (run.model.dtype, run.rollout.engine.dtype) == ("bfloat16", "float32")
            and not run.rollout.engine.can.embedded
        ),
        "float32, with which {rollout.engine.kind} reads the checkpoint unrounded, but model.dtype "
        "= bfloat16 trains it rounded",
        "set it to bfloat16",
    ),
    Rule(
        "rollout.engine.tensor_parallel_size",
        lambda run: _tensor_parallel(run) > 1 and not under_ray(run),
        "{rollout.engine.tensor_parallel_size}, but an engine in the learner's process has that "
        "one device",
        "set cluster.kind = ray, or start a server (onepolicy engine serve) and use kind = "
        "vllm-server",
    ),
    Rule(
        "cluster.gpus_per_replica",
        lambda run: (
            _tensor_parallel(run) > 1
            and _gpus_per_replica(run) not in (None, 0, _tensor_parallel(run))
        ),
        "{cluster.gpus_per_replica:g}, but rollout.engine.tensor_parallel_size = "
        "{rollout.engine.tensor_parallel_size} takes {rollout.engine.tensor_parallel_size} GPUs",
        "leave cluster.gpus_per_replica out",
    ),
)

LOSS: Rules = (
    Rule(
        "correction",
        lambda run: run.correction.surrogate == "pg" and run.objective.loss.has_ratio,
        "{correction.name} multiplies advantage * log p by the ratio new/rollout, which is inside "
        "the surrogate {objective.surrogate} already and would count twice",
        "set objective.surrogate = pg (presets rloo, reinforce), or take a correction with "
        "old/rollout, or ppo-is",
    ),
    Rule(
        "correction",
        lambda run: run.correction.surrogate == "ppo" and not run.objective.loss.has_ratio,
        "{correction.name} makes the rollout the behaviour policy of the surrogate's ratio, but "
        "{objective.surrogate} has none, so nothing would be corrected",
        "choose pg-tis or one with old/rollout",
    ),
    Rule(
        "objective.reduction",
        lambda run: (
            run.objective.reduction in ("prompt-mean", "episode-mean")
            and run.correction.scales
            and run.correction.normalise != "batch"
        ),
        "{correction.name} scales all weights by a mean over slots or samples, but "
        "{objective.reduction} has neither",
        "use another reduction",
    ),
    Rule(
        "replay.mode",
        lambda run: run.correction.bypass and isinstance(run.replay, R2),
        "r2 replays the routes of the scoring forward, which {correction.name} leaves out",
        "choose one",
    ),
    Rule(
        "objective.kl.where",
        lambda run: run.correction.bypass and run.objective.kl.in_reward,
        "reward is set before the update from the trainer's log-probabilities, which "
        "{correction.name} does not compute",
        "use loss",
    ),
    Rule(
        "objective.kl.importance",
        lambda run: (
            run.correction.bypass
            and run.objective.kl.in_loss
            and run.objective.kl.importance == "old"
        ),
        "with {correction.name} there is no old policy",
        "use rollout",
    ),
)

TRAINER: Rules = (
    Rule(
        "train.reuse_scoring_forward",
        lambda run: bool(run.train.reuse_scoring_forward and isinstance(run.replay, R2)),
        "leaves no second forward for replay.mode = r2 to replay in",
        "choose one",
    ),
    Rule(
        "train.reuse_scoring_forward",
        lambda run: bool(run.train.reuse_scoring_forward and run.objective.num_minibatches > 1),
        "needs objective.num_minibatches = 1, because later minibatches have other weights",
        "leave it out",
    ),
    Rule(
        "train.reuse_scoring_forward",
        lambda run: bool(run.train.reuse_scoring_forward and run.train.activation_checkpointing),
        "keeps the activations that train.activation_checkpointing drops",
        "choose one",
    ),
    Rule(
        "train.autocast",
        lambda run: run.train.autocast != "off" and run.model.dtype == "bfloat16",
        "{train.autocast} is for float32 parameters, but model.dtype = bfloat16",
        "set it to off, or model.dtype to float32",
    ),
    Rule(
        "rollout.engine.kind",
        lambda run: (
            run.train.ranks > 0
            and not under_ray(run)
            and not run.rollout.engine.can.shares_process_groups
        ),
        "{rollout.engine.kind} has its own process groups in this process, which clash with those "
        "of train.ranks",
        "use vllm-server or hf, or cluster.kind = ray, which gives it a process of its own",
    ),
    Rule(
        "train.ranks",
        lambda run: run.train.ranks > 0 and on_policy(run),
        "invariant operators do not work on sharded parameters",
        "set it to 0, or numerics to fast",
    ),
    Rule(
        "model.dtype",
        lambda run: run.train.ranks > 0 and run.model.dtype == "bfloat16",
        "the shards of train.ranks are float32",
        "set train.fsdp_param_dtype = bfloat16 instead, which gathers them rounded",
    ),
    Rule(
        "rollout.engine.kind",
        lambda run: under_ray(run) and _is_server(run),
        "{rollout.engine.kind} is a server of its own, which cluster.kind = ray does not place",
        "use hf or vllm, or cluster.kind = local",
    ),
    Rule(
        "rollout.quant.activations",
        lambda run: (
            under_ray(run)
            and isinstance(run.rollout.quant, Int8)
            and run.rollout.quant.activations == "static"
        ),
        "static scales are calibrated in this process only, not in the replicas of cluster.kind = "
        "ray",
        "leave it out (dynamic), or cluster.kind = local",
    ),
    Rule(
        "train.device",
        lambda run: under_ray(run) and ":" in run.train.device,
        "{train.device}, but with cluster.kind = ray it is Ray that says which device a process "
        "gets",
        "use auto, cpu or cuda",
    ),
)


def _same_as_model(name: str) -> Rule[Sections]:
    """Return the rule that engine and model have the same value of this setting."""
    return Rule(
        f"rollout.engine.{name}",
        lambda run: (
            on_policy(run) and getattr(run.rollout.engine, name) != getattr(run.model, name)
        ),
        f"{{rollout.engine.{name}}} and model.{name}: {{model.{name}}}, but numerics = on-policy "
        "needs the same on both sides",
        f"leave rollout.engine.{name} out, it then follows model.{name}",
    )


ON_POLICY_NUMERICS: Rules = (
    Rule(
        "rollout.engine.kind",
        lambda run: on_policy(run) and not run.rollout.engine.can.embedded,
        "{rollout.engine.kind}, but with numerics = on-policy engine and trainer compute with the "
        "same kernels, which only the embedded engine shares with it",
        "use hf, or numerics = fast with replay.mode = r3 (docs/on_policy.md says how near vLLM "
        "comes)",
    ),
    _same_as_model("dtype"),
    _same_as_model("lm_head"),
    Rule(
        "rollout.quant",
        lambda run: on_policy(run) and run.rollout.quant is not None,
        "{rollout.quant.format}, but with numerics = on-policy engine and trainer compute with the "
        "same weights",
        "leave one out",
    ),
    Rule(
        "train.autocast",
        lambda run: on_policy(run) and run.train.autocast != "off",
        "{train.autocast}, but with numerics = on-policy the trainer computes on the parameters as "
        "they are",
        "set it to off (model.dtype = bfloat16 trains bfloat16 with float32 masters)",
    ),
    Rule(
        "replay.source",
        lambda run: on_policy(run) and reprefills(run),
        "reprefill is for engines that return no routes",
        "with numerics = on-policy the embedded engine's own are exact, set it to engine",
    ),
)

PRESSURE: Rules = (
    Rule(
        "rollout.pressure",
        lambda run: _pressed(run) and not run.rollout.engine.can.embedded,
        "{rollout.pressure.kind} is pressure on the routers of the embedded engine, but "
        "rollout.engine.kind = {rollout.engine.kind}",
        "use hf, or leave it out",
    ),
    Rule(
        "rollout.pressure",
        lambda run: _pressed(run) and under_ray(run),
        "{rollout.pressure.kind} is for an engine in this process",
        "set cluster.kind = local, or leave it out",
    ),
    Rule(
        "rollout.pressure",
        lambda run: _pressed(run) and on_policy(run),
        "{rollout.pressure.kind} makes engine and trainer differ, but with numerics = on-policy "
        "they are equal to the bit",
        "leave it out, or set numerics to fast",
    ),
    Rule(
        "rollout.pressure",
        lambda run: _pressed(run) and run.rollout.quant is not None,
        "{rollout.pressure.kind} on an engine of rollout.quant = {rollout.quant.format} would mix "
        "two gaps",
        "leave one out",
    ),
    Rule(
        "rollout.pressure",
        lambda run: _pressed(run) and reprefills(run),
        "{rollout.pressure.kind}, but replay.source = reprefill records the routes of a copy "
        "without it",
        "set replay.source to engine",
    ),
    Rule(
        "replay.min_agreement",
        lambda run: (
            _pressed(run)
            and not reprefills(run)
            and isinstance(run.replay, RolloutReplay)
            and run.replay.min_agreement > 0
        ),
        "{replay.min_agreement} refuses routes that the trainer would not choose, and "
        "rollout.pressure makes such routes on purpose",
        "set it to 0",
    ),
)

STALENESS: Rules = (
    Rule(
        "rollout.max_staleness",
        lambda run: run.rollout.overlaps and not run.rollout.engine.can.updates_while_sampling,
        "an engine of kind {rollout.engine.kind} takes weights only between requests, so that "
        "nothing could be sampled over an update",
        "use rollout.engine.kind = hf, or without Ray vllm-server",
    ),
    Rule(
        "rollout.max_staleness",
        lambda run: run.rollout.overlaps and on_policy(run),
        "{rollout.max_staleness} trains on tokens of older weights, which cannot have the newest "
        "ones' log-probabilities to the bit, as numerics = on-policy asks",
        "set rollout.max_staleness to 0 or off, or numerics to fast",
    ),
    Rule(
        "replay.source",
        lambda run: run.rollout.overlaps and reprefills(run),
        "reprefill records routes when a step's samples are complete, with other weights than "
        "sampled them where rollout.max_staleness = {rollout.max_staleness}",
        "set it to engine, or set rollout.max_staleness to 0 or off",
    ),
)

ADAPTERS: Rules = (
    Rule(
        "train.lora",
        lambda run: run.train.lora is not None and on_policy(run),
        "the trainer adds B A x to W x and the engine multiplies by W + B A, which numerics = "
        "on-policy forbids",
        "set numerics to fast, or leave it out",
    ),
    Rule(
        "train.lora",
        lambda run: run.train.lora is not None and run.objective.has_critic,
        "a critic is trained whole, with as much memory as full training",
        "choose an objective without one, or leave it out",
    ),
    Rule(
        "optim.state",
        lambda run: run.train.lora is not None and run.optim.state != "device",
        "{optim.state} is for the state of whole models",
        "that of adapters is small, so leave it out beside train.lora",
    ),
    Rule(
        "train.lora",
        lambda run: (
            run.train.lora is not None
            and under_ray(run)
            and not run.rollout.engine.can.adapters_under_ray
        ),
        "under cluster.kind = ray only rollout.engine.kind = hf was run with adapters, not "
        "{rollout.engine.kind}",
        "use hf, or cluster.kind = local",
    ),
    Rule(
        "train.lora.base",
        lambda run: _nf4(run) and native_adapter(run),
        "nf4 with train.lora.sync = native: the engine would add A and B to the weights that it "
        "loaded, which are not the trainer's dequantised ones",
        "use train.lora.sync = merged",
    ),
    Rule(
        "train.lora.base",
        lambda run: _nf4(run) and run.train.ranks > 0,
        "nf4 is not sharded over train.ranks = {train.ranks}",
        "set train.ranks to 0, or leave it out, and the frozen weights keep model.dtype",
    ),
    Rule(
        "train.lora.base",
        lambda run: _nf4(run) and under_ray(run),
        "nf4 was not run under cluster.kind = ray",
        "use local, or leave it out, and the frozen weights keep model.dtype",
    ),
    Rule(
        "train.lora.sync",
        lambda run: native_adapter(run) and under_ray(run),
        "native is not sent to replicas of Ray",
        "use train.lora.sync = merged",
    ),
    Rule(
        "train.lora.sync",
        lambda run: native_adapter(run) and run.rollout.quant is not None,
        "native computes with the frozen weights as the engine started with them, but "
        "rollout.quant makes them anew at every sync",
        "use train.lora.sync = merged",
    ),
    Rule(
        "train.lora.sync",
        lambda run: native_adapter(run) and reprefills(run),
        "native, but replay.source = reprefill pushes whole weights to its copy",
        "use train.lora.sync = merged",
    ),
    Rule(
        "train.lora.sync",
        lambda run: (
            native_adapter(run)
            and isinstance(run.rollout.engine, SGLangConfig)
            and run.rollout.engine.pause != "abort"
        ),
        "native, but with rollout.engine.pause = {rollout.engine.pause} a request keeps the "
        "adapter that it began with, and SGLang waits for it before it unloads that",
        "set rollout.engine.pause to abort, or use train.lora.sync = merged",
    ),
    Rule(
        "train.lora.sync",
        lambda run: native_adapter(run) and _is_server(run) and run.train.ranks > 0,
        "native to a server was never run with train.ranks = {train.ranks}",
        "use train.lora.sync = merged",
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
)

CONTRADICTIONS: Rules = (
    *SAMPLING,
    *LOSS,
    *TRAINER,
    *ON_POLICY_NUMERICS,
    *PRESSURE,
    *STALENESS,
    *ADAPTERS,
)
