"""Rules that span sections: settings that contradict each other, or that have no effect together."""

from __future__ import annotations

from typing import Protocol

from onepolicy.config.cluster import ClusterConfig, RayCluster
from onepolicy.config.correction import CorrectionConfig
from onepolicy.config.engine import HFEngineConfig, VLLMEngineConfig
from onepolicy.config.model import ModelConfig, TrainConfig
from onepolicy.config.numerics import ON_POLICY, Numerics
from onepolicy.config.objective import (
    R2,
    CriticConfig,
    FromRollout,
    ObjectiveConfig,
    ReplayConfig,
    WeightsReplay,
    check_pair,
)
from onepolicy.config.quant import Int8
from onepolicy.config.rollout import EvalConfig, RolloutConfig
from onepolicy.config.task import EpisodeTask, TaskConfig


class Sections(Protocol):
    """What the rules read of a RunConfig."""

    @property
    def numerics(self) -> Numerics: ...
    @property
    def model(self) -> ModelConfig: ...
    @property
    def task(self) -> TaskConfig: ...
    @property
    def rollout(self) -> RolloutConfig: ...
    @property
    def replay(self) -> ReplayConfig: ...
    @property
    def correction(self) -> CorrectionConfig: ...
    @property
    def objective(self) -> ObjectiveConfig: ...
    @property
    def train(self) -> TrainConfig: ...
    @property
    def cluster(self) -> ClusterConfig: ...
    @property
    def eval(self) -> EvalConfig: ...
    @property
    def scores_old(self) -> bool: ...


def check_sections(config: Sections) -> None:
    """Raise ValueError for the first rule that the settings break."""
    for rule in RULES:
        rule(config)


def _check_step(config: Sections) -> None:
    """Refuse a step whose rollouts cannot be learned from."""
    sampling = config.rollout.sampling
    if sampling.top_p < 1 or sampling.top_k > 0:
        raise ValueError(
            f"rollout.sampling: top_p={sampling.top_p} top_k={sampling.top_k} narrow what is sampled, but the "
            "trainer's softmax has full support, so every importance ratio would be wrong; train with top_p=1 "
            "top_k=0 (eval.top_p and eval.top_k may narrow evaluation)"
        )
    if config.rollout.group_size < 2 and config.objective.baseline in ("group", "leave-one-out"):
        raise ValueError(
            "rollout.group_size: GRPO compares siblings, so a group of 1 never has an advantage; use 2 or more, or "
            "objective.baseline = none or critic"
        )
    if config.rollout.prompts_per_step % config.objective.num_minibatches:
        raise ValueError(
            f"objective.num_minibatches: {config.objective.num_minibatches} does not divide rollout.prompts_per_step "
            f"{config.rollout.prompts_per_step}; groups are never split"
        )


def _check_evaluation(config: Sections) -> None:
    if config.eval.quantised and config.rollout.quant is None:
        raise ValueError("eval.quantised: has no effect without rollout.quant; leave it out")


def _check_routes(config: Sections) -> None:
    """Refuse routes that the engine cannot return."""
    replay = config.replay
    if (
        isinstance(replay, FromRollout)
        and replay.source == "reprefill"
        and replay.missing != "error"
    ):
        raise ValueError(
            "replay.missing: has no effect with replay.source = reprefill, which records every sample's routes"
        )
    engine = config.rollout.engine
    other = (
        None
        if isinstance(engine, HFEngineConfig)
        else "SGLang"
        if engine.kind == "sglang"
        else "vLLM"
    )
    if other and isinstance(replay, WeightsReplay) and replay.source == "engine":
        raise ValueError(
            f"replay.mode: weights needs the combine weights, which {other} does not return; use r3"
        )
    if other and (config.model.dtype, engine.dtype) == ("bfloat16", "float32"):
        raise ValueError(
            f"rollout.engine.dtype: a float32 {other} reads the checkpoint unrounded, but model.dtype = bfloat16 "
            "trains it rounded; set it to bfloat16"
        )


def _check_scoring_replay(config: Sections) -> None:
    """Refuse r2, which replays the scoring forward's routes, where there is no second forward to replay them in."""
    if isinstance(config.replay, R2) and config.objective.num_minibatches == 1:
        raise ValueError(
            "replay.mode: r2 does nothing with objective.num_minibatches = 1, where scoring and update have the same "
            "weights and choose the same experts; raise objective.num_minibatches, or replay the rollout's routes (r3)"
        )
    if isinstance(config.replay, R2) and config.train.reuse_scoring_forward:
        raise ValueError(
            "train.reuse_scoring_forward: leaves no second forward for replay.mode = r2 to replay in; choose one"
        )


