"""The sections of a RunConfig, as its rules read them."""

from __future__ import annotations

from typing import Protocol

from onepolicy.config.cluster import ClusterConfig
from onepolicy.config.correction import CorrectionConfig
from onepolicy.config.model import ModelConfig, OptimConfig, TrainConfig
from onepolicy.config.numerics import Numerics
from onepolicy.config.objective import ObjectiveConfig
from onepolicy.config.replay import ReplayConfig
from onepolicy.config.rollout import EvalConfig, RolloutConfig
from onepolicy.config.task import TaskConfig


class Sections(Protocol):
    """The sections of a RunConfig."""

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
    def optim(self) -> OptimConfig: ...
    @property
    def train(self) -> TrainConfig: ...
    @property
    def cluster(self) -> ClusterConfig: ...
    @property
    def eval(self) -> EvalConfig: ...
