"""The whole run, and every rule that spans sections."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from onepolicy.config.asynchronous import check_asynchronous
from onepolicy.config.base import MOST, Count, Frozen, Seed
from onepolicy.config.cluster import ClusterConfig, LocalCluster, RayCluster
from onepolicy.config.correction import CorrectionConfig
from onepolicy.config.engine import HFEngineConfig, VLLMEngineConfig
from onepolicy.config.model import ModelConfig, OptimConfig, TrainConfig
from onepolicy.config.numerics import ON_POLICY, Numerics, check_numerics, dependent_defaults
from onepolicy.config.objective import (
    R2,
    R3,
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


class LogConfig(Frozen):
    counterfactual_every: int = Field(10, ge=0, le=MOST)
    """Steps between scorings of the same batch without replay (nothing to compare unless the rollout's routes are
    replayed: replay.mode = r3, soft or weights); 0: never."""
    samples_per_step: int = Field(2, ge=0, le=MOST)
    """Readable rollouts written to samples.jsonl each step."""
    tensorboard: bool = True
    report: bool = True
    """Write report.html at the end of the run."""


class CheckpointConfig(Frozen):
    every: Count = 10
    """Steps between checkpoints; the last step is always saved."""
    keep: int = Field(0, ge=0, le=MOST)
    """Newest checkpoints to keep; 0: all."""


def _usual_correction(checked: dict[str, Any]) -> CorrectionConfig:
    """By the settings before it, as far as they are valid."""
    replay, rollout = checked.get("replay"), checked.get("rollout")
    stale = isinstance(rollout, RolloutConfig) and rollout.overlaps
    return CorrectionConfig(preset="recompute" if isinstance(replay, FromRollout) and not stale else "tis")


class RunConfig(Frozen):
    out: str
    """Run folder, new or empty. Where a recipe's own is taken, `onepolicy train` takes its first free sibling (out-2
    and so on) and says so; one typed as out=... must be free."""
    steps: Count
    seed: Seed = 0
    numerics: Numerics = "fast"
    """on-policy: engine and trainer give the same log-probabilities to the bit (docs/on_policy.md), or the run stops.
    Where they are unset, rollout.engine.dtype and lm_head then follow the model's, and correction is recompute."""
    model: ModelConfig
    task: TaskConfig
    rollout: RolloutConfig = RolloutConfig()
    replay: ReplayConfig = R3()
    """Without a mode: r3."""
    correction: CorrectionConfig = Field(default_factory=_usual_correction)
    """Unset: recompute where the rollout's routes are replayed (R3 + TIS was worse than R3 alone, R3 paper 5.2),
    TIS with cap 2 where they are not (replay.mode = off or r2), and where tokens may be of older weights
    (rollout.max_staleness)."""
    objective: ObjectiveConfig = ObjectiveConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    cluster: ClusterConfig = LocalCluster()
    """Without a kind: local."""
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="before")
    @classmethod
    def _dependent_defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = dependent_defaults(data)
        if isinstance(cluster := data.get("cluster"), dict):
            data = {**data, "cluster": {"kind": "local"} | cluster}
        if isinstance(replay := data.get("replay"), dict):
            data = {**data, "replay": {"mode": "r3"} | replay}
        return data

    @model_validator(mode="after")
    def _settings_take_effect(self) -> Self:
        sampling = self.rollout.sampling
        if sampling.top_p < 1 or sampling.top_k > 0:
            raise ValueError(
                f"rollout.sampling: top_p={sampling.top_p} top_k={sampling.top_k} narrow what is sampled, but the "
                "trainer's softmax has full support, so every importance ratio would be wrong; train with top_p=1 "
                "top_k=0 (eval.top_p and eval.top_k may narrow evaluation)"
            )
        if self.rollout.group_size < 2 and self.objective.baseline in ("group", "leave-one-out"):
            raise ValueError(
                "rollout.group_size: GRPO compares siblings, so a group of 1 never has an advantage; use 2 or more, or "
                "objective.baseline = none or critic"
            )
        if self.rollout.prompts_per_step % self.objective.mini_steps:
            raise ValueError(
                f"objective.mini_steps: {self.objective.mini_steps} does not divide rollout.prompts_per_step "
                f"{self.rollout.prompts_per_step}; groups are never split"
            )
        if self.eval.quantised and self.rollout.quant is None:
            raise ValueError("eval.quantised: has no effect without rollout.quant; leave it out")
        replay = self.replay
        if isinstance(replay, FromRollout) and replay.source == "reprefill" and replay.missing != "error":
            raise ValueError(
                "replay.missing: has no effect with replay.source = reprefill, which records every sample's routes"
            )
        engine = self.rollout.engine
        other = None if isinstance(engine, HFEngineConfig) else "SGLang" if engine.kind == "sglang" else "vLLM"
        if other and isinstance(replay, WeightsReplay) and replay.source == "engine":
            raise ValueError(f"replay.mode: weights needs the combine weights, which {other} does not return; use r3")
        if other and (self.model.dtype, engine.dtype) == ("bfloat16", "float32"):
            raise ValueError(
                f"rollout.engine.dtype: a float32 {other} reads the checkpoint unrounded, but model.dtype = bfloat16 "
                "trains it rounded; set it to bfloat16"
            )
        if isinstance(self.replay, R2) and self.objective.mini_steps == 1:
            raise ValueError(
                "replay.mode: r2 does nothing with objective.mini_steps = 1, where scoring and update have the same "
                "weights and choose the same experts; raise objective.mini_steps, or replay the rollout's routes (r3)"
            )
        if isinstance(self.replay, R2) and self.train.reuse_scoring_forward:
            raise ValueError(
                "train.reuse_scoring_forward: leaves no second forward for replay.mode = r2 to replay in; choose one"
            )
        if self.train.reuse_scoring_forward and self.objective.mini_steps > 1:
            raise ValueError(
                "train.reuse_scoring_forward: needs objective.mini_steps = 1; later mini-steps have other weights"
            )
        if self.train.reuse_scoring_forward and self.train.activation_checkpointing:
            raise ValueError(
                "train.reuse_scoring_forward keeps the activations train.activation_checkpointing drops; choose one"
            )
        if self.model.lm_head == "float32" and self.model.dtype == "float32" and self.train.autocast == "off":
            raise ValueError(
                "model.lm_head: float32 has no effect with model.dtype = float32 and train.autocast = off; leave it out"
            )
        check_pair(self.objective, self.correction)
        check_numerics(self)
        check_asynchronous(self)
        self._check_turns()
        self._check_clips()
        self._check_anchor()
        self._check_ranks()
        self._check_cluster()
        if self.train.autocast != "off" and self.model.dtype == "bfloat16":
            raise ValueError(
                "train.autocast: has no effect on bfloat16 parameters; set it to off or model.dtype to float32"
            )
        return self

    @property
    def longest(self) -> tuple[int, int]:
        """Sampled tokens and model turns that an episode has at most."""
        tokens = self.rollout.sampling.max_tokens
        if not isinstance(self.task, EpisodeTask):
            return tokens, 1
        turns = self.task.max_turns
        limits = [turns * tokens, self.task.max_tokens, self.rollout.engine.max_len]
        return max(turns, min(limit for limit in limits if limit is not None)), turns

    @property
    def scores_old(self) -> bool:
        """Whether the trainer scores a batch before the update. Not if the rollout is the anchor: there is no old."""
        return self.correction.ratio == "old/rollout"

    def _check_clips(self) -> None:
        """Bounds on how far one update has moved from the last, where there is no second update on a batch.

        With one mini-step all of a batch is evaluated with the weights it was scored with: new / old is 1, and the
        critic's new value is its old one. What a preset brings may stand: it is right for more mini-steps.
        """
        objective = self.objective
        if objective.mini_steps > 1:
            return
        preset = ObjectiveConfig(preset=objective.preset)
        mend = "raise objective.mini_steps, or leave it out"
        equal = self.numerics == ON_POLICY  # so new / rollout is 1 as well
        if self.scores_old or equal:
            other = "" if equal else " (correction.preset = ppo-is bounds new / rollout)"
            for name in ("clip_low", "clip_high", "dual_clip", "tau_positive", "tau_negative"):
                if (value := getattr(objective, name)) != getattr(preset, name):
                    raise ValueError(
                        f"objective.{name}: {value} has no effect with objective.mini_steps = 1, where the ratio "
                        f"new / old is 1 in the only update of a batch; {mend}{other}"
                    )
        if objective.critic is not None and objective.critic.clip != CriticConfig().clip:
            raise ValueError(
                f"objective.critic.clip: {objective.critic.clip} has no effect with objective.mini_steps = 1, where no "
                f"value has moved before the only update of a batch; {mend}"
            )

    def _check_turns(self) -> None:
        """What means another thing, or nothing, by whether episodes have one turn or several."""
        several = isinstance(self.task, EpisodeTask)
        if several and self.objective.overlong_buffer:
            raise ValueError(
                "objective.overlong_buffer: measures one response against rollout.sampling.max_tokens, but an episode "
                f"of task.kind = {self.task.kind} has several; set it to 0 (task.max_tokens limits an episode)"
            )
        fed_once = not several and isinstance(self.rollout.engine, HFEngineConfig | VLLMEngineConfig)
        if fed_once and isinstance(self.replay, FromRollout) and self.replay.rows != "as-sampled":
            raise ValueError(
                f"replay.rows: {self.replay.rows} has no effect, because episodes of one turn on an engine in this "
                "process feed every token once; leave it out"
            )

    def _check_anchor(self) -> None:
        """What would need the policy before the update, which correction.ratio = new/rollout does not score."""
        if self.scores_old:
            return
        name = self.correction.name
        if self.train.reuse_scoring_forward:
            raise ValueError(f"train.reuse_scoring_forward: {name} has no scoring forward to reuse; leave it out")
        if isinstance(self.replay, R2):
            raise ValueError(f"replay.mode: r2 replays the routes of the scoring forward, which {name} leaves out")
        if self.objective.kl.where == "reward":
            raise ValueError(
                "objective.kl.where: reward is set before the update from the trainer's log-probabilities, which "
                f"{name} does not compute; use loss"
            )
        if self.objective.kl.importance == "old":
            raise ValueError(f"objective.kl.importance: with {name} there is no old policy; use rollout")

    def _check_ranks(self) -> None:
        """What cannot be on a learner of several processes."""
        if not self.train.ranks:
            return
        if self.rollout.engine.kind == "vllm" and self.cluster.kind == "local":
            raise ValueError(
                "rollout.engine.kind: vllm has its own process groups in this process, which clash with those of "
                "train.ranks; use vllm-server or hf, or cluster.kind = ray, which gives it a process of its own"
            )
        if self.numerics == ON_POLICY:
            raise ValueError(
                "train.ranks: invariant operators do not work on sharded parameters; set it to 0, or numerics to fast"
            )
        if self.model.dtype == "bfloat16":
            raise ValueError(
                "model.dtype: the shards of train.ranks are float32; set train.compute = bfloat16 instead, which "
                "gathers them rounded"
            )

    def _check_cluster(self) -> None:
        """What cannot be where Ray places the engine."""
        cluster, engine = self.cluster, self.rollout.engine
        if not isinstance(cluster, RayCluster):
            return
        if not isinstance(engine, HFEngineConfig | VLLMEngineConfig):
            raise ValueError(
                f"rollout.engine.kind: {engine.kind} is a server of its own, which cluster.kind = ray does not place; "
                "use hf or vllm, or cluster.kind = local"
            )
        if isinstance(self.rollout.quant, Int8) and self.rollout.quant.activations == "static":
            raise ValueError(
                "rollout.quant.activations: static scales are calibrated in this process only, not in the replicas of "
                "cluster.kind = ray; leave it out (dynamic), or cluster.kind = local"
            )
        if ":" in self.train.device:
            raise ValueError(
                f"train.device: {self.train.device}, but with cluster.kind = ray it is Ray that says which device a "
                "process gets; use auto, cpu or cuda"
            )
