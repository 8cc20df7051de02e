"""The whole run: every section, and the defaults that depend on others."""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field, model_validator

from onepolicy.config.base import LARGEST_INT, Count, Frozen, Seed
from onepolicy.config.cluster import ClusterConfig, LocalCluster
from onepolicy.config.correction import CorrectionConfig
from onepolicy.config.model import ModelConfig, OptimConfig, TrainConfig
from onepolicy.config.numerics import ON_POLICY, Numerics, dependent_defaults
from onepolicy.config.objective import ObjectiveConfig
from onepolicy.config.replay import R2, R3, ReplayConfig, RolloutReplay, SoftReplay
from onepolicy.config.rollout import EvalConfig, RolloutConfig
from onepolicy.config.task import EpisodeTask, TaskConfig

PRECISION: dict[type, frozenset[str]] = {
    ModelConfig: frozenset({"dtype"}),
    TrainConfig: frozenset({"autocast", "fsdp_param_dtype"}),
}
"""Settings whose defaults a run on a GPU replaces, unless one of them is set."""


class LogConfig(Frozen):
    """Files that a run writes for people."""

    counterfactual_every: int = Field(10, ge=0, le=LARGEST_INT)
    """Steps between scorings of the same batch without replay. 0: never."""
    samples_per_step: int = Field(2, ge=0, le=LARGEST_INT)
    """Readable rollouts written to samples.jsonl each step. 0: none."""
    tensorboard: bool = True
    """Write metrics for TensorBoard too."""
    wandb: str | None = Field(None, min_length=1)
    """Project of Weights & Biases for the metrics; its own variables apply (WANDB_MODE=offline,
    WANDB_ENTITY). Unset: none."""
    trackio: str | None = Field(None, min_length=1)
    """Project of trackio for the metrics (`trackio show`). Unset: none."""
    report: bool = True
    """Write report.html at the end of the run."""


class CheckpointConfig(Frozen):
    """Checkpoints, which a run can be resumed and forked from."""

    every: Count = 10
    """Steps between checkpoints. The last step is always saved."""
    keep: int = Field(3, ge=0, le=LARGEST_INT)
    """Newest checkpoints to keep. 0: all."""


def _usual_correction(checked: dict[str, Any]) -> CorrectionConfig:
    """Return the correction of a run that sets none. `checked`: the valid sections before it."""
    rollout = checked.get("rollout")
    stale = isinstance(rollout, RolloutConfig) and rollout.overlaps
    if isinstance(checked.get("replay"), RolloutReplay) and not stale:
        return CorrectionConfig(preset="recompute")
    return CorrectionConfig(preset="tis")


class RunConfig(Frozen):
    """Settings of a training run. eval, measure, plan and engine check read the same sections.

    Its rules are those of run_rules.py (load.py).
    """

    out: str
    """Run folder, new or empty. If a recipe's is taken, out-2, out-3, ... is used; one typed as
    out=... must be free."""
    steps: Count
    """Steps of the run."""
    seed: Seed = 0
    """Seed of all random numbers of the run."""
    numerics: Numerics = "fast"
    """on-policy: engine and trainer agree to the bit, or the run stops (docs/on_policy.md). The
    engine's dtype and lm_head follow the model's; correction is recompute, with max_staleness
    the usual one."""
    model: ModelConfig
    """The model that is trained."""
    task: TaskConfig
    """Problems to train on."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling for training."""
    replay: ReplayConfig = R3()
    """Routing replay of Mixture-of-Experts models. Without a mode: r3."""
    correction: CorrectionConfig = Field(default_factory=_usual_correction)
    """Correction of the mismatch. Unset: `recompute`, which corrects nothing, if the rollout's
    routes are replayed; else, or where tokens may be of older weights, TIS with cap 2."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """Advantages and loss."""
    optim: OptimConfig = OptimConfig()
    """AdamW with gradient clipping."""
    train: TrainConfig = TrainConfig()
    """Device, precision and memory of the trainer."""
    cluster: ClusterConfig = LocalCluster()
    """The processes of the run: on this machine, or placed by Ray. Without a kind: local."""
    eval: EvalConfig = EvalConfig()
    """Evaluation on held-out problems."""
    log: LogConfig = LogConfig()
    """Files that a run writes for people."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints, which a run can be resumed and forked from."""

    @model_validator(mode="before")
    @classmethod
    def _dependent_defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = dependent_defaults(data)
        cluster, replay = data.get("cluster"), data.get("replay")
        if isinstance(cluster, dict):
            data = {**data, "cluster": {"kind": "local"} | cluster}
        if isinstance(replay, dict):
            data = {**data, "replay": {"mode": "r3"} | replay}
        return data

    @property
    def names_precision(self) -> bool:
        """True if a run on a GPU has these dtypes too, and not a GPU's own default."""
        given = [PRECISION[type(each)] & each.model_fields_set for each in (self.model, self.train)]
        return any(given) or self.numerics == ON_POLICY or self.rollout.engine.dtype == "float32"

    @property
    def longest_episode(self) -> tuple[int, int]:
        """Most sampled tokens and model turns of an episode."""
        tokens = self.rollout.sampling.max_tokens
        if not isinstance(self.task, EpisodeTask):
            return tokens, 1
        turns = self.task.max_turns
        limits = [turns * tokens, self.task.max_tokens, self.rollout.engine.max_len]
        return max(turns, min(limit for limit in limits if limit is not None)), turns

    @property
    def uses_reprefill(self) -> bool:
        """True if a second forward records the routes."""
        return isinstance(self.replay, RolloutReplay) and self.replay.source == "reprefill"

    @property
    def has_evaluator(self) -> bool:
        """True if a second engine, without rollout.quant and pressure, plays the evaluations."""
        rollout = self.rollout
        quantised = rollout.quant is not None and not self.eval.quantised
        return self.eval.every > 0 and (quantised or rollout.pressure is not None)

    @property
    def scores_old(self) -> bool:
        """True if the update needs the old policy's log-probabilities."""
        return not self.correction.bypass

    @property
    def rollout_is_old(self) -> bool:
        """True if the rollout's log-probabilities are the old policy's, to the bit.

        Tokens of older weights (rollout.max_staleness) have those of other policies.
        """
        return self.numerics == ON_POLICY and not self.rollout.overlaps

    @property
    def scores_first(self) -> bool:
        """True if a forward before the update computes them.

        Where they are the rollout's to the bit, the update's own forward checks it. R2 needs the
        routes of a scoring, too.
        """
        exact = self.rollout_is_old and not isinstance(self.replay, R2)
        return self.scores_old and not exact

    @property
    def skips_zero_advantage(self) -> bool:
        """True if groups without advantages have no part in the update, nor in what it measures.

        Their ratios would be 1, because the weights are those of the scoring.
        """
        objective = self.objective
        return (
            self.train.skip_zero_advantage
            and not self.train.ranks
            and self.scores_old
            and self.correction.live_part is None
            and not isinstance(self.replay, SoftReplay)
            and objective.baseline in ("group", "leave-one-out")
            and objective.normalise != "global"
            and objective.num_minibatches == 1
            and not objective.kl.coef
            and not objective.entropy_coef
        )

    @property
    def most_reused_forwards(self) -> float:
        """Most scoring forwards of a step whose graphs the update uses; it uses all or none."""
        wanted = self.train.reuse_scoring_forward
        if not self.scores_first or wanted is False:
            return 0
        if wanted:
            return math.inf
        exact = self.objective.num_minibatches == 1 and not isinstance(self.replay, R2)
        # the one graph takes the memory that the update's own would take
        return int(exact and not self.train.activation_checkpointing)
