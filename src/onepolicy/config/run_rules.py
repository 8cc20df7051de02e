"""Settings of a run that contradict each other, across sections. A run with one does not start."""

from __future__ import annotations

from onepolicy.config.cluster import RayCluster
from onepolicy.config.engine import VLLMEngineConfig
from onepolicy.config.option_rules import (
    ADAPTERS,
    ON_POLICY_NUMERICS,
    PRESSURE,
    QUANT,
    STALENESS,
    Rules,
    is_server,
    on_policy,
    under_ray,
)
from onepolicy.config.quant import Int8
from onepolicy.config.replay import R2, WeightsReplay
from onepolicy.config.rules import error
from onepolicy.config.run import RunConfig
from onepolicy.config.task import EpisodeTask

LARGEST_STEP = 2**22  # samples
MOST_RETURNED = 1000  # top_k of engines that return it as log-probabilities, in every reply


def _tensor_parallel(run: RunConfig) -> int:
    engine = run.rollout.engine
    if isinstance(engine, VLLMEngineConfig):
        return engine.tensor_parallel_size
    return 1


def _gpus_per_replica(run: RunConfig) -> float | None:
    if isinstance(run.cluster, RayCluster):
        return run.cluster.gpus_per_replica
    return None


SAMPLING: Rules = (
    error(
        "rollout.sampling.top_k: {rollout.sampling.top_k}, but {rollout.engine.kind} returns the "
        "tokens that top_p and min_p left among a number of likeliest ones; set it too, from 1 to "
        "1000",
        lambda run: (
            run.rollout.sampling.narrows
            and not run.rollout.engine.can.any_support
            and not 0 < run.rollout.sampling.top_k <= MOST_RETURNED
        ),
    ),
    error(
        "rollout.sampling.min_p: {rollout.sampling.min_p}, but SGLang returns the tokens that "
        "top_k and top_p leave; leave it out",
        lambda run: bool(run.rollout.sampling.min_p) and run.rollout.engine.kind == "sglang",
    ),
    error(
        "eval.min_p: {eval.min_p}, but SGLang returns log-probabilities after top_k and top_p; "
        "leave it out",
        lambda run: bool(run.eval.min_p) and run.rollout.engine.kind == "sglang",
    ),
    error(
        "correction.centering: head takes the rollout's tail as proportional, but "
        "rollout.sampling.top_p, top_k or min_p cut it; use support, the mean score over the "
        "tokens that were kept",
        lambda run: run.rollout.sampling.narrows and run.correction.centering == "head",
    ),
    error(
        "correction.centering: support needs the log-probabilities of the tokens that "
        "rollout.sampling.top_p or top_k kept, and {rollout.engine.kind} returns only their ids; "
        "use another correction, or the whole vocabulary",
        lambda run: (
            run.rollout.sampling.narrows
            and run.correction.centering == "support"
            and not run.rollout.engine.can.support_logp
        ),
    ),
    error(
        "rollout.group_size: GRPO compares siblings, so a group of 1 never has an advantage; use "
        "2 or more, or objective.baseline = none or critic",
        lambda run: run.rollout.group_size < 2 and run.objective.compares_groups,
    ),
    error(
        "objective.num_minibatches: {objective.num_minibatches} does not divide "
        "rollout.prompts_per_step {rollout.prompts_per_step}; groups are never split, so set it "
        "to a divisor",
        lambda run: run.rollout.prompts_per_step % run.objective.num_minibatches != 0,
    ),
    error(
        "objective.overlong_buffer: measures one response against rollout.sampling.max_tokens, "
        "but an episode of task.kind = {task.kind} has several; set it to 0 (task.max_tokens "
        "limits an episode)",
        lambda run: isinstance(run.task, EpisodeTask) and run.objective.overlong_buffer > 0,
    ),
    error(
        "replay.mode: weights needs the combine weights, which rollout.engine.kind = "
        "{rollout.engine.kind} does not return; use r3",
        lambda run: (
            isinstance(run.replay, WeightsReplay)
            and run.replay.source == "engine"
            and not run.rollout.engine.can.combine_weights
        ),
    ),
    error(
        "rollout.engine.dtype: float32, with which {rollout.engine.kind} reads the checkpoint "
        "unrounded, but model.dtype = bfloat16 trains it rounded; set it to bfloat16",
        lambda run: (
            (run.model.dtype, run.rollout.engine.dtype) == ("bfloat16", "float32")
            and not run.rollout.engine.can.embedded
        ),
    ),
    error(
        "rollout.engine.tensor_parallel_size: {rollout.engine.tensor_parallel_size}, but an "
        "engine in the learner's process has that one device; set cluster.kind = ray, or start a "
        "server (onepolicy engine serve) and use kind = vllm-server",
        lambda run: _tensor_parallel(run) > 1 and not under_ray(run),
    ),
    error(
        "cluster.gpus_per_replica: {cluster.gpus_per_replica:g}, but "
        "rollout.engine.tensor_parallel_size = {rollout.engine.tensor_parallel_size} takes "
        "{rollout.engine.tensor_parallel_size} GPUs; leave cluster.gpus_per_replica out",
        lambda run: (
            _tensor_parallel(run) > 1
            and _gpus_per_replica(run) not in (None, 0, _tensor_parallel(run))
        ),
    ),
    error(
        "rollout.prompts_per_step: {rollout.prompts_per_step} prompts of rollout.group_size "
        "{rollout.group_size} are {rollout.samples:,} samples a step, more than "
        f"{LARGEST_STEP:,}; lower one of them",
        lambda run: run.rollout.samples > LARGEST_STEP,
    ),
    error(
        "rollout.min_group_size: {rollout.min_group_size} of rollout.group_size "
        "{rollout.group_size} episodes can never be left; lower it",
        lambda run: run.rollout.smallest_group > run.rollout.group_size,
    ),
    error(
        "replay.missing: native, but without routes there are no combine weights to replay; use "
        "replay.mode = r3, or missing = error",
        lambda run: isinstance(run.replay, WeightsReplay) and run.replay.missing == "native",
    ),
    error(
        "eval.k: 0 with eval.greedy=false leaves nothing to evaluate; set eval.k to 1 or more or "
        "eval.greedy=true (eval.every=0 turns evaluation off)",
        lambda run: not run.eval.k and not run.eval.greedy,
    ),
)

