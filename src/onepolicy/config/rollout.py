"""How completions are sampled, and evaluated."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from onepolicy.config.base import MOST, Amount, Few, Frozen, Many, Tokens
from onepolicy.config.engine import EngineConfig, HFEngineConfig, SGLangConfig, refuse_unlike_vllm
from onepolicy.config.quant import QuantConfig

MOST_SAMPLES = 2**22
"""Of one step."""


class SamplingConfig(Frozen):
    temperature: Amount = 1.0
    max_tokens: Tokens = 1024
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, le=MOST)


def _off(value: Any) -> Any:
    return None if value == "off" else value


class RolloutConfig(Frozen):
    engine: EngineConfig = HFEngineConfig()
    """Without a kind: hf."""
    quant: QuantConfig = None
    """Format of the engine's weights, made at every sync: int8, fp8, fp8-weight, simulated; unset or off: none. vLLM:
    int8 (weights of experts) and fp8."""
    prompts_per_step: Many = 8
    group_size: Few = 8
    """Completions per prompt (GRPO's G)."""
    sampling: SamplingConfig = SamplingConfig()
    max_staleness: Annotated[
        Annotated[int, Field(strict=True, ge=0, le=2**16)] | None, BeforeValidator(_off)
    ] = None
    """Updates that the policy may have had since any token of a step was sampled: sampling goes on while the trainer
    learns, so many steps ahead (docs/asynchronous.md). 0: it waits for the newest weights after all. Unset or off: one
    after the other."""
    episode_retries: int = Field(1, ge=0, le=MOST)
    """How often an episode whose tool or environment failed is played again before it is dropped."""
    min_group_size: Few | None = None
    """A group with fewer episodes left is dropped whole; unset: half of group_size, at least 2 if there are 2."""

    @property
    def overlaps(self) -> bool:
        """Whether sampling goes on while the trainer learns, so that a step's tokens may be of older weights."""
        return bool(self.max_staleness)

    @property
    def survivors(self) -> int:
        return self.min_group_size or max(min(2, self.group_size), self.group_size // 2)

    @model_validator(mode="after")
    def _quant_takes_effect(self) -> Self:
        quant, engine = self.quant, self.engine
        if quant is None:
            return self
        if isinstance(engine, SGLangConfig):
            raise ValueError(
                f"rollout.quant: {quant.format} is not available with rollout.engine.kind = sglang; use hf or vllm, or "
                "leave it out"
            )
        if not isinstance(engine, HFEngineConfig):
            refuse_unlike_vllm(quant, engine.dtype)
        if "lm_head" in quant.extra_modules and engine.lm_head == "float32":
            raise ValueError(
                "rollout.quant.extra_modules: lm_head contradicts rollout.engine.lm_head = float32; leave one out"
            )
        return self

    @model_validator(mode="after")
    def _a_step_ends(self) -> Self:
        samples = self.prompts_per_step * self.group_size
        if samples > MOST_SAMPLES:
            raise ValueError(
                f"rollout.prompts_per_step: {self.prompts_per_step} prompts of rollout.group_size {self.group_size} "
                f"are {samples:,} samples a step, more than {MOST_SAMPLES:,}; lower one of them"
            )
        return self

    @model_validator(mode="after")
    def _survivors_exist(self) -> Self:
        if self.min_group_size is not None and self.min_group_size > self.group_size:
            raise ValueError(
                f"rollout.min_group_size: {self.min_group_size} of rollout.group_size {self.group_size} episodes can "
                "never be left; lower it"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _default_kind(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("engine"), dict):
            data = {**data, "engine": {"kind": "hf"} | data["engine"]}
        return data


class EvalConfig(Frozen):
    every: int = Field(10, ge=0, le=MOST)
    """Steps between evaluations; 0: never. The last step of a run is always evaluated unless this is 0."""
    problems: Many = 64
    """Held-out problems."""
    greedy: bool = True
    k: int = Field(0, ge=0, le=2**20)
    """Sampled completions per problem for avg@k and pass@k; 0: greedy only."""
    temperature: Amount = 1.0
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, le=MOST)
    max_tokens: Tokens | None = None
    """Unset: rollout.sampling.max_tokens."""
    quantised: bool = False
    """Evaluate with the weights of rollout.quant; else a second, embedded engine evaluates unquantised ones."""

    @model_validator(mode="after")
    def _settings_take_effect(self) -> Self:
        if self.k:
            return self
        if not self.greedy:
            raise ValueError(
                "eval.k: 0 with eval.greedy=false leaves nothing to evaluate; set eval.k to 1 or more or "
                "eval.greedy=true (eval.every=0 turns evaluation off)"
            )
        for name in ("temperature", "top_p", "top_k"):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                raise ValueError(
                    f"eval.{name}: {value} has no effect with eval.k=0, which samples nothing; set eval.k to 1 or more "
                    f"or leave eval.{name} out"
                )
        return self