def _check_reuse(config: Sections) -> None:
    """Refuse train.reuse_scoring_forward where the update needs another forward."""
    if config.train.reuse_scoring_forward and config.objective.num_minibatches > 1:
        raise ValueError(
            "train.reuse_scoring_forward: needs objective.num_minibatches = 1; later mini-steps have other weights"
        )
    if config.train.reuse_scoring_forward and config.train.activation_checkpointing:
        raise ValueError(
            "train.reuse_scoring_forward keeps the activations train.activation_checkpointing drops; choose one"
        )


def _check_head(config: Sections) -> None:
    if (
        config.model.lm_head == "float32"
        and config.model.dtype == "float32"
        and config.train.autocast == "off"
    ):
        raise ValueError(
            "model.lm_head: float32 has no effect with model.dtype = float32 and train.autocast = off; leave it out"
        )


def _check_autocast(config: Sections) -> None:
    if config.train.autocast != "off" and config.model.dtype == "bfloat16":
        raise ValueError(
            "train.autocast: has no effect on bfloat16 parameters; set it to off or model.dtype to float32"
        )


def _check_correction(config: Sections) -> None:
    check_pair(config.objective, config.correction)


def _check_on_policy(config: Sections) -> None:
    """ValueError for what cannot be, or has no effect, where both sides agree to the bit."""
    if config.numerics != ON_POLICY:
        return
    engine, model = config.rollout.engine, config.model
    if not isinstance(engine, HFEngineConfig):
        raise ValueError(
            f"rollout.engine.kind: {engine.kind}, but with numerics = on-policy engine and trainer compute with the "
            "same kernels, which only the embedded engine shares with it; use hf, or numerics = fast with replay.mode "
            "= r3 (docs/on_policy.md says how near vLLM comes)"
        )
    for name in ("dtype", "lm_head"):
        theirs, ours = getattr(engine, name), getattr(model, name)
        if theirs != ours:
            raise ValueError(
                f"rollout.engine.{name}: {theirs} and model.{name}: {ours}, but numerics = on-policy needs the same on "
                f"both sides; leave rollout.engine.{name} out, it then follows model.{name}"
            )
    if config.rollout.quant is not None:
        raise ValueError(
            f"rollout.quant: {config.rollout.quant.format}, but with numerics = on-policy engine and trainer compute "
            "with the same weights; leave one out"
        )
    if config.train.autocast != "off":
        raise ValueError(
            f"train.autocast: {config.train.autocast}, but with numerics = on-policy the trainer computes on the "
            "parameters as they are; set it to off (model.dtype = bfloat16 trains bfloat16 with float32 masters)"
        )
    if isinstance(config.replay, FromRollout) and config.replay.source == "reprefill":
        raise ValueError(
            "replay.source: reprefill is for engines that return no routes; with numerics = on-policy the embedded "
            "engine's own are exact, set it to engine"
        )
    _check_on_policy_correction(config)


def _check_on_policy_correction(config: Sections) -> None:
    correction = config.correction
    why = "with numerics = on-policy, where old / rollout is exactly 1; leave it out"
    if correction.ratio == "old/rollout" and correction.weight.level != "none":
        raise ValueError(f"correction.weight: {correction.name} has no effect {why}")
    for gate in correction.gates:
        if (gate.ratio or correction.ratio) == "old/rollout" and gate.statistic != "trainer_prob":
            raise ValueError(
                f"correction.gates: {gate.label} of {correction.name} rejects nothing {why}"
            )


def _check_staleness(config: Sections) -> None:
    """ValueError for what needs the weights that sampled, which the trainer no longer has."""
    rollout = config.rollout
    if not rollout.overlaps:
        return
    mend = "set rollout.max_staleness to 0 or off"
    if rollout.engine.kind == "vllm":
        other = "hf" if config.cluster.kind == "ray" else "vllm-server"
        raise ValueError(
            "rollout.max_staleness: an engine of kind vllm takes weights only between requests, so that nothing could "
            f"be sampled over an update; use rollout.engine.kind = {other}"
        )
    if config.numerics == ON_POLICY:
        raise ValueError(
            f"rollout.max_staleness: {rollout.max_staleness} trains on tokens of older weights, which cannot have the "
            f"newest ones' log-probabilities to the bit, as numerics = on-policy asks; {mend}, or numerics to fast"
        )
    replay = config.replay
    if isinstance(replay, FromRollout) and replay.source == "reprefill":
        raise ValueError(
            "replay.source: reprefill records routes when a step's samples are complete, with other weights than "
            f"sampled them where rollout.max_staleness = {rollout.max_staleness}; set it to engine, or {mend}"
        )