LOSS: Rules = (
    error(
        "correction: {correction.name} multiplies advantage * log p by the ratio new/rollout, "
        "which is inside the surrogate {objective.surrogate} already and would count twice; set "
        "objective.surrogate = pg (presets rloo, reinforce), or take a correction with "
        "old/rollout, or ppo-is",
        lambda run: run.correction.surrogate == "pg" and run.objective.loss.has_ratio,
    ),
    error(
        "correction: {correction.name} makes the rollout the behaviour policy of the surrogate's "
        "ratio, but {objective.surrogate} has none, so nothing would be corrected; choose pg-tis "
        "or one with old/rollout",
        lambda run: run.correction.surrogate == "ppo" and not run.objective.loss.has_ratio,
    ),
    error(
        "objective.reduction: {correction.name} scales all weights by a mean over slots or "
        "samples, but {objective.reduction} has neither; use another reduction",
        lambda run: (
            run.objective.reduction in ("prompt-mean", "episode-mean")
            and run.correction.scales
            and run.correction.normalise != "batch"
        ),
    ),
    error(
        "replay.mode: r2 replays the routes of the scoring forward, which {correction.name} "
        "leaves out; choose one",
        lambda run: run.correction.bypass and isinstance(run.replay, R2),
    ),
    error(
        "objective.kl.where: reward is set before the update from the trainer's "
        "log-probabilities, which {correction.name} does not compute; use loss",
        lambda run: run.correction.bypass and run.objective.kl.in_reward,
    ),
    error(
        "objective.kl.importance: with {correction.name} there is no old policy; use rollout",
        lambda run: (
            run.correction.bypass
            and run.objective.kl.in_loss
            and run.objective.kl.importance == "old"
        ),
    ),
)

