"""Rules that span sections: settings that contradict each other stop a run.

A rule is a small function of the sections it reads, which raises ValueError. Settings that merely
change nothing beside others are in idle.py, rules of options in
option_rules.py.
"""

from __future__ import annotations

from onepolicy.config.cluster import ClusterConfig, RayCluster
from onepolicy.config.correction import CorrectionConfig
from onepolicy.config.engine import EngineConfig, HFEngineConfig, ServerEngineConfig
from onepolicy.config.model import ModelConfig, TrainConfig
from onepolicy.config.numerics import ON_POLICY, Numerics
from onepolicy.config.objective import GROUP_BASELINES, ObjectiveConfig
from onepolicy.config.quant import Int8
from onepolicy.config.replay import R2, ReplayConfig, WeightsReplay
from onepolicy.config.rollout import RolloutConfig
from onepolicy.config.sections import Sections
from onepolicy.config.task import EpisodeTask, TaskConfig


def check_sections(run: Sections) -> None:
    """Raise ValueError for the first two settings that contradict each other."""
    _check_sampling(run.rollout)
    _check_groups(run.rollout, run.objective)
    _check_weights_replay(run.replay, run.rollout.engine)
    _check_engine_dtype(run.model, run.rollout.engine)
    _check_reuse(run.train, run.objective, run.replay)
    _check_loss(run.objective, run.correction)
    _check_scale(run.objective, run.correction)
    rollout = run.rollout
    on_policy = run.numerics == ON_POLICY
    parallel = getattr(rollout.engine, "tensor_parallel_size", 1) > 1
    if on_policy or rollout.pressure or rollout.overlaps or run.train.lora or parallel:
        from onepolicy.config.option_rules import check_options

        check_options(run)
    _check_turns(run.task, run.objective)
    if run.correction.ratio == "new/rollout":
        _check_bypass(run.correction, run.replay, run.objective)
    if run.train.ranks:
        _check_ranks(run.model, run.rollout.engine, run.cluster, run.numerics)
    if isinstance(run.cluster, RayCluster):
        _check_ray(run.rollout, run.train)
    _check_autocast(run.model, run.train)


def _check_sampling(rollout: RolloutConfig) -> None:
    sampling = rollout.sampling
    if sampling.top_p < 1 or sampling.top_k > 0:
        raise ValueError(
            f"rollout.sampling: top_p={sampling.top_p} top_k={sampling.top_k} narrow the sampled "
            "distribution, but the trainer's softmax has full support, so every importance ratio "
            "would be wrong; train with top_p=1 top_k=0 (not the vocabulary's size; eval.top_p "
            "and eval.top_k may narrow evaluation)"
        )


def _check_groups(rollout: RolloutConfig, objective: ObjectiveConfig) -> None:
    if rollout.group_size < 2 and objective.baseline in GROUP_BASELINES:
        raise ValueError(
            "rollout.group_size: GRPO compares siblings, so a group of 1 never has an advantage; "
            "use 2 or more, or objective.baseline = none or critic"
        )
    if rollout.prompts_per_step % objective.num_minibatches:
        raise ValueError(
            f"objective.num_minibatches: {objective.num_minibatches} does not divide "
            f"rollout.prompts_per_step {rollout.prompts_per_step}; groups are never split"
        )


def _check_weights_replay(replay: ReplayConfig, engine: EngineConfig) -> None:
    from_engine = isinstance(replay, WeightsReplay) and replay.source == "engine"
    if from_engine and not isinstance(engine, HFEngineConfig):
        raise ValueError(
            "replay.mode: weights needs the combine weights, which rollout.engine.kind = "
            f"{engine.kind} does not return; use r3"
        )


def _check_engine_dtype(model: ModelConfig, engine: EngineConfig) -> None:
    differ = (model.dtype, engine.dtype) == ("bfloat16", "float32")
    if differ and not isinstance(engine, HFEngineConfig):
        raise ValueError(
            f"rollout.engine.dtype: float32, with which {engine.kind} reads the checkpoint "
            "unrounded, but model.dtype = bfloat16 trains it rounded; set it to bfloat16"
        )


def _check_reuse(train: TrainConfig, objective: ObjectiveConfig, replay: ReplayConfig) -> None:
    """Refuse train.reuse_scoring_forward if the update needs another forward."""
    if not train.reuse_scoring_forward:
        return
    if isinstance(replay, R2):
        raise ValueError(
            "train.reuse_scoring_forward: leaves no second forward for replay.mode = r2 to replay "
            "in; choose one"
        )
    if objective.num_minibatches > 1:
        raise ValueError(
            "train.reuse_scoring_forward: needs objective.num_minibatches = 1, because later "
            "minibatches have other weights; leave it out"
        )
    if train.activation_checkpointing:
        raise ValueError(
            "train.reuse_scoring_forward: keeps the activations that "
            "train.activation_checkpointing drops; choose one"
        )