def _check_clips(config: Sections) -> None:
    """Bounds on how far one update has moved from the last, where there is no second update on a batch.

    With one mini-step all of a batch is evaluated with the weights it was scored with: new / old is 1, and the
    critic's new value is its old one. What a preset brings may stand: it is right for more mini-steps.
    """
    objective = config.objective
    if objective.num_minibatches > 1:
        return
    preset = ObjectiveConfig(preset=objective.preset)
    mend = "raise objective.num_minibatches, or leave it out"
    equal = config.numerics == ON_POLICY  # so new / rollout is 1 as well
    if config.scores_old or equal:
        other = "" if equal else " (correction.preset = ppo-is bounds new / rollout)"
        for name in ("clip_low", "clip_high", "dual_clip", "tau_positive", "tau_negative"):
            if (value := getattr(objective, name)) != getattr(preset, name):
                raise ValueError(
                    f"objective.{name}: {value} has no effect with objective.num_minibatches = 1, where the ratio "
                    f"new / old is 1 in the only update of a batch; {mend}{other}"
                )
    if objective.critic is not None and objective.critic.clip != CriticConfig().clip:
        raise ValueError(
            f"objective.critic.clip: {objective.critic.clip} has no effect with objective.num_minibatches = 1, where no "
            f"value has moved before the only update of a batch; {mend}"
        )


def _check_turns(config: Sections) -> None:
    """What means another thing, or nothing, by whether episodes have one turn or several."""
    several = isinstance(config.task, EpisodeTask)
    if several and config.objective.overlong_buffer:
        raise ValueError(
            "objective.overlong_buffer: measures one response against rollout.sampling.max_tokens, but an episode "
            f"of task.kind = {config.task.kind} has several; set it to 0 (task.max_tokens limits an episode)"
        )
    fed_once = not several and isinstance(config.rollout.engine, HFEngineConfig | VLLMEngineConfig)
    if (
        fed_once
        and isinstance(config.replay, FromRollout)
        and config.replay.duplicate_routes != "as-sampled"
    ):
        raise ValueError(
            f"replay.duplicate_routes: {config.replay.duplicate_routes} has no effect, because episodes of one turn on an engine in this "
            "process feed every token once; leave it out"
        )


def _check_anchor(config: Sections) -> None:
    """What would need the policy before the update, which correction.ratio = new/rollout does not score."""
    if config.scores_old:
        return
    name = config.correction.name
    if config.train.reuse_scoring_forward:
        raise ValueError(
            f"train.reuse_scoring_forward: {name} has no scoring forward to reuse; leave it out"
        )
    if isinstance(config.replay, R2):
        raise ValueError(
            f"replay.mode: r2 replays the routes of the scoring forward, which {name} leaves out"
        )
    if config.objective.kl.where == "reward":
        raise ValueError(
            "objective.kl.where: reward is set before the update from the trainer's log-probabilities, which "
            f"{name} does not compute; use loss"
        )
    if config.objective.kl.importance == "old":
        raise ValueError(
            f"objective.kl.importance: with {name} there is no old policy; use rollout"
        )


def _check_ranks(config: Sections) -> None:
    """What cannot be on a learner of several processes."""
    if not config.train.ranks:
        return
    if config.rollout.engine.kind == "vllm" and config.cluster.kind == "local":
        raise ValueError(
            "rollout.engine.kind: vllm has its own process groups in this process, which clash with those of "
            "train.ranks; use vllm-server or hf, or cluster.kind = ray, which gives it a process of its own"
        )
    if config.numerics == ON_POLICY:
        raise ValueError(
            "train.ranks: invariant operators do not work on sharded parameters; set it to 0, or numerics to fast"
        )
    if config.model.dtype == "bfloat16":
        raise ValueError(
            "model.dtype: the shards of train.ranks are float32; set train.fsdp_param_dtype = bfloat16 instead, which "
            "gathers them rounded"
        )


def _check_cluster(config: Sections) -> None:
    """What cannot be where Ray places the engine."""
    cluster, engine = config.cluster, config.rollout.engine
    if not isinstance(cluster, RayCluster):
        return
    if not isinstance(engine, HFEngineConfig | VLLMEngineConfig):
        raise ValueError(
            f"rollout.engine.kind: {engine.kind} is a server of its own, which cluster.kind = ray does not place; "
            "use hf or vllm, or cluster.kind = local"
        )
    if isinstance(config.rollout.quant, Int8) and config.rollout.quant.activations == "static":
        raise ValueError(
            "rollout.quant.activations: static scales are calibrated in this process only, not in the replicas of "
            "cluster.kind = ray; leave it out (dynamic), or cluster.kind = local"
        )
    if ":" in config.train.device:
        raise ValueError(
            f"train.device: {config.train.device}, but with cluster.kind = ray it is Ray that says which device a "
            "process gets; use auto, cpu or cuda"
        )


RULES = (
    _check_step,
    _check_evaluation,
    _check_routes,
    _check_scoring_replay,
    _check_reuse,
    _check_head,
    _check_correction,
    _check_on_policy,
    _check_staleness,
    _check_turns,
    _check_clips,
    _check_anchor,
    _check_ranks,
    _check_cluster,
    _check_autocast,
)
"""In the order in which they are checked: the first that is broken is the one a user reads."""