TRAINER: Rules = (
    error(
        "train.reuse_scoring_forward: leaves no second forward for replay.mode = r2 to replay in; "
        "choose one",
        lambda run: bool(run.train.reuse_scoring_forward and isinstance(run.replay, R2)),
    ),
    error(
        "train.reuse_scoring_forward: needs objective.num_minibatches = 1, because later "
        "minibatches have other weights; leave it out",
        lambda run: bool(run.train.reuse_scoring_forward and run.objective.num_minibatches > 1),
    ),
    error(
        "train.reuse_scoring_forward: keeps the activations that train.activation_checkpointing "
        "drops; choose one",
        lambda run: bool(run.train.reuse_scoring_forward and run.train.activation_checkpointing),
    ),
    error(
        "train.autocast: {train.autocast} is for float32 parameters, but model.dtype = bfloat16; "
        "set it to off, or model.dtype to float32",
        lambda run: run.train.autocast != "off" and run.model.dtype == "bfloat16",
    ),
    error(
        "rollout.engine.kind: {rollout.engine.kind} has its own process groups in this process, "
        "which clash with those of train.ranks; use vllm-server or hf, or cluster.kind = ray, "
        "which gives it a process of its own",
        lambda run: (
            run.train.ranks > 0
            and not under_ray(run)
            and not run.rollout.engine.can.shares_process_groups
        ),
    ),
    error(
        "train.ranks: invariant operators do not work on sharded parameters; set it to 0, or "
        "numerics to fast",
        lambda run: run.train.ranks > 0 and on_policy(run),
    ),
    error(
        "model.dtype: the shards of train.ranks that learn are float32; set "
        "train.fsdp_param_dtype = bfloat16 instead, which gathers them rounded, or train.lora",
        lambda run: (
            run.train.ranks > 0 and run.model.dtype == "bfloat16" and run.train.lora is None
        ),
    ),
    error(
        "rollout.engine.kind: {rollout.engine.kind} is a server of its own, which cluster.kind = "
        "ray does not place; use hf or vllm, or cluster.kind = local",
        lambda run: under_ray(run) and is_server(run),
    ),
    error(
        "rollout.quant.activations: static scales are calibrated in this process only, not in the "
        "replicas of cluster.kind = ray; leave it out (dynamic), or cluster.kind = local",
        lambda run: (
            under_ray(run)
            and isinstance(run.rollout.quant, Int8)
            and run.rollout.quant.activations == "static"
        ),
    ),
    error(
        "train.device: {train.device}, but with cluster.kind = ray it is Ray that says which "
        "device a process gets; use auto, cpu or cuda",
        lambda run: under_ray(run) and ":" in run.train.device,
    ),
    error(
        "train.fsdp_param_dtype: bfloat16 needs train.ranks; set that as well, under torchrun to "
        "the number of its processes, or use train.autocast",
        lambda run: run.train.fsdp_param_dtype == "bfloat16" and not run.train.ranks,
    ),
    error(
        "train.autocast: bfloat16, but train.fsdp_param_dtype = bfloat16 chooses the precision of "
        "the forward too; set one of them",
        lambda run: run.train.fsdp_param_dtype == "bfloat16" == run.train.autocast,
    ),
    error(
        "train.device: {train.device} is one device, but each of train.ranks = {train.ranks} takes "
        "its own; use auto, cpu or cuda",
        lambda run: run.train.ranks > 1 and ":" in run.train.device,
    ),
)

CONTRADICTIONS: Rules = (
    *SAMPLING,
    *LOSS,
    *TRAINER,
    *ON_POLICY_NUMERICS,
    *QUANT,
    *PRESSURE,
    *STALENESS,
    *ADAPTERS,
)
