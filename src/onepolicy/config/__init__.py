"""Typed, frozen settings. Importing this package loads no torch (tests/unit/test_imports.py holds that)."""

from onepolicy.config.base import Frozen, TrainingError, UsageError
from onepolicy.config.correction import CorrectionConfig, Gate, Weight
from onepolicy.config.load import apply_override, load, read_recipe, resolve
from onepolicy.config.model import ModelConfig, OptimConfig, TrainConfig
from onepolicy.config.objective import (
    R2,
    R3,
    FromRollout,
    ObjectiveConfig,
    ReplayConfig,
    ReplayOff,
    RowPolicy,
    SoftReplay,
    WeightsReplay,
)
from onepolicy.config.rollout import (
    EngineConfig,
    EvalConfig,
    HFEngineConfig,
    RolloutConfig,
    SamplingConfig,
    VLLMEngineConfig,
    VLLMServerConfig,
)
from onepolicy.config.run import CheckpointConfig, LogConfig, RunConfig
from onepolicy.config.task import (
    CalculatorTool,
    ChainTask,
    GymTask,
    JsonlTask,
    PromptsTask,
    PythonTool,
    ReActTask,
    SearchTool,
    TaskConfig,
    ToolConfig,
)

__all__ = [
    "R2",
    "R3",
    "CalculatorTool",
    "ChainTask",
    "CheckpointConfig",
    "CorrectionConfig",
    "EngineConfig",
    "EvalConfig",
    "FromRollout",
    "Frozen",
    "Gate",
    "GymTask",
    "HFEngineConfig",
    "JsonlTask",
    "LogConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimConfig",
    "PromptsTask",
    "PythonTool",
    "ReActTask",
    "ReplayConfig",
    "ReplayOff",
    "RolloutConfig",
    "RowPolicy",
    "RunConfig",
    "SamplingConfig",
    "SearchTool",
    "SoftReplay",
    "TaskConfig",
    "ToolConfig",
    "TrainConfig",
    "TrainingError",
    "UsageError",
    "VLLMEngineConfig",
    "VLLMServerConfig",
    "Weight",
    "WeightsReplay",
    "apply_override",
    "load",
    "read_recipe",
    "resolve",
]
