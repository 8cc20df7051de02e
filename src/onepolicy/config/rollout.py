"""Sampling of completions, and evaluation of a policy."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from onepolicy.config.base import (
    LARGEST_INT,
    Frozen,
    LargeCount,
    PositiveFloat,
    SmallCount,
    Tokens,
)
from onepolicy.config.engine import EngineConfig, HFEngineConfig
from onepolicy.config.pressure import PressureConfig
from onepolicy.config.quant import QuantConfig

SMALLEST_GROUP = 2


class SamplingConfig(Frozen):
    """Sampling parameters of training."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature, which the trainer's log-probabilities have too."""
    max_tokens: Tokens = 1024
    """Most tokens of a response, or of a turn in episodes of several."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of likeliest tokens with this probability; the trainer scores
    over the same sets (docs/supports.md). 1: all."""
    top_k: int = Field(0, ge=0, le=LARGEST_INT)
    """Sample from this many likeliest tokens, as top_p. 0: all."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Sample from tokens with at least this share of the likeliest one's probability, before top_k
    and top_p. 0: all."""

    missing_support: Literal["error", "drop"] = "error"
    """A sampled token without a support: stop the run, or play the episode again, and count it."""

    @property
    def narrows(self) -> bool:
        """True if tokens are left out, so that log-probabilities are over the tokens kept."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


def _off(value: Any) -> Any:
    if value == "off":
        return None
    return value


class RolloutConfig(Frozen):
    """Sampling for training."""

    engine: EngineConfig = HFEngineConfig()
    """Engine that samples. Without a kind: hf."""
    quant: QuantConfig = None
    """Format of the engine's weights, made at every weight sync. Unset or off: unquantised."""
    pressure: PressureConfig = None
    """Artificial noise on the engine's routers, for studies (docs/evidence_tables.md), never in
    evaluation. Unset or off: none."""
    prompts_per_step: LargeCount = 8
    """Prompts of a step."""
    group_size: SmallCount = 8
    """Completions per prompt (GRPO's G)."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling parameters of training."""
    max_staleness: Annotated[
        Annotated[int, Field(strict=True, ge=0, le=2**16)] | None, BeforeValidator(_off)
    ] = None
    """Most updates since a token was sampled: sampling goes on while the trainer learns
    (docs/training.md). 0: wait for the newest weights. Unset or off: take turns."""
    episode_retries: int = Field(1, ge=0, le=LARGEST_INT)
    """Times that an episode whose tool or environment failed is played again before it is
    dropped."""
    min_group_size: SmallCount | None = None
    """Least episodes of a group; a smaller one is dropped. Unset: half of group_size, at least 2 if
    there are 2."""

    @property
    def overlaps(self) -> bool:
        """True if sampling goes on while the trainer learns: tokens may be of older weights."""
        return bool(self.max_staleness)

    @property
    def samples(self) -> int:
        """Samples of a step."""
        return self.prompts_per_step * self.group_size

    @property
    def smallest_group(self) -> int:
        """Least episodes of a group that is trained on."""
        if self.min_group_size is not None:
            return self.min_group_size
        return max(min(SMALLEST_GROUP, self.group_size), self.group_size // 2)

    @model_validator(mode="before")
    @classmethod
    def _default_kind(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("engine"), dict):
            data = {**data, "engine": {"kind": "hf"} | data["engine"]}
        return data


class EvalConfig(Frozen):
    """Evaluation on held-out problems."""

    every: int = Field(10, ge=0, le=LARGEST_INT)
    """Steps between evaluations, and one after the last step. 0: never."""
    problems: LargeCount = 64
    """Held-out problems of an evaluation."""
    greedy: bool = True
    """Evaluate one greedy answer per problem."""
    k: int = Field(0, ge=0, le=2**20)
    """Sampled completions per problem, for avg@k and pass@k. 0: greedy only."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature of the k completions."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus of the k completions. 1: the whole distribution."""
    top_k: int = Field(0, ge=0, le=LARGEST_INT)
    """Likeliest tokens that the k completions are drawn from. 0: all."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Least share of the likeliest token's probability, for the k completions. 0: all."""
    max_tokens: Tokens | None = None
    """Most tokens of a response. Unset: rollout.sampling.max_tokens."""
    quantised: bool = False
    """Evaluate the weights of rollout.quant; else a second, embedded engine has unquantised
    ones."""