def _check_loss(objective: ObjectiveConfig, correction: CorrectionConfig) -> None:
    """Refuse a surrogate that the correction's ratio does not go with."""
    if correction.surrogate == "pg" and objective.surrogate != "pg":
        raise ValueError(
            f"correction: {correction.name} multiplies advantage * log p by the ratio new/rollout, "
            f"which is inside the surrogate {objective.surrogate} already and would count twice; "
            "set objective.surrogate = pg (presets rloo, reinforce), or take a correction with "
            "old/rollout, or ppo-is"
        )
    if correction.surrogate == "ppo" and objective.surrogate == "pg":
        raise ValueError(
            f"correction: {correction.name} makes the rollout the behaviour policy of the "
            "surrogate's ratio, but pg has none, so nothing would be corrected; choose pg-tis or "
            "one with old/rollout"
        )


def _check_scale(objective: ObjectiveConfig, correction: CorrectionConfig) -> None:
    by_the_loss = correction.scales and correction.normalise != "batch"
    if objective.reduction in ("prompt-mean", "episode-mean") and by_the_loss:
        raise ValueError(
            f"objective.reduction: {correction.name} scales all weights by a mean over slots or "
            f"samples; {objective.reduction} has neither; use another reduction"
        )


def _check_turns(task: TaskConfig, objective: ObjectiveConfig) -> None:
    if isinstance(task, EpisodeTask) and objective.overlong_buffer:
        raise ValueError(
            "objective.overlong_buffer: measures one response against rollout.sampling.max_tokens, "
            f"but an episode of task.kind = {task.kind} has several; set it to 0 (task.max_tokens "
            "limits an episode)"
        )


def _check_bypass(
    correction: CorrectionConfig, replay: ReplayConfig, objective: ObjectiveConfig
) -> None:
    """Refuse settings that need a scoring forward. correction.ratio = new/rollout has none."""
    if isinstance(replay, R2):
        raise ValueError(
            f"replay.mode: r2 replays the routes of the scoring forward, which {correction.name} "
            "leaves out; choose one"
        )
    if objective.kl.in_reward:
        raise ValueError(
            "objective.kl.where: reward is set before the update from the trainer's "
            f"log-probabilities, which {correction.name} does not compute; use loss"
        )
    if objective.kl.in_loss and objective.kl.importance == "old":
        raise ValueError(
            f"objective.kl.importance: with {correction.name} there is no old policy; use rollout"
        )


def _check_ranks(
    model: ModelConfig, engine: EngineConfig, cluster: ClusterConfig, numerics: Numerics
) -> None:
    """Refuse settings that a learner of several processes does not have."""
    if engine.kind == "vllm" and cluster.kind == "local":
        raise ValueError(
            "rollout.engine.kind: vllm has its own process groups in this process, which clash "
            "with those of train.ranks; use vllm-server or hf, or cluster.kind = ray, which gives "
            "it a process of its own"
        )
    if numerics == ON_POLICY:
        raise ValueError(
            "train.ranks: invariant operators do not work on sharded parameters; set it to 0, or "
            "numerics to fast"
        )
    if model.dtype == "bfloat16":
        raise ValueError(
            "model.dtype: the shards of train.ranks are float32; set train.fsdp_param_dtype = "
            "bfloat16 instead, which gathers them rounded"
        )


def _check_ray(rollout: RolloutConfig, train: TrainConfig) -> None:
    """Refuse an engine or device that Ray cannot place."""
    engine, quant = rollout.engine, rollout.quant
    if isinstance(engine, ServerEngineConfig):
        raise ValueError(
            f"rollout.engine.kind: {engine.kind} is a server of its own, which cluster.kind = ray "
            "does not place; use hf or vllm, or cluster.kind = local"
        )
    if isinstance(quant, Int8) and quant.activations == "static":
        raise ValueError(
            "rollout.quant.activations: static scales are calibrated in this process only, not in "
            "the replicas of cluster.kind = ray; leave it out (dynamic), or cluster.kind = local"
        )
    if ":" in train.device:
        raise ValueError(
            f"train.device: {train.device}, but with cluster.kind = ray it is Ray that says which "
            "device a process gets; use auto, cpu or cuda"
        )


def _check_autocast(model: ModelConfig, train: TrainConfig) -> None:
    if train.autocast != "off" and model.dtype == "bfloat16":
        raise ValueError(
            f"train.autocast: {train.autocast} is for float32 parameters, but model.dtype = "
            "bfloat16; set it to off, or model.dtype to float32"
        )
