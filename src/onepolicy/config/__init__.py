"""Typed, frozen settings. Importing this package loads no torch (tests/unit/test_imports.py holds that)."""

from onepolicy.config.base import Frozen, UsageError
from onepolicy.config.load import apply_override, load, read_recipe, resolve
from onepolicy.config.model import ModelConfig, OptimConfig, TrainConfig
from onepolicy.config.objective import TIS, CorrectionConfig, CorrectionOff, GRPOConfig, ReplayConfig
from onepolicy.config.rollout import EvalConfig, HFEngineConfig, RolloutConfig, SamplingConfig
from onepolicy.config.run import CheckpointConfig, LogConfig, RunConfig
from onepolicy.config.task import ChainTask, GymTask, JsonlTask, TaskConfig

__all__ = [
    "TIS",
    "ChainTask",
    "CheckpointConfig",
    "CorrectionConfig",
    "CorrectionOff",
    "EvalConfig",
    "Frozen",
    "GRPOConfig",
    "GymTask",
    "HFEngineConfig",
    "JsonlTask",
    "LogConfig",
    "ModelConfig",
    "OptimConfig",
    "ReplayConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "TaskConfig",
    "TrainConfig",
    "UsageError",
    "apply_override",
    "load",
    "read_recipe",
    "resolve",
]
