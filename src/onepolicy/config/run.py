"""The whole run: every section, and the defaults that depend on others."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from onepolicy.config.base import MOST, Count, Frozen, Seed
from onepolicy.config.cluster import ClusterConfig, LocalCluster
from onepolicy.config.correction import CorrectionConfig
from onepolicy.config.model import ModelConfig, OptimConfig, TrainConfig
from onepolicy.config.numerics import Numerics, dependent_defaults
from onepolicy.config.objective import (
    R3,
    FromRollout,
    ObjectiveConfig,
    ReplayConfig,
)
from onepolicy.config.renamed import RUN_KEYS
from onepolicy.config.rollout import EvalConfig, RolloutConfig
from onepolicy.config.rules import check_sections
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
    return CorrectionConfig(
        preset="recompute" if isinstance(replay, FromRollout) and not stale else "tis"
    )


class RunConfig(Frozen):
    renamed: ClassVar = RUN_KEYS

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
    def _sections_agree(self) -> Self:
        check_sections(self)
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
