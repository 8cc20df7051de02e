"""Typed, frozen settings. Importing this package loads no torch (tests/lint/test_imports.py)."""

from onepolicy.config.base import Frozen
from onepolicy.config.correction import CorrectionConfig, Gate, Weight
from onepolicy.config.engine import (
    EngineConfig,
    HFEngineConfig,
    ServerEngineConfig,
    SGLangConfig,
    VLLMEngineConfig,
    VLLMServerConfig,
)
from onepolicy.config.load import apply_override, load, read_recipe, resolve
from onepolicy.config.model import ModelConfig, OptimConfig, TrainConfig
from onepolicy.config.objective import ObjectiveConfig
from onepolicy.config.pressure import RoutingPressure
from onepolicy.config.quant import Fp8, Fp8Weight, Int8, QuantFormat, Simulated
from onepolicy.config.replay import (
    R2,
    R3,
    DuplicateRoutes,
    ReplayConfig,
    ReplayOff,
    RolloutReplay,
    SoftReplay,
    WeightsReplay,
)
from onepolicy.config.rollout import EvalConfig, RolloutConfig, SamplingConfig
from onepolicy.config.run import CheckpointConfig, LogConfig, RunConfig
from onepolicy.config.task import (
    CalculatorTool,
    ChainTask,
    DialogueTask,
    EpisodeTask,
    GymnasiumTask,
    GymTask,
    JsonlTask,
    ProgramTask,
    PromptsTask,
    PythonTool,
    ReActTask,
    SearchTool,
    TaskConfig,
    TextArenaTask,
    ToolConfig,
    VerifiersTask,
)
from onepolicy.errors import ServiceUnavailable, TrainingError, UsageError, printable

__all__ = [
    "R2",
    "R3",
    "CalculatorTool",
    "ChainTask",
    "CheckpointConfig",
    "CorrectionConfig",
    "DialogueTask",
    "DuplicateRoutes",
    "EngineConfig",
    "EpisodeTask",
    "EvalConfig",
    "Fp8",
    "Fp8Weight",
    "Frozen",
    "Gate",
    "GymTask",
    "GymnasiumTask",
    "HFEngineConfig",
    "Int8",
    "JsonlTask",
    "LogConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimConfig",
    "ProgramTask",
    "PromptsTask",
    "PythonTool",
    "QuantFormat",
    "ReActTask",
    "ReplayConfig",
    "ReplayOff",
    "RolloutConfig",
    "RolloutReplay",
    "RoutingPressure",
    "RunConfig",
    "SGLangConfig",
    "SamplingConfig",
    "SearchTool",
    "ServerEngineConfig",
    "ServiceUnavailable",
    "Simulated",
    "SoftReplay",
    "TaskConfig",
    "TextArenaTask",
    "ToolConfig",
    "TrainConfig",
    "TrainingError",
    "UsageError",
    "VLLMEngineConfig",
    "VLLMServerConfig",
    "VerifiersTask",
    "Weight",
    "WeightsReplay",
    "apply_override",
    "load",
    "printable",
    "read_recipe",
    "resolve",
]
